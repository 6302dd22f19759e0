"""What vipctl makes of answers that a daemon gives in rare states, and of daemons that answer otherwise."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.cli.conftest import Vipctl
from tests.cli.documents import DNS, STATUS, WEB, changed, one
from tests.cli.fake_daemon import FakeDaemon, Request
from tests.lab.inside import Vipd, running
from tests.lab.stories import story_of
from tests.model.samples import block

Json = dict[str, Any]


def shape(value: Any) -> Any:
    """Keys and types of a document; of a list the shape of its items together."""
    if isinstance(value, dict):
        return {key: "any" if key in ("spec", "settings") else shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


def differences(ours: Any, real: Any, at: str = "") -> list[str]:
    """Where a document differs in keys or types from one of the real API; no item and null are like any."""
    if isinstance(ours, dict) and isinstance(real, dict):
        return [f"{at}.{key}" for key in ours.keys() ^ real.keys()] + [
            found
            for key in ours.keys() & real.keys()
            for found in differences(ours[key], real[key], f"{at}.{key}")
        ]
    if isinstance(ours, list) and isinstance(real, list):
        return differences(ours[0], real[0], f"{at}[]") if ours and real else []
    return [at] if ours != real and "NoneType" not in (ours, real) else []


@story_of(running)
async def test_the_documents_of_the_fake_daemon_are_like_the_real_ones(vipd: Vipd) -> None:
    for view in (DNS, WEB):
        real = (await vipd.add(view["spec"])).status
        assert real == 200
        service = await vipd.service(view["name"].replace("/", "%2F"))
        assert differences(shape(view), shape(service)) == []
    (vipd.services_dir / "bad.yaml").write_text("apiVersion: vipd/v1\nservices: [{}]\n")
    vipd.backends["10.0.0.1"] = "connection refused"
    check = "check: {type: tcp, port: 1, fall: 1, interval: 100ms}"
    vipd.declare(block("10.96.0.77", "sick", "10.0.0.1").replace("]}", f"], {check}}}"))
    await vipd.reload()
    status = await vipd.until_status(lambda status: status["serving"]["unhealthy"])
    assert differences(shape(STATUS), shape({k: v for k, v in status.items() if k != "apiVersion"})) == []
    answer = await vipd.add(DNS["spec"])
    assert differences(shape(changed(("created", "dns"))), shape(answer.body)) == [".apiVersion"]


def test_warnings_of_a_change_are_told_on_stderr(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    warned = {"warnings": ["service web: one", "service web: two"]}
    daemon.answer("POST /v1/services", changed(("created", "web")) | warned)
    words = ("add", "10.96.0.10:53/udp", "--name", "web")
    ended = vipctl(*words)
    assert (ended.code, ended.err) == (0, "warning: service web: one\nwarning: service web: two\n")
    assert vipctl(*words, "-q") == (0, "", "")
    ended = vipctl(*words, "-o", "json")
    assert (json.loads(ended.out)["warnings"], ended.err) == (warned["warnings"], "")


KINDS = {"malformed": (400, 1), "forbidden": (403, 4), "not-found": (404, 3), "owned": (409, 1)}
KINDS |= {"internal": (500, 1), "unavailable": (503, 1)}
"""Each with its status, and the exit code that it leads to."""


def test_refusals_have_the_daemons_words_and_a_code(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    for kind, (status, code) in KINDS.items():
        daemon.refuse("DELETE /v1/services/dns", status, kind, "no", why="because", hint="do that")
        assert vipctl("remove", "dns") == (code, "", "vipctl: no: because; hint: do that\n"), kind


def test_problems_come_as_lines_before_the_message(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.refuse("POST /v1/reload", 422, "invalid", "2 problems", problems=["a.yaml:1: x", "b.yaml:2: y"])
    assert vipctl("reload") == (1, "", "a.yaml:1: x\nb.yaml:2: y\nvipctl: 2 problems\n")


def test_a_difference_of_the_kernel_and_no_error_that_looks_like_one(
    vipctl: Vipctl, daemon: FakeDaemon
) -> None:
    daemon.answer("GET /v1/diff", {"in_sync": False, "diff": "+ -A VIPD-SERVICES\n"})
    assert vipctl("diff") == (1, "+ -A VIPD-SERVICES\n", "")
    assert vipctl("diff", "-o", "json").code == 1
    daemon.refuse("GET /v1/diff", 500, "internal", "no")
    assert vipctl("diff").code == 2
    daemon.refuse("GET /v1/diff", 403, "forbidden", "no")
    assert vipctl("diff").code == 4
    assert vipctl("diff", "--socket", "/nowhere").code == 4


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"state": "starting"}, "State        starting"),
        ({"state": "pending", "message": "soon"}, "soon"),
        ({"state": "other"}, "State        other"),
        ({"state": "failed", "last_apply": None, "last_apply_seconds": 0.0}, "Last apply   none yet"),
        ({"state": "failed", "quarantined": {"web": "line 7 failed"}}, "line 7 failed"),
    ],
)
def test_what_is_not_in_sync_exits_1(vipctl: Vipctl, daemon: FakeDaemon, changes: Json, shown: str) -> None:
    daemon.answer("GET /v1/status", STATUS | changes)
    ended = vipctl("status")
    assert (ended.code, vipctl("status", "--json").code) == (1, 1)
    assert shown in ended.out


def test_a_status_names_what_serves_of_each_declaration_with_problems(
    vipctl: Vipctl, daemon: FakeDaemon
) -> None:
    nothing, some = "nothing of the file serves", "1 of 3 services of the file serve"
    refused = [
        {"unit": f"file:{name}", "serves": serves, "problems": [f"{name}:1: bad"]}
        for name, serves in {"a": nothing, "b": some, "c": nothing}.items()
    ]
    problems = ["odd", *(problem for unit in refused for problem in unit["problems"])]
    source = STATUS["sources"][0] | {"problems": problems, "refused": refused}
    daemon.answer("GET /v1/status", STATUS | {"sources": [source], "applies": 0})
    out = vipctl("status").out
    assert "Problems (nothing of the file serves)\n  a:1: bad\n  c:1: bad\n" in out
    assert "Problems (1 of 3 services of the file serve)\n  b:1: bad\n" in out
    assert "Problems\n  odd\n" in out
    assert "3 declarations have problems" in out
    assert "\nLast apply   none needed; the first comparison took 31 ms\n" in out
    daemon.answer("GET /v1/services", {"services": []})
    daemon.answer("GET /v1/status", STATUS | {"sources": [source, source]})
    assert "no service serves, with 8 problems; hint: vipctl status" in vipctl("list").err
    older = {k: v for k, v in STATUS["sources"][0].items() if k != "refused"}
    daemon.answer("GET /v1/status", STATUS | {"sources": [older]})
    assert f"Problems\n  {older['problems'][0]}\n" in vipctl("status").out


def test_a_service_of_which_some_frontends_have_no_backends(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    status = DNS["status"] | {"state": "no-backends", "message": "exit code 4", "ready": 1, "backends": 2}
    daemon.answer("GET /v1/services/dns", one(DNS | {"status": status}))
    out = vipctl("describe", "dns").out
    assert "Status        some frontends have no backends\n  Applied     yes\n" in out
    assert "no backend is ready: new flows are dropped\n" in out


def test_set_changes_a_part_of_a_field_of_the_version_that_it_read(
    vipctl: Vipctl, daemon: FakeDaemon
) -> None:
    spec = {"ports": ["80/tcp"], "backends": ["10.0.0.1"]}
    daemon.answer("GET /v1/services/web", one(DNS | {"name": "web", "spec": spec}))
    daemon.answer("PATCH /v1/services/web", changed(("changed", "web")))
    for words in ("--external-policy local", "--node-port 30080"):
        assert vipctl("set", "web", *words.split()).code == 0
        assert daemon.last.query == "version=0123456789abcdef"
    assert vipctl("set", "web/10.0.0.1", "--backup", "true").code == 0
    assert daemon.last.query == "version=0123456789abcdef"


def test_a_daemon_that_knows_no_confirmation_is_found_out(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/services", changed(("created", "web")))
    ended = vipctl("add", "10.96.0.1:80", "--confirm", "60s", "-q")
    assert (ended.code, daemon.last.query) == (1, "confirm=60")
    assert "the change stays without a confirmation: vipd is older than vipctl" in ended.err


def test_a_version_is_that_of_the_client_where_no_daemon_is(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/version", {"version": "9.9"})
    assert vipctl("version").out == "vipctl 0.1.0\nvipd 9.9\n"
    ended = vipctl("version", "--socket", "/nowhere", "--json")
    assert json.loads(ended.out) == {"apiVersion": "vipd/v1", "vipctl": "0.1.0", "vipd": None}
    assert ended.code == 0
    assert "vipd 9.9" in vipctl("--socket", "/nowhere", "version", "--socket", str(daemon.socket)).out


@pytest.mark.parametrize("changed", [True, False])
def test_set_dataplane_may_be_quiet(vipctl: Vipctl, daemon: FakeDaemon, changed: bool) -> None:
    daemon.answer("POST /v1/dataplane", {"changed": changed, "before": "iptables", "dataplane": "nftables"})
    assert vipctl("set-dataplane", "nftables", "-q") == (0, "", "")
    assert vipctl("set-dataplane", "nftables").out != ""


def test_describe_shows_each_name_and_what_is_wrong_with_it(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    good: Json = {
        "backend": "dns:web.internal:80",
        "fallback": False,
        "addresses": ["10.0.0.1", "10.0.0.2"],
        "held": ["10.0.0.2"],
        "left_out": 3,
        "answered": "2000-01-01T00:00:00Z",
        "ttl": 60.0,
        "next_seconds": 41.0,
        "fault": "",
    }
    bad = good | {"backend": "srv:x", "fallback": True, "addresses": [], "held": [], "left_out": 0}
    bad |= {"answered": None, "fault": "the name does not exist (NXDOMAIN)"}
    spec = DNS["spec"] | {"fallback": {"backends": ["10.0.0.9", {"dns": "x", "port": 1}, {"srv": "x"}]}}
    daemon.answer("GET /v1/services/dns", one(DNS | {"spec": spec, "names": [good, bad]}))
    told = vipctl("describe", "dns").out
    assert "Names         dns:web.internal:80: 2 addresses, answered " in told
    assert "asked again in 41s" in told
    assert "not in the last answer, serving on: 10.0.0.2" in told
    assert "3 more are left out: dns_max_addresses" in told
    assert "srv:x, of the fallback: 0 addresses, asked again in 41s\n" in told
    assert "Fallback      10.0.0.9,dns:x:1,srv:x\n" in told
    assert "the name does not exist (NXDOMAIN)" in told


def event(name: str = "service-changed", **more: Any) -> Json:
    """An Event of docs/api.md."""
    time = "2026-01-01T12:00:05.123Z"
    return {
        "id": 7,
        "time": time,
        "event": name,
        "level": "info",
        "services": ["dns"],
        "backends": [],
        "unit": "",
        "cause": "file /etc/vipd/services.d/dns.yaml:3",
        "reason": "affinity",
        "count": 1,
        "first": 7,
        "since": time,
        **more,
    }


LONG = "iptables-restore: line 15 failed (line 15: -A VIPD-SVC-IRLFZTWWAX46TPJ3 -j VIPD-SEP-MYHUQWTV25F7DWX7)"
LINES: list[tuple[Json, str]] = [
    (event(), "service-changed       dns: affinity; by file /etc/vipd/services.d/dns.yaml:3"),
    (
        event("backend-health", backends=["10.0.0.5:53"], cause="check tcp", reason="unhealthy: x", count=17),
        "backend-health        dns/10.0.0.5:53: unhealthy: x (x17); by check tcp",
    ),
    (
        event("override-given", services=["a", "b", "c"], backends=["10.0.0.5"], cause="user root (pid 8)"),
        "override-given        10.0.0.5 in 3 services: affinity; by user root (pid 8)",
    ),
    (
        event(
            "services-changed", services=["a", "b", "c"], cause="file /x.yaml", reason="3 added, 0 removed"
        ),
        "services-changed      3 services: 3 added, 0 removed; by file /x.yaml",
    ),
    (event("started", services=[], cause="", reason="vipd 0.1.0"), "started               vipd 0.1.0"),
    (
        event("service-quarantined", cause="kernel", reason=LONG),
        f"service-quarantined   dns: {LONG}; by kernel",
    ),
]


def test_events_tell_what_about_whom_why_and_by_whom(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/events", {"events": [shown for shown, _ in LINES]})
    assert [line[17:] for line in vipctl("events").out.splitlines()] == [text for _, text in LINES]
    assert daemon.last.query == "limit=50"
    vipctl("events", "--service", "10.96.0.10:53/udp", "-n", "7", "--since", "10m")
    query = dict(part.split("=") for part in daemon.last.query.split("&"))
    assert (query["service"], query["limit"]) == ("10.96.0.10%3A53%2Fudp", "7")
    since = datetime.fromisoformat(query["since"].replace("%3A", ":").replace("%2B", "+"))
    assert timedelta(minutes=10) <= datetime.now(UTC) - since < timedelta(minutes=15)
    daemon.refuse("GET /v1/events", 409, "conflict", "100 others follow already")
    assert vipctl("events", "-f") == (1, "", "vipctl: 100 others follow already\n")
    assert vipctl("--socket", "/nonexistent/vipd.sock", "events", "-f").code == 4


def order(lasting: timedelta | None = None, **changes: Any) -> Json:
    """The answer to an order about web/10.0.0.1, given a moment ago."""
    at = datetime.now(UTC) - timedelta(seconds=0.7)
    override = {"service": "web", "backend": "10.0.0.1", "admin": "draining", "by": "root", "scope": "host"}
    override |= {"at": at.isoformat()} | ({"until": (at + lasting).isoformat()} if lasting else {})
    answer = {"changed": True, "applied": True, "message": "", "stopping": False, "override": override}
    return answer | {"backends": [{"service": "web", "backend": "10.0.0.1"}]} | changes


@pytest.mark.parametrize(
    ("hours", "told"), [(2, "in 2h"), (1.5, "in 1h30m"), (0.01, "in 36s"), (48, "in 2d")]
)
def test_the_end_of_an_order_is_the_time_that_was_asked_for(
    vipctl: Vipctl, daemon: FakeDaemon, hours: float, told: str
) -> None:
    daemon.answer("POST /v1/overrides", order(timedelta(hours=hours)))
    assert re.search(rf"; ends {told}$", vipctl("drain", "web/10.0.0.1", "--for", "2h").out)
    daemon.answer("GET /v1/overrides", {"overrides": [order(timedelta(hours=hours))["override"]]})
    assert told in vipctl("overrides").out


def test_a_daemon_that_goes_while_flows_are_waited_for_leaves_the_drain(
    vipctl: Vipctl, daemon: FakeDaemon
) -> None:
    daemon.answer("POST /v1/overrides", order())
    daemon.refuse("GET /v1/flows", 503, "internal", "the daemon stops")
    ended = vipctl("drain", "web/10.0.0.1", "--wait")
    assert ended.code == 1
    assert ended.err == "vipctl: the daemon stops; the drain stays: wait again with the same command\n"


def test_a_drain_waits_for_a_daemon_that_restarts(
    vipctl: Vipctl, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answer("POST /v1/overrides", order(applied=False, message="vipd is stopping", stopping=True))
    daemon.refuse("GET /v1/flows", 503, "busy", "vipd is starting")
    handle = daemon.handle

    def later(request: Request) -> tuple[int, Json | None]:
        if [each.path for each in daemon.requests].count("/v1/flows") == 1:
            daemon.answer("GET /v1/flows", {"flows": 0})
        return handle(request)

    monkeypatch.setattr(daemon, "handle", later)
    ended = vipctl("drain", "web/10.0.0.1", "--wait")
    assert (ended.code, ended.err) == (0, "vipd does not answer\nno flows left\n")
    assert vipctl("drain", "web/10.0.0.1").code == 1, "who does not wait learns of it"
