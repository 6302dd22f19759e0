"""From any declared state to any other: where the rules end, and what packets meet on the way."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dataplane import states
from tests.dataplane.declared import HTTP, backends
from tests.dataplane.iptables.fake_kernel import Block, FakeKernel
from tests.dataplane.namespace import Namespace
from tests.dataplane.reach import Reach, declared_shares, reach, traced_shares
from tests.lab.examples import examples
from tests.lab.inside import Runner, Synced, forwardings, synced
from vipd.model.service import Family, Frontend, Service, family_of

FOREIGN = """\
*filter
:FOREIGN - [0:0]
:INPUT DROP [0:0]
-A FOREIGN -s 198.51.100.1/32 -j DROP
-A INPUT -j FOREIGN
-A FORWARD -j FOREIGN
COMMIT
*nat
:FOREIGN-NAT - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAAA - [0:0]
:VIPD-MINE - [0:0]
-A PREROUTING -s 198.51.100.1/32 -j FOREIGN-NAT
-A POSTROUTING -s 198.51.100.1/32 -j MASQUERADE
COMMIT
"""
OURS = re.compile(r"-j VIPD-(?!MINE)")

Walk = Sequence[tuple[Service, ...]]


@contextmanager
def machine(run: Runner, cidrs: tuple[str, ...] = (), **more: Any) -> Iterator[Synced]:
    with tempfile.TemporaryDirectory() as directory:
        yield synced("iptables", run, Path(directory), cluster_cidrs=cidrs, **more)


def foreign_kernel() -> FakeKernel:
    kernel = FakeKernel()
    kernel.restore(FOREIGN)
    return kernel


def rules(kernel: FakeKernel) -> dict[tuple[Family, str], str]:
    """Everything the kernel holds, but for tables in which nothing has been changed."""
    found = {}
    for family in Family:
        for table in tables(kernel.saved(family)):
            found[family, table.partition("\n")[0]] = table
    return found


def cold_start(state: tuple[Service, ...], cidrs: tuple[str, ...]) -> dict[tuple[Family, str], str]:
    """What a first daemon on this host writes."""
    kernel = foreign_kernel()
    with machine(kernel.run, cidrs) as fresh:
        fresh.become(*state)
    return rules(kernel)


between_states = st.lists(st.sampled_from(["", "restart", "doubt", "passing"]), min_size=6, max_size=6)
"""What happens after each state of a walk; `passing`: states that are never written."""


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(30))
@given(walk=states.walks, cidrs=states.cluster_cidrs, between=between_states)
def test_every_walk_ends_where_a_cold_start_does(
    walk: Walk, cidrs: tuple[str, ...], between: list[str]
) -> None:
    """Packets go where the declaration says, rules of others stay, and in the end nothing is left."""
    kernel, alone = foreign_kernel(), foreign_kernel()
    with machine(kernel.run, cidrs) as walking:
        for state, event in zip(walk, between, strict=False):
            walking.become(*state)
            for passing in (*walk, state) if event == "passing" else ():
                walking.declare(passing)
            if event == "restart":
                walking.restart()
            elif event == "doubt":
                walking.doubt()
            assert walking.step() == ""
            assert rules(kernel) == cold_start(state, cidrs)
            assert foreign(kernel) == foreign(alone)
            found = reached(kernel, frontends(state))
            for frontend, shares in declared_shares(forwardings(state, cluster_cidrs=cidrs)).items():
                for traced in traced_shares(found[frontend]):
                    assert traced == pytest.approx(dict(shares), abs=2e-5)
        for state in (*walk, ()):
            walking.declare(state)
        walking.step()
        assert not ours(kernel)
        assert rules(kernel) == rules(alone)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(10))
@given(before=states.state(), after=states.state(), cidrs=states.cluster_cidrs)
def test_a_daemon_started_on_other_rules_of_its_own_ends_at_a_cold_start(
    before: tuple[Service, ...], after: tuple[Service, ...], cidrs: tuple[str, ...]
) -> None:
    kernel = foreign_kernel()
    with machine(kernel.run, ("10.20.0.0/16", "10.30.0.0/16"), flow_mark_bit=5) as old:
        old.become(*before)
    with machine(kernel.run, cidrs) as new:
        new.become(*after)
        assert rules(kernel) == cold_start(after, cidrs)
        new.become()
        assert not ours(kernel)


@pytest.mark.root
@pytest.mark.parametrize("variant", ["nft", "legacy"])
@settings(deadline=None, max_examples=examples(4), suppress_health_check=[HealthCheck.too_slow])
@given(walk=states.walks, cidrs=states.cluster_cidrs)
def test_walk_over_the_real_kernel(variant: str, walk: Walk, cidrs: tuple[str, ...]) -> None:
    """It holds the same rules as the fake, and looking at it afresh finds nothing to do."""
    kernel = FakeKernel(default=variant)
    with (
        Namespace() as namespace,
        machine(kernel.run, cidrs) as faked,
        machine(namespace.run, cidrs, iptables_variant=variant) as real,
    ):
        for state in walk:
            faked.become(*state)
            real.become(*state)
            real.doubt()
            assert real.pending() == ""
            for stem, family in (("iptables", Family.IPV4), ("ip6tables", Family.IPV6)):
                assert namespace_rules(namespace, f"{stem}-{variant}-save") == tables(kernel.saved(family))


@pytest.mark.slow
@pytest.mark.parametrize("load", ["small", "large"])
@settings(deadline=None, max_examples=examples(12))
@given(walk=states.walks, cidrs=states.cluster_cidrs)
def test_no_packet_finds_a_service_half_programmed(load: str, walk: Walk, cidrs: tuple[str, ...]) -> None:
    """Guarantee G1: with the services in one restore; and split over several, for VIPs that keep theirs."""
    if load == "small":
        check_each_block(walk, cidrs, frontends_of_both)
    else:
        check_each_block(walk, cidrs, keeping_their_forwarding, batch=2)


def test_a_vip_that_leaves_a_service_in_a_large_load_is_not_half_programmed() -> None:
    """The leaf chain of the service it leaves must not be rewritten while the VIP is still sent there."""
    two = ("10.96.0.1", "10.96.0.2")
    before = (
        Service("test/a", two, (HTTP,), backends("10.244.0.1")),
        Service("test/b", ("10.96.0.3",), (HTTP,), backends("10.244.0.3")),
    )
    after = (
        Service("test/a", two[:1], (HTTP,), backends("10.244.0.2")),
        Service("test/b", ("10.96.0.3", "10.96.0.2"), (HTTP,), backends("10.244.0.3")),
        *(Service(f"test/c{i}", (f"10.96.1.{i}",), (HTTP,), backends("10.244.0.4")) for i in range(3)),
    )
    check_each_block([before, after], (), frontends_of_both, batch=2)


def test_a_service_that_stops_being_refused_is_refused_until_it_is_served() -> None:
    """While another one's refusal comes, so that the chain of refusals is written before and after nat."""
    first, second = Service("test/a", ("10.96.0.1",), (HTTP,)), Service("test/b", ("10.96.0.2",), (HTTP,))
    nodes = backends("10.244.0.1")
    before = (first, replace(second, backends=nodes))
    after = (replace(first, backends=nodes), second)
    check_each_block([before, after], (), frontends_of_both, reject_unused_ports=False)


Kept = Callable[[tuple[Service, ...], tuple[Service, ...]], set[Frontend]]
"""Which frontends of an old and a new state must be served at every moment between."""


def frontends_of_both(old: tuple[Service, ...], new: tuple[Service, ...]) -> set[Frontend]:
    return frontends(old) & frontends(new)


def keeping_their_forwarding(old: tuple[Service, ...], new: tuple[Service, ...]) -> set[Frontend]:
    owners = [
        {
            Frontend(address, forwarding.port, forwarding.key.protocol): forwarding.key
            for forwarding in forwardings(state)
            for address in forwarding.addresses
        }
        for state in (old, new)
    ]
    return {frontend for frontend, key in owners[0].items() if owners[1].get(frontend) == key}


def check_each_block(walk: Walk, cidrs: tuple[str, ...], choose_kept: Kept, **more: Any) -> None:
    kernel = FakeKernel()
    with machine(kernel.run, cidrs, **more) as walking:
        old: tuple[Service, ...] = ()
        for new in walk:
            kept = choose_kept(old, new)
            limited = frontends(service for service in (*old, *new) if service.limits)
            before, seen = reached_either_way(kernel, kept), list[tuple[Block, dict[Frontend, list[Reach]]]]()
            kernel.after_block = recorder(kernel, kept, seen)
            walking.become(*new)
            after = reached_either_way(kernel, kept)
            for block, during in seen:
                for frontend, reaches in during.items():
                    for was, now, then in zip(reaches, before[frontend], after[frontend], strict=True):
                        if frontend in limited:
                            was, now, then = refused_alike(was), refused_alike(now), refused_alike(then)
                        assert was in (now, then), (
                            f"{frontend} after block {block.number}, {block.family} {block.table}"
                        )
            old = new


def refused_alike(reached: Reach) -> Reach:
    """Dropped counts as rejected.

    The refusal of flows over a limit stands in filter before nat translates, and after it no longer does: for
    that moment it refuses what is refused anyway, with its own answer. The other order would leave flows over
    a limit to the host.
    """
    alike = {"dropped": "rejected"}
    return frozenset(
        (source, arrival, frozenset((alike.get(way[0], way[0]), *way[1:]) for way in ways))
        for source, arrival, ways in reached
    )


def recorder(
    kernel: FakeKernel, kept: set[Frontend], seen: list[tuple[Block, dict[Frontend, list[Reach]]]]
) -> Callable[[Block], None]:
    def record(block: Block) -> None:
        same = {frontend for frontend in kept if family_of(frontend.address) is block.family}
        seen.append((block, reached_either_way(kernel, same)))

    return record


def reached_either_way(kernel: FakeKernel, asked: set[Frontend]) -> dict[Frontend, list[Reach]]:
    """Where packets of new clients go, and those of a client that every affinity list remembers."""
    lists = frozenset(re.findall(r"--name (\S+)", kernel.saved(Family.IPV4) + kernel.saved(Family.IPV6)))
    new, known = reached(kernel, asked), reached(kernel, asked, lists)
    return {frontend: [new[frontend], known[frontend]] for frontend in asked}


def reached(
    kernel: FakeKernel, asked: set[Frontend], pinned: frozenset[str] = frozenset()
) -> dict[Frontend, Reach]:
    found: dict[Frontend, Reach] = {}
    for family in Family:
        same = [frontend for frontend in asked if family_of(frontend.address) is family]
        found |= reach(kernel.saved(family), same, pinned)
    return found


def frontends(state: Iterable[Service]) -> set[Frontend]:
    return {frontend for service in state for frontend in service.frontends()}


def namespace_rules(namespace: Namespace, program: str) -> list[str]:
    finished = asyncio.run(namespace.run([program], ""))
    assert finished.exit_code == 0, finished.stderr
    return tables(re.sub(r"\[\d+:\d+\]", "[0:0]", finished.stdout))


def tables(saved: str) -> list[str]:
    """The tables in which there is anything, in a fixed order."""
    found = re.findall(r"(?ms)^\*.*?^COMMIT\n", saved)
    return sorted(table for table in found if re.search(r"(?m)^-A|^:\S+ (-|DROP) ", table))


def ours(kernel: FakeKernel) -> list[str]:
    """Every chain and jump of ours."""
    found = []
    for family in Family:
        for table in ("nat", "filter", "mangle"):
            for name, rules in kernel.chains(table, family).items():
                found += [name] if name.startswith("VIPD-") and name != "VIPD-MINE" else []
                found += [rule for rule in rules if OURS.search(rule)]
    return found


def foreign(kernel: FakeKernel) -> str:
    """The saved rules of one family without those of ours."""
    kept = [
        line
        for line in kernel.saved().splitlines()
        if not OURS.search(line) and not re.match(r"(:|-A )VIPD-(?!MINE)", line)
    ]
    return "\n".join(kept)
