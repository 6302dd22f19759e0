"""What the log says of services that come, change and go."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.control.reconciling import DNS, WEB, IsolatedReconciler, run_story
from tests.model.samples import declared, service
from vipd.control.service_log import LINES_AT_ONCE, log_changes
from vipd.host.systemd.fields import ATTRIBUTE
from vipd.model.service import Affinity, Backend, Service


def logged_lines(caplog: pytest.LogCaptureFixture, before: list[Service], after: list[Service]) -> list[str]:
    """The lines for a change from some services to others."""
    caplog.set_level(logging.INFO)
    new = {s.name: s for s in after}
    log_changes({s.name: s for s in before}, new, list(new))
    return caplog.messages


def test_a_line_for_each_that_comes_or_goes(caplog: pytest.LogCaptureFixture) -> None:
    filed = service("filed", "10.96.0.12", "/etc/vipd/x.yaml", 7, "10.244.0.1", "10.244.0.2")
    assert logged_lines(caplog, [DNS], [filed]) == [
        "service filed added: 2 backends, 2 unchecked; by file /etc/vipd/x.yaml:7",
        "service dns removed; was by cli",
    ]
    assert getattr(caplog.records[0], ATTRIBUTE) == {
        "VIPD_EVENT": ("service-added",),
        "VIPD_SERVICE": ("filed",),
        "VIPD_UNIT": ("file:/etc/vipd/x.yaml",),
        "VIPD_CAUSE": ("file /etc/vipd/x.yaml:7",),
        "VIPD_REASON": ("2 backends, 2 unchecked",),
    }


def test_a_change_says_what_is_different(caplog: pytest.LogCaptureFixture) -> None:
    old = replace(DNS, backends=tuple(Backend(f"10.244.0.{n}") for n in (1, 2, 3)))
    backends = (Backend("10.244.0.2"), Backend("10.244.0.3", weight=5), Backend("10.244.0.4"))
    new = replace(old, backends=backends, affinity=Affinity(60))
    (line,) = logged_lines(caplog, [old], [new])
    assert line == "service dns changed: affinity, backends +10.244.0.4 -10.244.0.1 ~10.244.0.3; by cli"
    carried = getattr(caplog.records[0], ATTRIBUTE)
    assert set(carried["VIPD_BACKEND"]) == {"10.244.0.1", "10.244.0.3", "10.244.0.4"}


def test_what_is_the_same_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert logged_lines(caplog, [DNS, WEB], [replace(DNS), WEB]) == []


def test_a_bulk_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    many = [service(f"s{n}", f"10.97.0.{n}") for n in range(1, LINES_AT_ONCE + 1)]
    assert logged_lines(caplog, [DNS], many) == ["services: 20 added, 0 changed, 1 removed"]


def test_of_the_first_load_the_number_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def story(isolated: IsolatedReconciler) -> None:
        await isolated.fulfilled(isolated.reconciler.request_sync())
        assert [line.split(" after")[0] for line in caplog.messages] == ["1 service in the kernel"]
        isolated.source.candidate = declared(DNS, WEB)
        await isolated.fulfilled(isolated.reconciler.request_sync())
        assert "service web added: 1 backend, 1 unchecked; by cli" in caplog.messages

    run_story(story, DNS)
