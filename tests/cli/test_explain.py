from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from tests.cli.conftest import Vipctl
from tests.cli.fake_daemon import FakeDaemon

DECLARED = """
apiVersion: vipd/v1
services:
  - {name: dns, address: 10.96.0.10, ports: [53/udp], backends: [10.244.0.5, 10.244.2.21@2]}
  - {name: dead, address: 10.96.0.30, ports: [80/tcp]}
  - {name: many, address: 10.96.0.40, ports: [80/tcp], backends: [
      10.244.3.1, 10.244.3.2, 10.244.3.3, 10.244.3.4, 10.244.3.5, 10.244.3.6, 10.244.3.7, 10.244.3.8,
      10.244.3.9]}
"""

HOST = ("--set", "host_addresses=[192.0.2.1]")


@pytest.fixture
def declared(tmp_path: Path) -> str:
    path = tmp_path / "services.yaml"
    path.write_text(DECLARED)
    return str(path)


TEXT = """\
10.10.0.9 -> 10.96.0.10:53/udp is balanced over 2 backends, masqueraded

BACKEND         SHARE%  SOURCE SEEN
10.244.0.5:53     33.3  this host's
10.244.2.21:53    66.7  this host's

Rules, after the fork those on the way to 10.244.2.21:53:
  nat
    PREROUTING                       on to VIPD-PREROUTING
    VIPD-PREROUTING                  flow marked as vipd's
    VIPD-PREROUTING                  on to VIPD-SERVICES
    VIPD-SERVICES                    10.96.0.10:53/udp of dns
    VIPD-SVC-KKDJTG42DQ3TVSVW        to be masqueraded, unless from this host
    VIPD-MARK-MASQ                   marked for masquerade
    VIPD-SVC-KKDJTG42DQ3TVSVW  33.3  to 10.244.0.5:53, probability 0.333333
    VIPD-SVC-KKDJTG42DQ3TVSVW  66.7  to 10.244.2.21:53, all others
    VIPD-SEP-FZ7LGTEUYYXOD6WE        DNAT to 10.244.2.21:53
  filter
"""


def test_a_packet_is_followed_through_files(vipctl: Vipctl, declared: str) -> None:
    ended = vipctl("explain", "-f", declared, *HOST, "--from", "10.10.0.9", "10.96.0.10:53/udp")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(TEXT)
    assert ended.out.splitlines()[-3].endswith("this host's address becomes the source")
    assert "vipd's own rules alone" in ended.out.splitlines()[-1], "it says what it leaves out"
    assert max(map(len, ended.out.splitlines())) <= 80


def test_the_rules_themselves_are_shown_where_wanted(vipctl: Vipctl, declared: str) -> None:
    question = ("explain", "-f", declared, *HOST, "--from", "10.10.0.9", "10.96.0.10:53/udp", "-o", "wide")
    lines = [line for line in vipctl(*question).out.splitlines() if "DNAT to 10.244.2.21:53" in line]
    assert len(lines) == 1
    assert lines[0].endswith(" -j DNAT --to-destination 10.244.2.21:53")
    assert lines[0].split()[0] == "VIPD-SEP-FZ7LGTEUYYXOD6WE"
    table = vipctl(*question, "--dataplane", "nftables").out
    assert "(element 10.96.0.10 . udp . 53" in table, "of a map the element that matched"


def test_jumps_to_chains_where_nothing_matched_are_left_out(vipctl: Vipctl, declared: str) -> None:
    question = ("explain", "-f", declared, *HOST, "--from", "10.10.0.9", "10.96.0.10:53/udp")
    lines = vipctl(*question).out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.split()[:1] == ["FORWARD"]] == [
        "on to VIPD-FORWARD"
    ]
    answered = json.loads(vipctl(*question, "-o", "json").out)["explanation"]["outcomes"][0]["rules"]
    assert sum(rule["chain"] == "FORWARD" for rule in answered) > 1


def test_refused_is_an_answer_too(vipctl: Vipctl, declared: str) -> None:
    ended = vipctl("explain", "-f", declared, *HOST, "--from", "local", "dead")
    assert ended.code == 0
    assert ended.out.splitlines()[:3] == [
        "192.0.2.1 -> 10.96.0.30:80/tcp is refused: no backend of dead is ready",
        "refused by a TCP reset: clients see connection refused",
        "note: 192.0.2.1 is assumed as the source; --from ADDRESS tells another",
    ]
    assert ended.out.splitlines()[-3].split() == [
        "VIPD-SERVICES",
        "10.96.0.30:80/tcp:",
        "refused,",
        "dead",
        "has",
        "no",
        "backends",
    ]


def test_long_forks_are_cut(vipctl: Vipctl, declared: str) -> None:
    out = vipctl("explain", "-f", declared, *HOST, "--from", "1.2.3.4", "many").out
    assert out.count("    to 10.244.3.") + out.count("  to 10.244.3.") == 8
    assert "and 1 more, as above" in out
    assert "10.244.3.9:80" in out


def test_the_same_from_daemon_and_files(vipctl: Vipctl, daemon: FakeDaemon, declared: str) -> None:
    words = ("--from", "10.10.0.9", "10.96.0.10:53/udp")
    offline = json.loads(vipctl("explain", "-f", declared, *HOST, *words, "-o", "json").out)
    assert (offline["apiVersion"], daemon.requests) == ("vipd/v1", [])
    without_health = vipctl("explain", "-f", declared, *HOST, *words).out
    assert "HEALTH" not in without_health, "only a daemon knows it"
    for backend in offline["explanation"]["backends"]:
        assert backend["health"] is None
        backend["health"] = "unchecked"
    daemon.answer("GET /v1/explain", {"explanation": offline["explanation"]})
    text = vipctl("explain", *words).out
    assert text.count("  unchecked") == len(offline["explanation"]["backends"])
    assert re.sub(" +HEALTH| +unchecked", "", text) == without_health
    assert json.loads(vipctl("explain", *words, "--json").out) == offline
    assert parse_qs(daemon.last.query) == {"from": ["10.10.0.9"], "target": ["10.96.0.10:53/udp"]}


@pytest.mark.parametrize("verb", [["explain", "--from", "local", "-f"], ["render"], ["check"]])
def test_what_check_refuses_is_not_explained(vipctl: Vipctl, declared: str, verb: list[str]) -> None:
    own = ("--set", "host_addresses=[10.96.0.10]")
    ended = vipctl(*verb, declared, *(["dns"] if verb[0] == "explain" else []), *own)
    assert ended.code == 1
    assert "10.96.0.10 is an address of this host itself" in ended.err


def test_settings_count(vipctl: Vipctl, declared: str) -> None:
    for mode, seen in (("always", True), ("hairpin", False)):
        words = ("--set", f"masquerade={mode}", "--from", "local", "dns", "--json")
        out = json.loads(vipctl("explain", "-f", declared, *HOST, *words).out)["explanation"]
        assert {backend["masqueraded"] for backend in out["backends"]} == {seen}
        assert {backend["source_seen"] for backend in out["backends"]} == {"host" if seen else "client"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--from", "local", "nope"), 3, "no service nope"),
        (("--from", "local", "10.96.0.99"), 2, "has no port"),
        (("--from", "fd00::9", "dns"), 2, "dns has no ipv6 address"),
        (("--from", "here", "dns"), 2, "is a name, not an IP address"),
        (("dns",), 2, "--from"),
    ],
)
def test_faults(vipctl: Vipctl, declared: str, words: tuple[str, ...], code: int, said: str) -> None:
    ended = vipctl("explain", "-f", declared, *HOST, *words)
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err


def test_faults_of_the_daemon(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.refuse("GET /v1/explain", 404, "not-found", "no service nope")
    assert vipctl("explain", "--from", "local", "nope").code == 3
    daemon.refuse("GET /v1/explain", 400, "malformed", "it has no port")
    assert vipctl("explain", "--from", "local", "10.96.0.10").code == 2
    ended = vipctl("explain", "--from", "local", "--set", "masquerade=always", "dns")
    assert (ended.code, "go with -f" in ended.err) == (2, True)
    assert len(daemon.requests) == 2


def test_on_host_asks_the_daemon_alone(vipctl: Vipctl, daemon: FakeDaemon, declared: str) -> None:
    offline = json.loads(
        vipctl("explain", "-f", declared, *HOST, "--from", "10.10.0.9", "10.96.0.10:53/udp", "-o", "json").out
    )
    view = {**offline["explanation"], "verdict": "unknown", "outcomes": [], "backends": []}
    daemon.answer("GET /v1/explain", {"explanation": view})
    ended = vipctl("explain", "--on-host", "--from", "10.10.0.9", "10.96.0.10:53/udp")
    assert (ended.code, daemon.last.query) == (0, "from=10.10.0.9&target=10.96.0.10%3A53%2Fudp&on_host=true")
    assert "Rules of this host count" in ended.out.splitlines()[-1]
    ended = vipctl("explain", "--on-host", "-f", declared, "--from", "10.10.0.9", "10.96.0.10:53/udp")
    assert (ended.code, ended.out) == (2, "")
    assert "--on-host asks the daemon" in ended.err
