"""From any declared state to any other: where the rules end, and what packets meet on the way."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dataplane import states
from tests.dataplane.declared import Machine
from tests.dataplane.fake_kernel import Block, FakeKernel
from tests.dataplane.reach import Reach, declared_shares, reach, traced_shares
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.model import Family, Frontend, Service, family_of

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
def machine(kernel: FakeKernel, cidrs: tuple[str, ...] = (), **more: object) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory() as directory:
        yield Machine(kernel.run, Path(directory), cluster_cidrs=cidrs, **more)


def foreign_kernel() -> FakeKernel:
    kernel = FakeKernel()
    kernel.restore(FOREIGN)
    return kernel


def rules(kernel: FakeKernel) -> dict[tuple[Family, str], str]:
    """Everything the kernel holds, but for tables in which nothing has been changed."""
    found = {}
    for family in Family:
        for table in re.findall(r"(?ms)^\*.*?^COMMIT\n", kernel.saved(family)):
            if re.search(r"(?m)^-A|^:\S+ (-|DROP) ", table):
                found[family, table.partition("\n")[0]] = table
    return found


def cold_start(state: tuple[Service, ...], cidrs: tuple[str, ...]) -> dict[tuple[Family, str], str]:
    """What a first daemon on this host writes."""
    kernel = foreign_kernel()
    with machine(kernel, cidrs) as fresh:
        fresh.become(state)
    return rules(kernel)


@settings(deadline=None, max_examples=60)
@given(walk=states.walks, cidrs=states.cluster_cidrs)
def test_every_walk_ends_where_a_cold_start_does(walk: Walk, cidrs: tuple[str, ...]) -> None:
    kernel = foreign_kernel()
    with machine(kernel, cidrs) as walking:
        for state in walk:
            walking.become(state)
            assert rules(kernel) == cold_start(state, cidrs)
            assert not walking.plan()


@settings(deadline=None, max_examples=40)
@given(walk=states.walks, cidrs=states.cluster_cidrs, restarts=st.sets(st.integers(0, 5)))
def test_a_restart_finds_nothing_to_do_and_walks_on(
    walk: Walk, cidrs: tuple[str, ...], restarts: set[int]
) -> None:
    kernel = foreign_kernel()
    with machine(kernel, cidrs) as walking:
        for number, state in enumerate(walk):
            walking.become(state)
            if number in restarts:
                walking.restart()
                assert not walking.plan()
            walking.dataplane.forget()
            assert str(walking.plan()) == ""
            assert rules(kernel) == cold_start(state, cidrs)


@settings(deadline=None, max_examples=40)
@given(before=states.state(), after=states.state(), cidrs=states.cluster_cidrs)
def test_a_daemon_started_on_other_rules_of_its_own_ends_at_a_cold_start(
    before: tuple[Service, ...], after: tuple[Service, ...], cidrs: tuple[str, ...]
) -> None:
    kernel = foreign_kernel()
    with machine(kernel, ("10.20.0.0/16", "10.30.0.0/16"), flow_mark_bit=5) as old:
        old.become(before)
    with machine(kernel, cidrs) as new:
        new.become(after)
        assert rules(kernel) == cold_start(after, cidrs)
        new.become(())
        assert not ours(kernel)


@settings(deadline=None, max_examples=30)
@given(walk=states.walks)
def test_rules_of_others_are_untouched(walk: Walk) -> None:
    kernel, alone = foreign_kernel(), foreign_kernel()
    with machine(kernel) as walking:
        for state in (*walk, ()):
            walking.become(state)
            assert foreign(kernel) == foreign(alone)


@settings(deadline=None, max_examples=30)
@given(walk=states.walks)
def test_without_services_nothing_of_ours_is_left(walk: Walk) -> None:
    kernel = foreign_kernel()
    with machine(kernel) as walking:
        for state in walk:
            walking.become(state)
        walking.become(())
        assert not ours(kernel)
        assert rules(kernel) == rules(foreign_kernel())


@settings(deadline=None, max_examples=60)
@given(walk=states.walks, cidrs=states.cluster_cidrs)
def test_packets_go_where_the_declaration_says(walk: Walk, cidrs: tuple[str, ...]) -> None:
    kernel = FakeKernel()
    with machine(kernel, cidrs) as walking:
        for state in walk:
            walking.become(state)
            found = reached(kernel, frontends(state))
            for frontend, shares in declared_shares(state, walking.policy).items():
                for traced in traced_shares(found[frontend]):
                    assert traced == pytest.approx(dict(shares), abs=2e-5)


@settings(deadline=None, max_examples=60)
@given(walk=states.walks, cidrs=states.cluster_cidrs)
def test_no_packet_finds_a_service_half_programmed(walk: Walk, cidrs: tuple[str, ...]) -> None:
    """Guarantee G1, with the services in one restore."""
    check_each_block(walk, cidrs)


@settings(deadline=None, max_examples=40)
@given(walk=states.walks, cidrs=states.cluster_cidrs)
def test_no_packet_finds_a_service_half_programmed_by_a_large_load(
    walk: Walk, cidrs: tuple[str, ...], batches_of_two: None
) -> None:
    """Guarantee G1, with the services split over several restores."""
    check_each_block(walk, cidrs)


@pytest.fixture(scope="module")
def batches_of_two() -> Iterator[None]:
    """So that a few services are a large load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vipd.dataplane.iptables.plan.BATCH_FORWARDINGS", 2)
        yield


def check_each_block(walk: Walk, cidrs: tuple[str, ...]) -> None:
    kernel = FakeKernel()
    with machine(kernel, cidrs) as walking:
        old: tuple[Service, ...] = ()
        for new in walk:
            kept = frontends(old) & frontends(new)
            before, seen = reached_either_way(kernel, kept), list[tuple[Block, dict[Frontend, list[Reach]]]]()
            kernel.after_block = recorder(kernel, kept, seen)
            walking.become(new)
            after = reached_either_way(kernel, kept)
            for block, during in seen:
                for frontend, reaches in during.items():
                    for was, now, then in zip(reaches, before[frontend], after[frontend], strict=True):
                        assert was in (now, then), f"{frontend} after {block}"
            old = new


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


def frontends(state: tuple[Service, ...]) -> set[Frontend]:
    return {frontend for service in state for frontend in service.frontends()}


def ours(kernel: FakeKernel) -> list[str]:
    """Every chain and jump of ours."""
    names = Names("VIPD")
    found = []
    for family in Family:
        for table in ("nat", "filter", "mangle"):
            for name, rules in kernel.chains(table, family).items():
                found += [name] if names.owns(ChainId(table, name)) else []
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
