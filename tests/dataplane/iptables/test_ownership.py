"""How much is written for a change: only the chains it touches, in as few processes as is safe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dataplane.declared import HTTP, Machine, backends, numbered
from tests.dataplane.iptables.fake_kernel import Block, FakeKernel, target_of
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.plan import Installed, make_plan
from vipd.dataplane.iptables.restore_text import LEGACY_BATCHES, NFT_BATCHES
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.host.settings.settings import load_settings
from vipd.model.forwarding import Endpoint, ForwardingKey
from vipd.model.service import Family, Protocol, Service, ServicePort

NAMES = Names("VIPD")
TWO = ("10.244.0.1", "10.244.0.2")


def key(number: int) -> ForwardingKey:
    return ForwardingKey(f"test/s{number}", "http", Protocol.TCP, Family.IPV4)


def leaf_chains(number: int, *addresses: str) -> set[str]:
    """The service's chain, and those of some of its endpoints."""
    endpoints = {NAMES.endpoint(key(number), Endpoint(address, 8080)) for address in addresses}
    return {NAMES.service(key(number)), *endpoints}


def touched(blocks: list[Block]) -> set[str]:
    return set().union(*(block.chains for block in blocks))


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def fifty(kernel: FakeKernel, tmp_path: Path) -> Machine:
    """Fifty services of two backends are in the kernel, and what was logged about it is forgotten."""
    machine = Machine(kernel.run, tmp_path)
    machine.become(numbered(i, *TWO) for i in range(50))
    kernel.blocks.clear()
    kernel.processes.clear()
    return machine


def services(**changed: Service) -> list[Service]:
    return [changed.get(f"s{i}", numbered(i, *TWO)) for i in range(50)]


def test_first_load_of_fifty_is_one_restore(kernel: FakeKernel, tmp_path: Path) -> None:
    Machine(kernel.run, tmp_path).become(services())
    assert kernel.count("-restore") == 2  # with the probe of what the kernel can do


def test_changing_one_backend_touches_that_service_only(kernel: FakeKernel, fifty: Machine) -> None:
    fifty.become(services(s7=numbered(7, "10.244.0.1", "10.244.0.3")))
    assert touched(kernel.blocks) == leaf_chains(7, "10.244.0.2", "10.244.0.3")
    assert kernel.count("-restore") == len(kernel.processes) == 1


def test_changing_a_weight_touches_the_ladder_only(kernel: FakeKernel, fifty: Machine) -> None:
    fifty.become(services(s7=numbered(7, "10.244.0.1@2", "10.244.0.2")))
    assert touched(kernel.blocks) == leaf_chains(7)


def test_adding_a_service_touches_the_dispatch_and_its_own(kernel: FakeKernel, fifty: Machine) -> None:
    fifty.become([*services(), numbered(50, *TWO)])
    assert touched(kernel.blocks) == {"VIPD-SERVICES", "VIPD-UNUSED"} | leaf_chains(50, *TWO)
    assert kernel.count("-restore") == len(kernel.processes) == 1


def test_removing_a_service_touches_the_dispatch_and_its_own(kernel: FakeKernel, fifty: Machine) -> None:
    fifty.become(services()[:49])
    assert touched(kernel.blocks) == {"VIPD-SERVICES", "VIPD-UNUSED"} | leaf_chains(49, *TWO)
    assert kernel.count("-restore") == len(kernel.processes) == 1


def test_losing_the_last_backend_touches_both_dispatches_and_its_own(
    kernel: FakeKernel, fifty: Machine
) -> None:
    fifty.become(services(s7=numbered(7)))
    assert touched(kernel.blocks) == {"VIPD-SERVICES"} | leaf_chains(7, *TWO)
    assert {b.table for b in kernel.blocks} == {"nat", "filter"}
    assert kernel.count("-restore") == 1


def test_the_same_again_runs_no_process(kernel: FakeKernel, fifty: Machine) -> None:
    assert not fifty.become(services())
    assert not kernel.processes


def test_services_of_one_family_leave_the_other_alone(kernel: FakeKernel, fifty: Machine) -> None:
    fifty.become([*services(), Service("test/six", ("fd00:96::1",), (HTTP,), backends("fd00:244::1"))])
    assert {b.family for b in kernel.blocks} == {Family.IPV6}


class LargeLoad:
    """600 services of three backends each: 2400 leaf chains."""

    SERVICES = 600
    BACKENDS = ("10.244.0.1", "10.244.0.2", "10.244.0.3")

    @classmethod
    def services(cls) -> list[Service]:
        return [numbered(i, *cls.BACKENDS) for i in range(cls.SERVICES)]


def test_large_load_is_split_with_the_dispatch_last(kernel: FakeKernel, tmp_path: Path) -> None:
    Machine(kernel.run, tmp_path).become(LargeLoad.services())
    batches = [b.chains for b in kernel.blocks if any("-SVC-" in chain for chain in b.chains)]
    assert len(batches) > 1
    assert sum("-SVC-" in chain for chains in batches for chain in chains) == LargeLoad.SERVICES
    dispatching = [i for i, b in enumerate(kernel.blocks) if "VIPD-SERVICES" in b.chains and b.table == "nat"]
    leaves = [i for i, b in enumerate(kernel.blocks) if any("-SVC-" in chain for chain in b.chains)]
    assert len(dispatching) == 1
    assert max(leaves) < dispatching[0]
    assert kernel.count("-restore") >= len(batches)


def test_a_service_of_many_ports_and_backends_is_split(kernel: FakeKernel, tmp_path: Path) -> None:
    """In one restore, 100 ports of 250 backends had iptables-nft-restore work for more than 100 s."""
    ports = tuple(ServicePort(1000 + n, Protocol.TCP, name=f"p{n}") for n in range(30))
    many = backends(*(f"10.244.0.{n}" for n in range(1, 101)))
    Machine(kernel.run, tmp_path).become([Service("test/wide", ("10.96.0.1",), ports, many)])
    batches = [b.chains for b in kernel.blocks if any("-SVC-" in chain for chain in b.chains)]
    rules = kernel.chains("nat")
    written = [sum(len(rules[chain]) + 1 for chain in chains) for chains in batches]
    assert len(written) > 1
    assert max(written) <= NFT_BATCHES.lines


def test_a_large_load_of_the_legacy_tables_is_one_restore() -> None:
    policy = SelectionPolicy.of(load_settings(), ())
    ruleset = Ruleset(RuleOptions(Family.IPV4))
    for forwarding in (f for service in LargeLoad.services() for f in select_backends(service, policy)):
        ruleset.update(forwarding.key, forwarding)
    names, installed = ruleset.options.names, Installed()
    load = make_plan(ruleset.whole({}), installed, names, LEGACY_BATCHES)
    # The refusals of unused ports, before and after, and all of nat between them.
    assert [text.count("*nat") for text in load.restores if "*nat" in text] == [1]
    load.record_applied(installed)
    removal = make_plan(Ruleset(ruleset.options).whole(installed.chains), installed, names, LEGACY_BATCHES)
    assert len(removal.restores) == 1


def test_no_block_of_a_large_load_jumps_to_an_unwritten_chain(kernel: FakeKernel, tmp_path: Path) -> None:
    """Neither to one that does not exist nor to one that is still empty."""
    seen = []

    def look(block: Block) -> None:
        chains = kernel.chains("nat")
        jumps = {target_of(rule) for rules in chains.values() for rule in rules}
        seen.append(block.number)
        assert all(chains[target] for target in jumps if "-SVC-" in target or "-SEP-" in target)

    kernel.after_block = look
    machine = Machine(kernel.run, tmp_path)
    machine.become(LargeLoad.services())
    machine.become(numbered(i, "10.244.0.1", "10.244.0.9") for i in range(LargeLoad.SERVICES))
    assert len(seen) > 4


def test_more_chains_than_one_deletion_holds_are_removed(kernel: FakeKernel, tmp_path: Path) -> None:
    """SEP chains come before the SVC chains that jump to them, in another restore."""
    machine = Machine(kernel.run, tmp_path)
    machine.become(LargeLoad.services())
    assert sum(len(kernel.chains(table)) for table in ("nat", "filter")) > NFT_BATCHES.deletions
    machine.become([])
    assert not any(name.startswith("VIPD-") for table in ("nat", "filter") for name in kernel.chains(table))


def test_removing_most_of_a_large_load_leaves_the_rest(kernel: FakeKernel, tmp_path: Path) -> None:
    machine = Machine(kernel.run, tmp_path)
    machine.become(LargeLoad.services())
    machine.become(LargeLoad.services()[:3])
    assert sum("-SVC-" in name for name in kernel.chains("nat")) == 3
