from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Vipctl
from tests.cli.fake_daemon import FakeDaemon, Request

Json = dict[str, Any]


def given(lasting: timedelta | None = None, **changes: Any) -> Json:
    """The answer to an order about web/10.0.0.1, given a moment ago."""
    at = datetime.now(UTC) - timedelta(seconds=0.7)
    override: Json = {
        "service": "web",
        "backend": "10.0.0.1",
        "admin": "draining",
        "by": "root",
        "scope": "host",
    }
    override["at"] = at.isoformat()
    if lasting:
        override["until"] = (at + lasting).isoformat()
    answer = {
        "changed": True,
        "applied": True,
        "message": "",
        "stopping": False,
        "override": override,
        "backends": [{"service": "web", "backend": "10.0.0.1"}],
    }
    return answer | changes


TAKEN_BACK: Json = {
    "changed": True,
    "applied": True,
    "message": "",
    "overrides": [],
    "elsewhere": [],
    "backends": [],
}


@pytest.mark.parametrize("form", ["yaml", "json"])
@pytest.mark.parametrize("verb", ["drain", "disable", "resume"])
def test_orders_about_several_backends_are_one_document(
    vipctl: Vipctl, daemon: FakeDaemon, verb: str, form: str
) -> None:
    daemon.answer("POST /v1/overrides", given())
    daemon.answer("DELETE /v1/overrides", TAKEN_BACK)
    read = yaml.safe_load if form == "yaml" else json.loads
    one = read(vipctl(verb, "a/10.0.0.1", "-o", form).out)
    several = read(vipctl(verb, "a/10.0.0.1", "b/10.0.0.1", "-o", form).out)
    assert one["apiVersion"] == several["apiVersion"] == "vipd/v1"
    same = {key: value for key, value in one.items() if key != "apiVersion"}
    assert several["changes"] == [same, same]


def test_every_order_is_told_when_one_is_not_in_the_kernel(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/overrides", given(applied=False, message="iptables is busy"))
    ended = vipctl("drain", "a/10.0.0.1", "b/10.0.0.1")
    assert ended.code == 1
    assert ended.out.count("draining web/10.0.0.1") == 2
    assert ended.err.count("not in the kernel yet: iptables is busy") == 2


def test_a_daemon_that_goes_while_flows_are_waited_for_leaves_the_drain(
    vipctl: Vipctl, daemon: FakeDaemon
) -> None:
    daemon.answer("POST /v1/overrides", given())
    daemon.refuse("GET /v1/flows", 503, "internal", "the daemon stops")
    ended = vipctl("drain", "web/10.0.0.1", "--wait")
    assert ended.code == 1
    assert ended.err == "vipctl: the daemon stops; the drain stays: wait again with the same command\n"


def test_a_drain_waits_for_a_daemon_that_restarts(
    vipctl: Vipctl, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vipd.cli.waiting.POLL_SECONDS", 0.0)
    daemon.answer("POST /v1/overrides", given(applied=False, message="vipd is stopping", stopping=True))
    daemon.refuse("GET /v1/flows", 503, "busy", "vipd is starting")
    asked, handle = [0], daemon.handle

    def later(request: Request) -> tuple[int, Json | None]:
        asked[0] += request.path == "/v1/flows"
        if asked[0] == 3:
            daemon.answer("GET /v1/flows", {"flows": 0})
        return handle(request)

    monkeypatch.setattr(daemon, "handle", later)
    ended = vipctl("drain", "web/10.0.0.1", "--wait")
    assert (ended.code, ended.err) == (0, "vipd does not answer\nno flows left\n")
    assert vipctl("drain", "web/10.0.0.1").code == 1, "who does not wait learns of it"


def test_a_drain_does_not_wait_for_ever_for_a_daemon(
    vipctl: Vipctl, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vipd.cli.waiting.RESTART_SECONDS", 0.0)
    daemon.answer("POST /v1/overrides", given())
    daemon.refuse("GET /v1/flows", 503, "busy", "vipd is starting")
    ended = vipctl("drain", "web/10.0.0.1", "--wait")
    assert (ended.code, "the drain stays" in ended.err) == (4, True)


@pytest.mark.parametrize(
    ("hours", "told"), [(2, "in 2h"), (1.5, "in 1h30m"), (0.01, "in 36s"), (48, "in 2d")]
)
def test_the_end_of_an_order_is_the_time_that_was_asked_for(
    vipctl: Vipctl, daemon: FakeDaemon, hours: float, told: str
) -> None:
    daemon.answer("POST /v1/overrides", given(timedelta(hours=hours)))
    assert re.search(rf"; ends {told}$", vipctl("drain", "web/10.0.0.1", "--for", "2h").out)
    override = given(timedelta(hours=hours))["override"]
    daemon.answer("GET /v1/overrides", {"overrides": [override]})
    assert told in vipctl("overrides").out
