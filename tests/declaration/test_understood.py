"""Of a declaration that another version accepted: which services this one may serve."""

from __future__ import annotations

import pytest

from tests.lab.inside import declare
from tests.model.samples import HEAD

FIRST, SECOND, THIRD = (
    f"  - name: {name}\n    address: 10.96.0.{number}\n    ports: 80\n    backends: [10.244.0.5]\n"
    for number, name in enumerate("abc", 1)
)
LATER = "    later_key: 1\n"
FLOW = "{{name: {}, address: 10.96.0.{}, ports: [80], backends: [10.244.0.5]}}"


@pytest.mark.parametrize(
    ("text", "served"),
    [
        (FIRST + SECOND + THIRD, "abc"),
        (FIRST + LATER + SECOND + THIRD, "bc"),
        (FIRST + SECOND + LATER + THIRD, "ac"),
        (FIRST + SECOND + THIRD + LATER, "ab"),
        # One that cannot be read at all may take the one before it along.
        (FIRST + "  - {name: z, later: 1}\n" + SECOND, "b"),
        ("  - {name: z, later: 1}\n" + FIRST + SECOND, "ab"),
        # Two on one line go together.
        (f"  [{FLOW.format('a', 1)}, {FLOW.format('b', 2)}]\n", "ab"),
        (f"  [{FLOW.format('a', 1)[:-1]}, later: 1}}, {FLOW.format('b', 2)}]\n", ""),
        # These may concern every service.
        (FIRST + SECOND + "defaults: {later_key: 1}\n", ""),
        (FIRST + SECOND + "later_key: 1\n", ""),
        (FIRST + "---\napiVersion: vipd/v2\nservices: []\n", ""),
        (FIRST + "---\napiVersion: v1\nkind: Service\nspec: 1\n", ""),
        (FIRST + LATER * 200, ""),
    ],
)
def test_services_without_problems(text: str, served: str) -> None:
    found = declare(HEAD + text, "x.yaml", accepted=True)
    assert "".join(service.name for service in found.understood) == served
