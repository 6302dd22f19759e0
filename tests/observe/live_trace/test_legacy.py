"""Rules of legacy iptables, which cannot be traced."""

from __future__ import annotations

import sys

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.observe.live_trace.tracing import NOBODY

pytestmark = pytest.mark.root

TARGET = "127.0.0.1:9/tcp"


def test_with_the_legacy_variant_it_says_what_can_be_traced(host: Node) -> None:
    with Daemon(host, iptables_variant="legacy") as daemon:
        ended = daemon.vipctl("trace", "--send", TARGET, check=False)
    said = ended.stderr.splitlines()[-1]
    assert (ended.returncode, ended.stdout) == (1, "")
    assert said.startswith("vipctl: packets cannot be traced: vipd writes its rules with iptables v")
    hint = "iptables_variant: nft or dataplane: nftables can be traced; vipctl explain needs neither"
    assert said.endswith(f"(legacy); hint: {hint}")


def test_legacy_tables_beside_it_are_told_of(host: Node) -> None:
    command = ("-m", "vipd.cli.main", "--socket", NOBODY, "trace", "--send", TARGET)
    host.run("iptables-legacy", "-t", "nat", "-A", "OUTPUT", "-j", "ACCEPT")
    ended = host.run(sys.executable, *command, timeout=60.0)
    host.run("iptables-legacy", "-t", "nat", "-F")
    assert ended.stdout.splitlines()[1] == "kernel:   goes on unchanged; connection refused"
    note = "vipctl: this host has tables of legacy iptables, too: their rules cannot be traced"
    assert note in ended.stderr.splitlines()
