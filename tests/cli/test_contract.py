"""The fake daemon's documents are held to the real API's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.contract import differences
from tests.cli.documents import DNS, STATUS, changed, one
from tests.cli.fake_daemon import FakeDaemon

HEAD = {"apiVersion": "vipd/v1"}


def test_what_the_real_api_answers_is_no_difference() -> None:
    assert differences("GET /v1/services/kube-system/kube-dns", {**HEAD, **one(DNS)}) == []
    assert differences("GET /v1/status", {**HEAD, **STATUS}) == []


@pytest.mark.parametrize(
    ("request_", "document", "difference"),
    [
        ("GET /v1/status", STATUS | {"pid": "7"}, "GET /v1/status.pid: str instead of number"),
        ("GET /v1/status", STATUS | {"ready": None}, "GET /v1/status.ready: null instead of number"),
        ("GET /v1/status", STATUS | {"colour": 1}, "GET /v1/status.colour: the API has none"),
        (
            "GET /v1/services",
            {"services": [DNS, {k: v for k, v in DNS.items() if k != "owner"}]},
            "GET /v1/services.services[].owner: is missing",
        ),
        (
            "DELETE /v1/services/a/b/backends",
            changed() | {"results": [{"name": "a"}]},
            "DELETE /v1/services/TARGET/backends.results[].action: is missing",
        ),
        (
            "GET /v1/other",
            {},
            "GET /v1/other: the contract has no answer of the real API to it; see REQUESTS",
        ),
    ],
)
def test_every_other_document_is(request_: str, document: dict[str, Any], difference: str) -> None:
    assert differences(request_, {**HEAD, **document}) == [difference]
    with pytest.raises(AssertionError) as refused:
        FakeDaemon(Path()).answer(request_, document)
    assert difference in str(refused.value)
