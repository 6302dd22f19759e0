"""Another program takes something away from vipd's rules, and at once, before vipd knows of it, a service
changes: each kind of what can be taken away, on both dataplanes. The change is in the kernel, and nobody is
blamed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.declared import backends, numbered
from tests.dataplane.hosts import Held, Host, entered
from tests.lab.examples import some
from tests.lab.inside import DATAPLANES, NotWrittenError, written
from tests.lab.waiting import wait_until
from vipd.model.service import Affinity, Service

pytestmark = pytest.mark.root

REMOVED = "10.244.0.77"
STAYING = numbered(1, "10.244.0.1")
BEFORE = replace(numbered(2, REMOVED, "10.244.0.2"), affinity=Affinity(600))
CHANGES: dict[str, tuple[Service, ...]] = {
    "a backend less": (replace(BEFORE, backends=backends("10.244.0.2")),),
    "another backend": (replace(BEFORE, backends=backends("10.244.0.3")),),
    "no backend": (replace(BEFORE, backends=()),),
    "removed": (),
}
_DECLARING = ("type", "flags", "comment", "size", "timeout", "counter")
"""Words with which lines of a set begin that are no elements."""


def of_nftables(held: Held) -> Iterator[str]:
    """Commands that take something away from the table of IPv4."""
    yield "nft delete table ip vipd"
    yield "nft flush table ip vipd"
    for part, lines in held.items():
        family, table, kind, name, *_ = (*part.split(), "", "", "")
        if (family, table) != ("ip", "vipd") or not kind:
            continue
        yield f"nft flush {kind} ip vipd {name}"
        for element in lines if kind in ("set", "map") else ():
            if element and not element.startswith(_DECLARING):
                key = element.partition(" counter ")[0].partition(" : ")[0]
                yield f"nft delete element ip vipd {name} '{{ {key} }}'"


def of_iptables(held: Held) -> Iterator[str]:
    """Commands that take something away from the rules of IPv4."""
    yield "iptables -w -t nat -F; iptables -w -t nat -X"
    yield "iptables -w -t filter -F; iptables -w -t filter -X"
    yield "nft delete table ip nat"
    for part, rules in held.items():
        tool, table, chain = part.split()
        if tool != "iptables":
            continue
        yield f"iptables -w -t {table} -F {chain}"
        yield from (f"iptables -w -t {table} -D {rule.removeprefix('-A ')}" for rule in rules)
        users = [
            rule.removeprefix("-A ")
            for other, others in held.items()
            if other.startswith(f"{tool} {table} ")
            for rule in others
            if rule.endswith((f"-j {chain}", f"-g {chain}"))
        ]
        if chain.startswith("VIPD-"):
            ipt = f"iptables -w -t {table}"
            yield "; ".join(
                [*(f"{ipt} -D {rule}" for rule in users), f"{ipt} -F {chain}", f"{ipt} -X {chain}"]
            )


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_a_change_after_something_was_taken_away(dataplane: str, tmp_path: Path) -> None:
    with entered(dataplane, tmp_path) as host:
        wanted: dict[str, Held] = {}
        for name, changed in CHANGES.items():
            host.vipd.become(STAYING, *changed)
            wanted[name] = host.held()
        host.vipd.become(STAYING, BEFORE)
        before = host.held()
        commands = of_iptables(before) if dataplane == "iptables" else of_nftables(before)
        tried = [(command, change) for command in dict.fromkeys(commands) for change in CHANGES]
        always = [("nft flush map ip vipd numbered", "another backend")] if dataplane == "nftables" else []
        for command, change in [*always, *some(tried, dataplane, fewer=10)]:
            failed = f"{command}; then {change}"
            host.vipd.doubt()
            host.vipd.become(STAYING, BEFORE)
            assert host.held() == before
            host.do(command)
            host.vipd.declare((STAYING, *CHANGES[change]))
            host.vipd.step(tidy=False)
            assert not host.vipd.refused(), failed
            assert REMOVED not in str(host.held()), failed
            host.vipd.doubt()
            host.vipd.step()
            assert host.held() == wanted[change], failed


IN_THE_WAY = {
    "chain PREROUTING { type nat hook prerouting priority -90; }": "priority -90 in place of -100",
    "chain POSTROUTING { type filter hook postrouting priority 100; }": "",
    "chain OUTPUT { }": "it has no hook",
    "chain VIPD-SERVICES { type nat hook output priority -100; }": "it has a hook",
}
"""Chains that iptables cannot use, and what the hint says of them."""


def add_to_nat(host: Host, chain: str) -> None:
    host.node.run("nft", "-f", "-", text=f"table ip nat {{\n{chain}\n}}\n".replace("; }", ";\n}"))


@pytest.mark.parametrize("foreign", IN_THE_WAY)
def test_a_chain_in_iptables_way_is_one_fault_of_the_host(foreign: str, tmp_path: Path) -> None:
    """No service is blamed, and as many programs run for eighty services as for eight."""

    def programs_run(number: int) -> int:
        with entered("iptables", tmp_path / str(number)) as host:
            add_to_nat(host, foreign)
            host.vipd.declare([numbered(n, "10.244.0.1") for n in range(number)])
            before = len(host.programs.started)
            with pytest.raises(NotWrittenError, match=f"failed.*{foreign.split()[1]}"):
                host.vipd.step()
            assert not host.vipd.refused()
            host.do("nft delete table ip nat")
            steps = len(host.programs.started) - before
            host.vipd.step()
            assert not host.vipd.refused()
            assert "10.244.0.1" in str(host.held())
            return steps

    assert programs_run(80) <= programs_run(8) + 2


def test_the_hint_names_the_chain_in_iptables_way(tmp_path: Path) -> None:
    config, services = tmp_path / "vipd.yaml", tmp_path / "services.d"
    services.mkdir()
    (services / "web.yaml").write_text(written([STAYING]))
    config.write_text(f"dataplane: iptables\nservices_dir: {services}\nstate_dir: {tmp_path / 'state'}\n")
    with entered("iptables", tmp_path) as host:
        for foreign, reason in IN_THE_WAY.items():
            add_to_nat(host, foreign)
            command = (sys.executable, "-m", "vipd", "--config", str(config), "--once")
            done = host.node.run(*command, check=False)
            name = foreign.split()[1]
            hint = f"chain {name} of table ip nat is another program's, not iptables' ({reason}): rename it"
            assert done.returncode != 0
            assert not reason or hint in done.stderr, done.stderr
            host.do("nft delete table ip nat")


def test_a_table_that_another_process_owns_is_one_fault_of_the_host(tmp_path: Path) -> None:
    with entered("nftables", tmp_path) as host:
        host.vipd.declare([numbered(n, "10.244.0.1") for n in range(40)])
        argv = ["ip", "netns", "exec", host.node.namespace, "nft", "-i"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as owner:
            assert owner.stdin is not None
            owner.stdin.write("add table ip vipd { flags owner; }\n")
            owner.stdin.flush()
            wait_until(lambda: "ip vipd" in host.namespace.do("nft", "list", "tables"), "the foreign table")
            before = len(host.programs.started)
            with pytest.raises(NotWrittenError, match="belongs to another process"):
                host.vipd.step()
        assert not host.vipd.refused()
        assert len(host.programs.started) - before < 12
        host.vipd.step()
        assert "10.244.0.1" in str(host.held())
