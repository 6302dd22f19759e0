"""How much is written for a change: only the chains it touches, in as few processes as is safe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dataplane.declared import HTTP, backends, numbered
from tests.dataplane.iptables.fake_kernel import Block, FakeKernel, target_of
from tests.lab.inside import Synced, synced
from vipd.model.service import Family, Protocol, Service, ServicePort

TWO = ("10.244.0.1", "10.244.0.2")


def touched(kernel: FakeKernel) -> set[str]:
    """The chains that were written since the blocks were cleared: `SVC s7` for that service's, `SEP s7 .2`
    for that of a backend, and the names of those that all share."""
    return {kernel_name(block, chain) for block in kernel.blocks for chain in block.chains}


def kernel_name(block: Block, chain: str) -> str:
    if not chain.startswith(("VIPD-SVC-", "VIPD-SEP-")):
        return chain
    return KNOWN.get(chain) or next(
        KNOWN.setdefault(
            chain, f"{chain[5:8]} {line.split('test/')[1].split(':')[0]}{backend_in(chain, line)}"
        )
        for line in block.lines
        if line.split()[1:2] == [chain] and "test/" in line
    )


def backend_in(chain: str, line: str) -> str:
    if chain.startswith("VIPD-SVC-"):
        return ""
    return f" .{line.split('10.244.0.')[1].split('/')[0].split(':')[0]}"


KNOWN: dict[str, str] = {}
"""Chains by the names of their first writing: one that goes is written without its rules."""


@pytest.fixture
def fifty(kernel: FakeKernel, vipd: Synced) -> Synced:
    """Fifty services of two backends are in the kernel, and what was logged about it is forgotten."""
    vipd.become(*services())
    touched(kernel)
    kernel.blocks.clear()
    kernel.processes.clear()
    return vipd


def services(**changed: Service) -> list[Service]:
    return [changed.get(f"s{i}", numbered(i, *TWO)) for i in range(50)]


SHARED = {"VIPD-SERVICES", "VIPD-UNUSED"}
CHANGES: dict[str, tuple[list[Service], set[str]]] = {
    "one backend": (
        services(s7=numbered(7, "10.244.0.1", "10.244.0.3")),
        {"SVC s7", "SEP s7 .2", "SEP s7 .3"},
    ),
    "a weight": (services(s7=numbered(7, "10.244.0.1@2", "10.244.0.2")), {"SVC s7"}),
    "a service more": ([*services(), numbered(50, *TWO)], {*SHARED, "SVC s50", "SEP s50 .1", "SEP s50 .2"}),
    "a service less": (services()[:49], {*SHARED, "SVC s49", "SEP s49 .1", "SEP s49 .2"}),
    "the last backend": (services(s7=numbered(7)), {"VIPD-SERVICES", "SVC s7", "SEP s7 .1", "SEP s7 .2"}),
    "nothing": (services(), set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_touches_its_own_chains_in_one_process(
    change: str, kernel: FakeKernel, fifty: Synced
) -> None:
    after, chains = CHANGES[change]
    assert bool(fifty.become(*after)) == bool(chains)
    assert touched(kernel) == chains
    assert kernel.count("-restore") == len(kernel.processes) == bool(chains)


def test_services_of_one_family_leave_the_other_alone(kernel: FakeKernel, fifty: Synced) -> None:
    fifty.become(*services(), Service("test/six", ("fd00:96::1",), (HTTP,), backends("fd00:244::1")))
    assert {b.family for b in kernel.blocks} == {Family.IPV6}


def test_first_load_of_fifty_is_one_restore(kernel: FakeKernel, vipd: Synced) -> None:
    vipd.become(*services())
    assert kernel.count("-restore") == 2  # with the probe of what the kernel can do


LARGE = [numbered(i, "10.244.0.1", "10.244.0.2", "10.244.0.3") for i in range(500)]
"""2000 leaf chains."""
LARGEST_RESTORE = 5000
"""Lines; of longer ones iptables-nft-restore takes far longer than of several."""


def with_leaves(kernel: FakeKernel) -> list[Block]:
    return [b for b in kernel.blocks if any("-SVC-" in chain for chain in b.chains)]


def test_a_large_load_is_split_with_the_dispatch_last(kernel: FakeKernel, vipd: Synced) -> None:
    """And no block jumps to a chain that does not exist or is still empty."""

    def look(block: Block) -> None:
        chains = kernel.chains("nat")
        jumps = {target_of(rule) for rules in chains.values() for rule in rules}
        assert all(chains[target] for target in jumps if "-SVC-" in target or "-SEP-" in target)

    kernel.after_block = look
    vipd.become(*LARGE)
    batches = with_leaves(kernel)
    assert len(batches) > 1
    assert sum("-SVC-" in chain for b in batches for chain in b.chains) == len(LARGE)
    (dispatching,) = (b for b in kernel.blocks if "VIPD-SERVICES" in b.chains and b.table == "nat")
    assert max(b.number for b in batches) < dispatching.number
    assert kernel.count("-restore") >= len(batches)
    vipd.become(*(numbered(i, "10.244.0.1", "10.244.0.9") for i in range(len(LARGE))))
    kernel.after_block = lambda block: None
    vipd.become(*LARGE[:3])
    assert sum("-SVC-" in name for name in kernel.chains("nat")) == 3
    vipd.become(*LARGE)
    vipd.become()
    assert not any(name.startswith("VIPD-") for table in ("nat", "filter") for name in kernel.chains(table))


def test_a_service_of_many_ports_and_backends_is_split(kernel: FakeKernel, vipd: Synced) -> None:
    """In one restore, 100 ports of 250 backends had iptables-nft-restore work for more than 100 s."""
    ports = tuple(ServicePort(1000 + n, Protocol.TCP, name=f"p{n}") for n in range(30))
    many = backends(*(f"10.244.0.{n}" for n in range(1, 101)))
    vipd.become(Service("test/wide", ("10.96.0.1",), ports, many))
    assert len(with_leaves(kernel)) > 1
    assert max(len(block.lines) for block in kernel.blocks) <= LARGEST_RESTORE


def test_a_large_load_of_the_legacy_tables_is_one_restore(tmp_path: Path) -> None:
    kernel = FakeKernel(default="legacy")
    vipd = synced("iptables", kernel.run, tmp_path)
    vipd.become(numbered(0))
    kernel.blocks.clear()
    vipd.become(*LARGE)
    assert len([b for b in kernel.blocks if b.table == "nat"]) == 1
    kernel.blocks.clear()
    kernel.processes.clear()
    vipd.become()
    assert kernel.count("-restore") == 1
