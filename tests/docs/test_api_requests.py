"""The API serves no request, and knows no kind of error, that docs/api.md does not describe."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import cast

from tests.docs.markdown import ROOT, described_requests, rows
from vipd.api.context import ApiContext
from vipd.api.peers import Permission
from vipd.api.server import HTTP_STATUS, application

UNUSED = "overrides events flow_stats fleet sources wait_applied dataplane save_dataplane_choice".split()  # noqa: SIM905


def test_every_request_that_is_served_is_described_and_no_other() -> None:
    parts = dict.fromkeys(UNUSED) | {"reconciler": SimpleNamespace(containment=None)}
    parts |= {"maintenance": SimpleNamespace(), "announcer": SimpleNamespace()}
    router = application(cast("ApiContext", SimpleNamespace(**parts)), Permission("vipd-admin")).router
    served = {
        (route.method, re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), route.resource.canonical))
        for route in router.routes()
        if route.method != "HEAD" and route.resource
    }
    assert described_requests() == served


def test_every_kind_of_error_is_described_with_its_status() -> None:
    errors = rows(ROOT / "docs" / "api.md", "Errors")
    described = {kind: int(row[0]) for row in errors for kind in re.findall(r"`([^`]+)`", row[1])}
    assert described == HTTP_STATUS
