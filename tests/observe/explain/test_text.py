"""`vipctl explain -f FILE --dataplane nftables`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Vipctl, vipctl
from tests.cli.test_explain import DECLARED, HOST
from vipd.cli.explain import _rule_lines
from vipd.cli.output import Screen

__all__ = ["vipctl"]

TEXT = """\
10.10.0.9 -> 10.96.0.10:53/udp is balanced over 2 backends, masqueraded

BACKEND         SHARE%  SOURCE SEEN
10.244.0.5:53     33.3  this host's
10.244.2.21:53    66.7  this host's

Rules, after the fork those on the way to 10.244.2.21:53:
  ip vipd
    prerouting                on to dispatch
    dispatch                  by address and port: 10.96.0.10:53/udp of dns
    handover                  the chain for services of its kind: forwarded-random-3
    forwarded-random-3        marked for masquerade, unless from this host
    forwarded-random-3        on to random-3
    random-3                  flow marked as vipd's
    random-3            33.3  one of 3 slots at random: slot 0 -> 10.244.0.5:53
    random-3            66.7  one of 3 slots at random: 2 of them -> 10.244.2.21:53
    random-3                  DNAT to the backend in that slot: 10.244.2.21:53
    postrouting               on to counting
    counting                  flow counted, udp
    postrouting               this host's address becomes the source

These are vipd's own rules alone; vipctl trace follows a real packet.
"""


@pytest.fixture
def declared(tmp_path: Path) -> str:
    path = tmp_path / "services.yaml"
    path.write_text(DECLARED)
    return str(path)


@pytest.mark.parametrize("chosen", [("--dataplane", "nftables"), ("--set", "dataplane=nftables")])
def test_a_packet_is_followed_through_the_table(
    vipctl: Vipctl, declared: str, chosen: tuple[str, str]
) -> None:
    ended = vipctl("explain", "-f", declared, *HOST, *chosen, "--from", "10.10.0.9", "10.96.0.10:53/udp")
    assert (ended.code, ended.out, ended.err) == (0, TEXT, "")


def test_the_option_has_the_last_word(vipctl: Vipctl, declared: str) -> None:
    words = ("--set", "dataplane=nftables", "--dataplane", "iptables", "--from", "10.10.0.9", "dns")
    assert "VIPD-SERVICES" in vipctl("explain", "-f", declared, *HOST, *words).out
    ended = vipctl("explain", "--dataplane", "nftables", "--from", "local", "dns")
    assert (ended.code, "go with -f" in ended.err) == (2, True)


def test_long_names_of_chains_fit_the_screen() -> None:
    chain = "gate-edge-node-random-1024-pinned-10800-node-local-random-1024-pinned-10800"
    rule = {"table": "ip vipd", "chain": chain, "rule": f"goto {chain}", "meaning": f"on to {chain}"}
    last = {**rule, "rule": "drop", "meaning": "dropped: no backend is ready, or none on this host"}
    outcome = {"probability": 1.0, "backend": None, "verdict": "dropped", "rules": [rule, last]}
    lines = list(_rule_lines([outcome], Screen(80, colour=False)))
    assert max(map(len, lines)) <= 80
    assert sum("…" in line for line in lines) == 2
