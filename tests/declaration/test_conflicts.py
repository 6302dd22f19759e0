"""What two services cannot both have, in one file and in several."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.inside import declare, vipctl
from tests.model.samples import HEAD


def item(name: str, address: str, ports: str = "[53/udp]") -> str:
    return f"  - {{name: {name}, address: {address}, ports: {ports}}}\n"


ONCE = "one address, port and protocol can serve once"
OWN_NAME = "give each service its own name"
UNNAMED = "  - {address: 10.0.0.1, ports: [53/udp]}\n"


@pytest.mark.parametrize(
    ("items", "problems"),
    [
        ([item("a", "10.0.0.1"), item("b", "10.0.0.1", "[53/tcp]")], []),
        (
            [item("a", "10.0.0.1"), item("b", "10.0.0.1", "[53/tcp, 53/udp]"), item("c", "10.0.0.1")],
            [
                f"a.yaml:4: b: 10.0.0.1:53/udp already belongs to a at a.yaml:3; {ONCE}",
                f"a.yaml:5: c: 10.0.0.1:53/udp already belongs to a at a.yaml:3; {ONCE}",
            ],
        ),
        (
            [item("a", "10.0.0.1"), item("a", "10.0.0.2")],
            [f"a.yaml:4: the name a is already taken by the service at a.yaml:3; {OWN_NAME}"],
        ),
        (
            [UNNAMED, UNNAMED],
            [f"a.yaml:4: 10.0.0.1:53/udp already belongs to the service at a.yaml:3; {ONCE}"],
        ),
    ],
    ids=["protocols", "frontend", "name", "without names"],
)
def test_the_later_service_is_told_where_the_earlier_one_stands(
    items: list[str], problems: list[str]
) -> None:
    assert [str(problem) for problem in declare(HEAD + "".join(items)).problems] == problems


def test_of_several_files_the_first_named_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("z.yaml").write_text(HEAD + "\n" + item("a", "10.0.0.1"))
    Path("b.yaml").write_text(HEAD + item("b", "10.0.0.1") + item("a", "10.0.0.2"))
    assert vipctl(["check", "z.yaml", "b.yaml"]) == 1
    assert capsys.readouterr().err.splitlines()[:2] == [
        f"b.yaml:3: b: 10.0.0.1:53/udp already belongs to a at z.yaml:4; {ONCE}",
        f"b.yaml:4: the name a is already taken by the service at z.yaml:4; {OWN_NAME}",
    ]
