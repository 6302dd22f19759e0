"""`vipctl events`, and the events at the end of `describe`: screens of fixed answers."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs

import pytest

from tests.cli.conftest import Vipctl
from tests.cli.documents import DNS, one
from tests.cli.fake_daemon import FakeDaemon
from vipd.cli.events import event_line
from vipd.cli.output import Screen

TERMINAL = Screen(80, False)
PIPE = Screen(None, False)

LONG = "iptables-restore: line 15 failed (line 15: -A VIPD-SVC-IRLFZTWWAX46TPJ3 -j VIPD-SEP-MYHUQWTV25F7DWX7)"


def event(name: str = "service-changed", **more: Any) -> dict[str, Any]:
    """An Event of docs/api.md."""
    made: dict[str, Any] = {
        "id": 7,
        "time": "2026-01-01T12:00:05.123Z",
        "event": name,
        "level": "info",
        "services": ["dns"],
        "backends": [],
        "unit": "",
        "cause": "file /etc/vipd/services.d/dns.yaml:3",
        "reason": "affinity",
        "count": 1,
        "first": 7,
        "since": "2026-01-01T12:00:05.123Z",
    }
    return made | more


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (event(), "service-changed       dns: affinity; by file /etc/vipd/services.d/dns.yaml:3"),
        (
            event(
                "backend-health", backends=["10.0.0.5:53"], cause="check tcp", reason="unhealthy: x", count=17
            ),
            "backend-health        dns/10.0.0.5:53: unhealthy: x (x17); by check tcp",
        ),
        (
            event(
                "override-given", services=["a", "b", "c"], backends=["10.0.0.5"], cause="user root (pid 8)"
            ),
            "override-given        10.0.0.5 in 3 services: affinity; by user root (pid 8)",
        ),
        (
            event(
                "services-changed",
                services=["a", "b", "c"],
                cause="file /x.yaml",
                reason="3 added, 0 changed, 0 removed",
            ),
            "services-changed      3 services: 3 added, 0 changed, 0 removed; by file /x.yaml",
        ),
        (event("started", services=[], cause="", reason="vipd 0.1.0"), "started               vipd 0.1.0"),
        (
            event("service-quarantined", cause="kernel", reason=LONG),
            f"service-quarantined   dns: {LONG}; by kernel",
        ),
    ],
)
def test_a_line_tells_what_about_whom_why_and_by_whom(shown: dict[str, Any], text: str) -> None:
    assert event_line(shown, PIPE)[15:] == f"  {text}"


@pytest.mark.parametrize("cause", ["kernel", "process iptables (pid 812) of some-configurator (pid 800)", ""])
@pytest.mark.parametrize("reason", ["", LONG])
@pytest.mark.parametrize("name", ["started", "override-taken-back", "declaration-accepted"])
def test_a_line_fits_a_terminal_and_its_cause_goes_last(name: str, reason: str, cause: str) -> None:
    shown = event_line(event(name, reason=reason, cause=cause, count=117), TERMINAL)
    assert len(shown) <= 80
    assert "(x117)" in shown
    if cause == "kernel":
        assert shown.endswith("; by kernel")
    assert ("…" in shown) == (bool(reason) or len(cause) > 20)


def test_on_a_terminal_a_file_is_told_by_its_name_alone() -> None:
    assert event_line(event(), TERMINAL).endswith("dns: affinity; by file dns.yaml:3")


def test_what_is_asked_for(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/events", {"events": [event()]})
    assert vipctl("events").code == 0
    assert parse_qs(daemon.last.query) == {"limit": ["50"]}
    vipctl("events", "--service", "10.96.0.10:53/udp", "-n", "7", "--since", "10m")
    asked = parse_qs(daemon.last.query)
    assert (asked["service"], asked["limit"]) == (["10.96.0.10:53/udp"], ["7"])
    began = datetime.now(UTC) - datetime.fromisoformat(asked["since"][0])
    assert timedelta(minutes=10) <= began < timedelta(minutes=15)
    assert json.loads(vipctl("events", "-o", "json").out)["events"] == [event()]
    assert vipctl("events", "-n", "-1").code == 2


def test_following_nobody_fails_and_does_not_wait(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.refuse("GET /v1/events", 409, "conflict", "100 others follow already")
    ended = vipctl("events", "-f")
    assert (ended.code, ended.err) == (1, "vipctl: 100 others follow already\n")
    ended = vipctl("--socket", "/nonexistent/vipd.sock", "events", "-f")
    assert ended.code == 4
    assert "cannot reach vipd" in ended.err


def test_describe_ends_with_the_last_events_their_age_first(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/services/dns", one(DNS))
    without = vipctl("describe", "dns").out
    then = (datetime.now(UTC) - timedelta(hours=2, minutes=3, seconds=30)).isoformat()
    order = event("override-given", backends=["10.244.0.5"], reason="draining", cause="user root (pid 8)")
    daemon.answer("GET /v1/events", {"events": [event(time=then), order | {"time": then}]})
    out = vipctl("describe", "dns").out
    assert parse_qs(daemon.last.query) == {"service": [DNS["name"]], "limit": ["5"]}
    assert out.startswith(without)
    assert out[len(without) :].splitlines() == [
        "",
        "Events",
        "  2h3m  service-changed       affinity; by file /etc/vipd/services.d/dns.yaml:3",
        "  2h3m  override-given        10.244.0.5: draining; by user root (pid 8)",
    ]
