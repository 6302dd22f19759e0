"""`vipctl explain`: what the daemon answers is what files come to. More is in `screens/explain.txt`."""

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


def test_jumps_to_chains_where_nothing_matched_are_left_out(vipctl: Vipctl, declared: str) -> None:
    question = ("explain", "-f", declared, *HOST, "--from", "10.10.0.9", "10.96.0.10:53/udp")
    lines = vipctl(*question).out.splitlines()
    forward = [line.split(maxsplit=1)[1] for line in lines if line.split()[:1] == ["FORWARD"]]
    assert forward == ["on to VIPD-FORWARD"]
    answered = json.loads(vipctl(*question, "-o", "json").out)["explanation"]["outcomes"][0]["rules"]
    assert sum(rule["chain"] == "FORWARD" for rule in answered) > 1


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


def test_faults_of_the_daemon(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    daemon.refuse("GET /v1/explain", 404, "not-found", "no service nope")
    assert vipctl("explain", "--from", "local", "nope").code == 3
    daemon.refuse("GET /v1/explain", 400, "malformed", "it has no port")
    assert vipctl("explain", "--from", "local", "10.96.0.10").code == 2
    assert len(daemon.requests) == 2
