"""Another program takes something away from vipd's rules, and at once, before vipd knows of it, a service
changes: each kind of what can be taken away, on both dataplanes. The change is in the kernel, and nobody is
blamed."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.contract.contestants import Held, Iptables, Nftables, Real
from tests.dataplane.declared import backends, numbered
from tests.lab.examples import some
from tests.lab.waiting import wait_until
from vipd.dataplane.base import ApplyError
from vipd.dataplane.nftables.foreign_chains import in_iptables_way
from vipd.model.service import Affinity, Family, Service

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


class Written:
    """A dataplane that has written, and what its kernel is to hold after each change."""

    def __init__(self, one: Real) -> None:
        self.one = one

    async def prepare(self) -> None:
        """Write all there is, one after the other."""
        await self.one.restart()
        self.wanted: dict[str, Held] = {}
        for name, changed in CHANGES.items():
            await self.one.become(STAYING, *changed)
            self.wanted[name] = self.one.held()
        await self.one.become(STAYING, BEFORE)
        self.held = self.one.held()

    async def disturbed(self, command: str, change: str) -> None:
        """A change after a command of another program: all is right afterwards."""
        told = f"{command}; then {change}"
        self.one.dataplane.invalidate_all()
        await self.one.become(STAYING, BEFORE)
        assert self.one.held() == self.held
        self.one.node.run("bash", "-c", command)
        self.one.declare((STAYING, *CHANGES[change]))
        await self.one.dataplane.apply(await self.one.dataplane.plan())
        assert not self.one.dataplane.quarantined(), told
        assert REMOVED not in str(self.one.held()), told
        self.one.dataplane.invalidate_all()
        await self.one.step()
        assert self.one.held() == self.wanted[change], told


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
            for other, found in held.items()
            if other.startswith(f"{tool} {table} ")
            for rule in found
            if rule.endswith((f"-j {chain}", f"-g {chain}"))
        ]
        if chain.startswith("VIPD-"):
            ipt = f"iptables -w -t {table}"
            yield "; ".join(
                [*(f"{ipt} -D {rule}" for rule in users), f"{ipt} -F {chain}", f"{ipt} -X {chain}"]
            )


@pytest.mark.parametrize("kind", [Iptables, Nftables], ids=lambda kind: kind.__name__.lower())
def test_a_change_after_something_was_taken_away(kind: type[Real], tmp_path: Path) -> None:
    async def story() -> None:
        with kind(tmp_path) as one:
            written = Written(one)
            await written.prepare()
            commands = of_iptables(written.held) if kind is Iptables else of_nftables(written.held)
            tried = [(command, change) for command in dict.fromkeys(commands) for change in CHANGES]
            if kind is Nftables:
                await written.disturbed("nft flush map ip vipd numbered", "another backend")
            for command, change in some(tried, kind.__name__, fewer=10):
                await written.disturbed(command, change)

    asyncio.run(story())


REFUSED = "10.244.0.66"
"""Whoever has this backend is refused by the test."""


@pytest.mark.parametrize("kind", [Iptables, Nftables], ids=lambda kind: kind.__name__.lower())
def test_a_quarantined_service_never_gets_a_removed_backend_back(kind: type[Real], tmp_path: Path) -> None:
    """Its last rules stay; where another program has deleted them, only backends come back that it has."""

    async def story() -> None:
        with kind(tmp_path) as one:
            await one.restart()
            await one.become(STAYING, BEFORE)
            with one.refusing(REFUSED):
                await one.become(STAYING, replace(BEFORE, backends=backends("10.244.0.2", REFUSED)))
                assert [key.service for key in one.dataplane.quarantined()] == [BEFORE.name]
                assert REMOVED in str(one.held()), "the kernel has what it had"
                one.node.run("bash", "-c", {Iptables: NAT_GONE, Nftables: "nft flush table ip vipd"}[kind])
                one.node.run("bash", "-c", {Iptables: NAT_GONE, Nftables: "nft delete table ip vipd"}[kind])
                one.dataplane.invalidate_all()
                await one.step()
                assert [key.service for key in one.dataplane.quarantined()] == [BEFORE.name]
                assert REMOVED not in str(one.held())
                assert "10.244.0.2" in str(one.held())
                assert "10.244.0.1" in str(one.held())
            one.dataplane.retry_quarantined([BEFORE.name])
            await one.step()
            assert not one.dataplane.quarantined()
            assert REFUSED in str(one.held())

    asyncio.run(story())


NAT_GONE = "iptables -w -t nat -F; iptables -w -t nat -X"


@pytest.mark.parametrize(
    "foreign",
    [
        "chain PREROUTING { type nat hook prerouting priority -90; }",
        "chain POSTROUTING { type filter hook postrouting priority 100; }",
        "chain OUTPUT { }",
        "chain VIPD-SERVICES { type nat hook output priority -100; }",
    ],
)
def test_a_chain_in_iptables_way_is_one_fault_of_the_host(foreign: str, tmp_path: Path) -> None:
    """No service is blamed, and as many programs run for eighty services as for eight."""

    async def runs(number: int) -> int:
        named = foreign.split()[1]
        with Iptables(tmp_path / str(number)) as one:
            await one.restart()
            one.inside.nft("-f", "-", text=f"table ip nat {{\n{foreign}\n}}\n".replace("; }", ";\n}"))
            one.declare([numbered(n, "10.244.0.1") for n in range(number)])
            before = len(one.started)
            with pytest.raises(ApplyError, match="failed") as raised:
                await one.step()
            assert not one.dataplane.quarantined()
            hint = in_iptables_way(Family.IPV4, "VIPD", one.inside.open_socket)
            assert named in str(raised.value)
            assert foreign.startswith("chain POSTROUTING") or f"chain {named} of table ip nat" in hint
            one.inside.nft("delete table ip nat")
            steps = len(one.started) - before
            await one.step()
            assert not one.dataplane.quarantined()
            assert "10.244.0.1" in str(one.held())
            return steps

    async def story() -> None:
        few, many = await runs(8), await runs(80)
        assert many <= few + 2

    asyncio.run(story())


def test_a_table_that_another_process_owns_is_one_fault_of_the_host(tmp_path: Path) -> None:
    async def story() -> None:
        with Nftables(tmp_path) as one:
            await one.restart()
            one.declare([numbered(n, "10.244.0.1") for n in range(40)])
            argv = ["ip", "netns", "exec", one.node.namespace, "nft", "-i"]
            with subprocess.Popen(  # noqa: ASYNC220 (nothing else runs in this loop)
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            ) as owner:
                assert owner.stdin is not None
                owner.stdin.write("add table ip vipd { flags owner; }\n")
                owner.stdin.flush()
                wait_until(lambda: "ip vipd" in one.inside.nft("list", "tables"), "the foreign table")
                before = len(one.started)
                with pytest.raises(ApplyError, match="belongs to another process"):
                    await one.step()
            assert not one.dataplane.quarantined()
            assert len(one.started) - before < 12
            await one.step()
            assert "10.244.0.1" in str(one.held())

    asyncio.run(story())
