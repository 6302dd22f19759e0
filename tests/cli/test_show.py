from __future__ import annotations

import json

import pytest
import yaml

from tests.cli.conftest import Vipctl
from tests.cli.documents import DNS, RELOADED, STATUS, WEB, endpoint, one
from tests.cli.fake_daemon import FakeDaemon
from tests.lab.inside import declare
from vipd.cli.output import Column, Screen, table, truncate_middle
from vipd.model.formatting import duration

PLAIN = Screen(None, False)


@pytest.fixture(autouse=True)
def recorded(daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/services", {"services": [WEB, DNS]})
    daemon.answer("GET /v1/services/dns", one(DNS))
    daemon.answer("GET /v1/services/web", one(WEB))
    daemon.answer("GET /v1/status", STATUS)
    daemon.answer("GET /v1/export", {"services": [WEB["spec"], DNS["spec"]]})


def test_list_has_a_row_for_each_service(vipctl: Vipctl) -> None:
    ended = vipctl("list", "dns")
    assert ended.out == (
        "NAME                  VIP                   READY  AFFINITY  OWNER     STATUS\n"
        "kube-system/kube-dns  10.96.0.10:53/udp +1    2/3  10m       dns.yaml  2 unchecked\n"
    )
    assert (ended.code, ended.err) == (0, "")


def test_list_is_not_cut_where_nobody_looks(vipctl: Vipctl) -> None:
    out = vipctl("list").out
    assert WEB["name"] in out
    assert "[fd00:10:96:1234:5678:9abc:def0:10]:443/tcp " in out
    assert "…" not in out


def test_wide_tells_all(vipctl: Vipctl) -> None:
    header, web, dns = vipctl("list", "-o", "wide").out.splitlines()
    assert header.split()[-4:] == ["MASQUERADE", "FALLBACK", "ANNOUNCED", "MESSAGE"]
    assert web.split()[-4:] == ["always", "fd00:1::9", "-", "-"]
    assert dns.split()[1] == "10.96.0.10:53/udp,10.96.0.10:53/tcp"
    assert dns.split()[4] == "file:/etc/vipd/services.d/dns.yaml"


def test_names_and_headers(vipctl: Vipctl) -> None:
    names = f"{WEB['name']}\n{DNS['name']}\n"
    assert vipctl("list", "-q").out == names
    assert vipctl("list", "-o", "name").out == names
    assert vipctl("list").out.splitlines()[1:] != vipctl("list", "--no-headers").out.splitlines()[1:]
    assert "STATUS" not in vipctl("list", "--no-headers").out


@pytest.mark.parametrize("words", [["-o", "json"], ["--json"], ["-o", "yaml"]])
def test_documents_carry_what_the_daemon_said(vipctl: Vipctl, words: list[str]) -> None:
    expected = {"apiVersion": "vipd/v1", "services": [WEB, DNS]}
    assert yaml.safe_load(vipctl("list", *words).out) == expected
    assert next(iter(yaml.safe_load(vipctl("list", *words).out))) == "apiVersion"
    assert yaml.safe_load(vipctl("describe", "dns", *words).out) == {"apiVersion": "vipd/v1", "service": DNS}
    assert yaml.safe_load(vipctl("status", *words).out) == {"apiVersion": "vipd/v1"} | STATUS


def test_an_empty_list_hints_at_add(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/services", {"services": []})
    sources = [source | {"problems": [], "refused": []} for source in STATUS["sources"]]
    daemon.answer("GET /v1/status", STATUS | {"sources": sources})
    ended = vipctl("list")
    assert (ended.code, ended.out) == (0, "")
    assert "vipctl add" in ended.err
    assert json.loads(vipctl("list", "--json").out)["services"] == []


def test_what_is_not_there_does_not_hide_the_rest(vipctl: Vipctl) -> None:
    ended = vipctl("list", "nope", "dns", "neither", "-q")
    assert (ended.code, ended.out) == (3, "kube-system/kube-dns\n")
    assert [line.split(";")[0] for line in ended.err.splitlines()] == [
        "vipctl: no service nope",
        "vipctl: no service neither",
    ]


def test_describe_is_a_screen(vipctl: Vipctl) -> None:
    assert vipctl("describe", "dns").out == (
        "Name          kube-system/kube-dns\n"
        "Owner         file:/etc/vipd/services.d/dns.yaml, line 3\n"
        "Address       10.96.0.10\n"
        "Ports         53/udp (dns)\n"
        "              53/tcp to port 5353 (dns-tcp)\n"
        "Affinity      a client keeps its backend for 10m\n"
        "Masquerade    forwarded: new flows that come from other hosts\n"
        "Fallback      reject\n"
        "Status        unchecked: not all of its backends are known to work\n"
        "  Applied     yes\n"
        "  Ready       2 of 3\n"
        "  Message     2 unchecked\n"
        "\n"
        "10.96.0.10:53/udp  chain VIPD-SVC-UUUUUUUUUUUUUUUU\n"
        "  ADDRESS         WEIGHT  SHARE%  READY  HEALTH     CHAIN                      REASON\n"
        "  10.244.0.5:53        1    33.3  yes    unchecked  VIPD-SEP-AAAAAAAAAAAAAAAA\n"
        "  10.244.2.21:53       2    66.7  yes    unchecked  VIPD-SEP-BBBBBBBBBBBBBBBB\n"
        "  10.244.2.22:53       0     0.0  no     unchecked  -                          its weight is 0\n"
        "\n"
        "10.96.0.10:53/tcp\n"
        "  no backend is ready: new flows are dropped\n"
    )


def test_describe_shows_what_is_declared_besides(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    spec = DNS["spec"] | {
        "ports": [{"port": 53, "protocol": "udp", "target": 5353, "node_port": 30053}],
        "allow_from": ["10.0.0.0/8", "192.168.0.0/16"],
        "balance": "round-robin",
        "check": {"type": "http", "path": "/healthz", "interval": "1s"},
        "slow_start": "30s",
        "health_port": 30100,
        "on_remove": "reset",
        "flow_takeover": True,
        "limits": {"connections": 1000, "new_per_client": 5},
        "traffic_policy": {"external": "local"},
        "traffic_distribution": "prefer-same-node",
    }
    daemon.answer("GET /v1/services/dns", one(DNS | {"spec": spec}))
    out = vipctl("describe", "dns").out
    assert (
        "Ports         53/udp to port 5353, node port 30053\n"
        "Allow from    10.0.0.0/8, 192.168.0.0/16\n"
        "Health port   30100\n"
        "Balance       round-robin\n"
        "Check         http, path /healthz, interval 1s\n"
        "Slow start    30s\n"
        "On remove     reset\n"
        "Flow takeover yes\n"
        "Limits        connections 1000, new_per_client 5\n"
        "Affinity "
    ) in out
    assert (
        "Traffic       external local: only backends on this host\n"
        "              prefer-same-node: ready backends on this host, else those for its zone, else all\n"
        "Status "
    ) in out


def test_describe_says_that_zones_count(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    spec = DNS["spec"] | {"backends": [{"address": "10.244.0.5", "zone": "west"}]}
    daemon.answer("GET /v1/services/dns", one(DNS | {"spec": spec}))
    expected = "Traffic       prefer-same-zone: ready backends for this host's zone, else all\n"
    assert expected in vipctl("describe", "dns").out


def test_describe_shows_the_maximum_of_connections_where_a_backend_has_one(
    vipctl: Vipctl, daemon: FakeDaemon
) -> None:
    assert "MAX CONN" not in vipctl("describe", "dns").out
    first, *others = DNS["forwardings"]
    limited = first | {
        "endpoints": [endpoint("10.244.0.5", 53, max_connections=90), endpoint("10.244.0.6", 53)]
    }
    view = DNS | {"forwardings": [limited, *others]}
    daemon.answer_unlike_the_api("GET /v1/services/dns", one(view))
    lines = [line.split() for line in vipctl("describe", "dns").out.splitlines()]
    assert ["10.244.0.5:53", "1", "50.0", "yes", "unchecked", "90", "VIPD-SEP-AAAAAAAAAAAAAAAA"] in lines
    assert ["10.244.0.6:53", "1", "50.0", "yes", "unchecked", "-", "VIPD-SEP-AAAAAAAAAAAAAAAA"] in lines


@pytest.mark.parametrize(
    ("state", "ready", "expected"),
    [
        ("pending", 2, "pending: not in the kernel yet\n  Applied     no"),
        ("no-backends", 0, "no backends\n  Applied     yes"),
        ("no-backends", 1, "some frontends have no backends\n  Applied     yes"),
    ],
)
def test_describe_says_what_is_wrong(
    vipctl: Vipctl, daemon: FakeDaemon, state: str, ready: int, expected: str
) -> None:
    status = DNS["status"] | {"state": state, "message": "exit code 4", "ready": ready, "backends": 2}
    daemon.answer("GET /v1/services/dns", one(DNS | {"status": status}))
    out = vipctl("describe", "dns").out
    assert f"Status        {expected}\n" in out
    assert "  Message     exit code 4\n" in out


def test_describe_what_is_not_there(vipctl: Vipctl) -> None:
    assert vipctl("describe", "nope").code == 3


def test_status_in_sync(vipctl: Vipctl) -> None:
    ended = vipctl("status")
    assert ended.code == 0
    assert (
        "State        in sync: the kernel has every rule of what serves; 1 declaration has problems"
        in ended.out
    )
    assert "  ipv6       ip6tables v1.8.9 (nf_tables)\n" in ended.out
    assert "Backends     31 of 33 ready, 4 unchecked\n" in ended.out
    assert "Last apply   2026-01-01T00:00:05Z (" in ended.out
    assert ", took 31 ms\n" in ended.out
    assert "store   /var/lib/vipd/services.yaml         2         0\n" in ended.out
    problem, warning = STATUS["sources"][0]["problems"][0], STATUS["warnings"][0]
    assert f"Problems (the last good version of the file serves on)\n  {problem}\n" in ended.out
    (note,) = STATUS["sources"][0]["notes"]
    assert f"\nNotes\n  {note}\n\nWarnings\n  {warning}\n" in ended.out


def test_status_after_a_start_that_had_nothing_to_write(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/status", STATUS | {"applies": 0})
    assert "\nLast apply   none needed; the first comparison took 31 ms\n" in vipctl("status").out


def test_status_keeps_the_kernel_and_the_services_apart(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    ended = vipctl("status")
    assert "\nServing      degraded: 10 degraded, 2 unchecked of 12 services\n" in ended.out
    section = "Services that do not serve as declared\n"
    assert (
        f"\n{section}"
        "  10.244.0.5 is unhealthy in 9 services (dns, web and 7 more): connection refused, 3 of 3\n"
        "  degraded: 1 service (smtp); hint: vipctl describe smtp\n\n"
    ) in ended.out
    assert (ended.code, vipctl("status", "--exit-code").code) == (0, 6)
    assert vipctl("status", "--exit-code", "--json").code == 6
    numbers = dict.fromkeys(STATUS["serving"]["services"], 0) | {"ok": 12}
    well = {"state": "ok", "message": "", "services": numbers, "unhealthy": [], "others": []}
    daemon.answer("GET /v1/status", STATUS | {"serving": well | {"unhealthy_addresses": 0}})
    ended = vipctl("status", "--exit-code")
    assert ended.code == 0
    assert "\nServing      ok: every service serves as declared" in ended.out
    assert section not in ended.out
    daemon.answer("GET /v1/status", STATUS | {"state": "failed"})
    assert vipctl("status", "--exit-code").code == 1


@pytest.mark.parametrize("state", ["starting", "pending", "failed", "other"])
def test_status_out_of_sync_exits_1(vipctl: Vipctl, daemon: FakeDaemon, state: str) -> None:
    document = STATUS | {
        "state": state,
        "message": "iptables-restore: line 7 failed",
        "last_apply": None,
        "last_apply_seconds": 0.0,
        "sources": [],
        "warnings": [],
    }
    daemon.answer("GET /v1/status", document)
    ended = vipctl("status")
    assert ended.code == 1
    assert f"State        {state}" in ended.out
    assert "iptables-restore: line 7 failed" in ended.out
    assert "Last apply   none yet" in ended.out
    assert vipctl("status", "--json").code == 1


def test_reload_answers_when_the_kernel_has_the_rules(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/reload", RELOADED)
    assert vipctl("reload") == (
        0,
        "reloaded: 2 services, none changed; the kernel has the rules of every source\n",
        "",
    )
    assert vipctl("reload", "-q") == (0, "", "")
    assert json.loads(vipctl("reload", "--json").out)["applied"] is True
    daemon.answer("POST /v1/reload", RELOADED | {"applied": False, "message": "exit code 4"})
    ended = vipctl("reload")
    assert (ended.code, ended.out) == (1, "")
    assert "does not have their rules yet: exit code 4; hint: vipctl status" in ended.err


def test_export_is_a_declaration(vipctl: Vipctl) -> None:
    ended = vipctl("export")
    declaration = declare(ended.out, "export.yaml")
    assert declaration.problems == ()
    assert [service.name for service in declaration.services] == [WEB["name"], DNS["name"]]
    assert json.loads(vipctl("export", "-o", "json").out)["services"] == [WEB["spec"], DNS["spec"]]


def test_version_without_a_daemon_is_the_clients(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.answer("GET /v1/version", {"version": "9.9"})
    assert vipctl("version").out == "vipctl 0.1.0\nvipd 9.9\n"
    ended = vipctl("version", "--socket", "/nowhere", "--json")
    assert ended.code == 0
    assert json.loads(ended.out) == {"apiVersion": "vipd/v1", "vipctl": "0.1.0", "vipd": None}


def test_a_table_is_cut_only_as_far_as_columns_allow() -> None:
    columns = (Column("A", min_width=4), Column("B"))
    rows = [["abcdefghij", "0123456789"]]
    assert table(columns, rows, Screen(20, False), headers=False) == ["abcd…hij  0123456789"]
    assert table(columns, rows, Screen(5, False), headers=False) == ["ab…j  0123456789"]
    padded = [["ab        ", "0123456789"], ["abcdefghij", "0123456789"]]
    shown = table(columns, padded, Screen(20, False), headers=False)
    assert shown == ["ab        0123456789", "abcd…hij  0123456789"]
    assert table(columns, rows, PLAIN, headers=False) == ["abcdefghij  0123456789"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.9, "0s"), (45, "45s"), (600, "10m"), (5400, "1h30m"), (10800, "3h"), (86405, "1d")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shortened_keeps_both_ends() -> None:
    assert truncate_middle("abcdefgh", 8) == "abcdefgh"
    assert truncate_middle("abcdefgh", 5) == "ab…gh"
    assert truncate_middle("abcdefgh", 4) == "ab…h"


def test_status_says_of_each_problem_what_serves(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    refused = [
        {"unit": "file:a", "serves": "nothing of the file serves", "problems": ["a:1: bad"]},
        {
            "unit": "file:b",
            "serves": "1 of 3 services of the file serve",
            "problems": ["b:1: bad", "b:2: bad"],
        },
        {"unit": "file:c", "serves": "nothing of the file serves", "problems": ["c:1: bad"]},
    ]
    problems = ["the directory is odd", "a:1: bad", "b:1: bad", "b:2: bad", "c:1: bad"]
    source = STATUS["sources"][0] | {"problems": problems, "refused": refused}
    daemon.answer("GET /v1/status", STATUS | {"sources": [source]})
    out = vipctl("status").out
    assert "Problems (nothing of the file serves)\n  a:1: bad\n  c:1: bad\n" in out
    assert "Problems (1 of 3 services of the file serve)\n  b:1: bad\n  b:2: bad\n" in out
    assert "Problems\n  the directory is odd\n" in out
    assert "3 declarations have problems" in out
    daemon.answer("GET /v1/services", {"services": []})
    assert "no service serves, with 5 problems; hint: vipctl status" in vipctl("list").err


def test_status_of_a_daemon_that_does_not_say_what_serves(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    source = {k: v for k, v in STATUS["sources"][0].items() if k != "refused"}
    daemon.answer_unlike_the_api("GET /v1/status", STATUS | {"sources": [source]})
    assert f"Problems\n  {source['problems'][0]}\n" in vipctl("status").out


def test_a_sentence_that_does_not_fit_stands_below_its_row() -> None:
    columns = (Column("NAME"), Column("REASON", prose=True))
    rows = [["a" * 20, "short"], ["b", "a reason of several words that is too long"]]
    assert table(columns, rows, Screen(40, False), indent="  ") == [
        "  NAME                  REASON",
        "  aaaaaaaaaaaaaaaaaaaa  short",
        "  b",
        "      a reason of several words that is",
        "        too long",
    ]
    assert table(columns, rows, Screen(None, False))[2].endswith("a reason of several words that is too long")
