"""What goes wrong outside vipd, and how the rules get right again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dataplane.declared import HTTP, Machine, backends, kube_like_services, numbered
from tests.dataplane.iptables.fake_kernel import FakeKernel
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.tools import find_tools
from vipd.host.host_changes import HostChanges
from vipd.model.service import Family, Service

BOTH_FAMILIES = [
    Service("test/both", ("10.96.9.1", "fd00:96::9"), (HTTP,), backends("10.244.0.1", "fd00:1::1"))
]


def rules(kernel: FakeKernel) -> tuple[str, str]:
    return kernel.saved(Family.IPV4), kernel.saved(Family.IPV6)


def written_by(services: list[Service], directory: Path) -> tuple[str, str]:
    """The rules of a first daemon that nothing disturbs."""
    kernel = FakeKernel()
    Machine(kernel.run, directory / "undisturbed").become(services)
    return rules(kernel)


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def machine(kernel: FakeKernel, tmp_path: Path) -> Machine:
    return Machine(kernel.run, tmp_path)


FIRST = [*kube_like_services(), numbered(1, "10.244.0.1"), numbered(2)]
SECOND = [*kube_like_services()[:1], numbered(1), numbered(2, "10.244.0.1", "10.244.0.2"), numbered(3)]


OUTSIDE = "Permission denied"
"""A failure that no rule is to blame for."""


def blocks_of_second_step(directory: Path) -> int:
    kernel = FakeKernel()
    machine = Machine(kernel.run, directory / "counting")
    machine.become(FIRST)
    before = len(kernel.blocks)
    machine.become(SECOND)
    return len(kernel.blocks) - before


def test_any_failing_block_is_reported_in_the_tools_words_and_made_good(tmp_path: Path) -> None:
    count = blocks_of_second_step(tmp_path)
    assert count > 3
    for number in range(1, count + 1):
        kernel = FakeKernel()
        machine = Machine(kernel.run, tmp_path / str(number))
        machine.become(FIRST)
        kernel.failing[len(kernel.blocks) + number] = OUTSIDE
        with pytest.raises(ApplyError, match="Permission denied") as raised:
            machine.become(SECOND)
        assert "tables-restore failed with exit code 1" in str(raised.value)
        assert machine.step()
        assert rules(kernel) == written_by(SECOND, tmp_path)
        assert not machine.plan()


def test_any_block_that_fails_once_as_if_for_its_rules_is_made_good_at_once(tmp_path: Path) -> None:
    for number in range(1, blocks_of_second_step(tmp_path) + 1):
        kernel = FakeKernel()
        machine = Machine(kernel.run, tmp_path / str(number))
        machine.become(FIRST)
        kernel.failing[len(kernel.blocks) + number] = "line 1 failed: once"
        machine.become(SECOND)
        assert rules(kernel) == written_by(SECOND, tmp_path)
        machine.dataplane.invalidate_all()
        assert not machine.plan()


def test_the_line_that_was_refused_is_quoted(machine: Machine, kernel: FakeKernel) -> None:
    kernel.failing[1] = f"line 2 failed: {OUTSIDE}"
    with pytest.raises(ApplyError, match=r"\(line 2: :VIPD-"):
        machine.become(FIRST)


@pytest.mark.parametrize("number", range(1, 10))
def test_a_first_load_that_fails_is_made_good(
    number: int, machine: Machine, kernel: FakeKernel, tmp_path: Path
) -> None:
    kernel.failing[number] = OUTSIDE
    with pytest.raises(ApplyError, match="Permission denied"):
        machine.become(FIRST)
    machine.step()
    assert rules(kernel) == written_by(FIRST, tmp_path)


def test_a_failed_save_is_an_error_and_writes_nothing(machine: Machine, kernel: FakeKernel) -> None:
    kernel.absent.add("iptables")
    with pytest.raises(ApplyError, match=r"there is no such program; hint: apt install iptables"):
        machine.become([numbered(1)])
    assert not kernel.blocks


def drop_table(kernel: FakeKernel) -> None:
    """`iptables -t nat -F` and `-X`."""
    chains = kernel.chains("nat")
    own = [name for name in chains if name.startswith("VIPD-")]
    lines = [f"-F {name}" for name in chains] + [f"-X {name}" for name in own]
    kernel.restore("\n".join(["*nat", *lines, "COMMIT", ""]))


def flush_table(kernel: FakeKernel) -> None:
    """`iptables -t nat -F`: the chains stay, empty."""
    kernel.restore("\n".join(["*nat", *(f"-F {name}" for name in kernel.chains("nat")), "COMMIT", ""]))


def delete_jump(kernel: FakeKernel) -> None:
    kernel.restore(f"*nat\n-D PREROUTING {kernel.chains('nat')['PREROUTING'][0]}\nCOMMIT\n")


def empty_service_chain(kernel: FakeKernel) -> None:
    name = next(name for name in sorted(kernel.chains("nat")) if "-SVC-" in name)
    kernel.restore(f"*nat\n-F {name}\nCOMMIT\n")


def delete_service_chain(kernel: FakeKernel) -> None:
    name = next(name for name in sorted(kernel.chains("nat")) if "-SVC-" in name)
    users = [(c, r) for c, rules in kernel.chains("nat").items() for r in rules if r.endswith(f"-j {name}")]
    lines = [*(f"-D {chain} {rule}" for chain, rule in users), f"-F {name}", f"-X {name}"]
    kernel.restore("\n".join(["*nat", *lines, "COMMIT", ""]))


def double_jump(kernel: FakeKernel) -> None:
    jump = kernel.chains("nat")["PREROUTING"][0]
    kernel.restore(f"*nat\n-D PREROUTING {jump}\n-A PREROUTING {jump}\n-A PREROUTING {jump}\nCOMMIT\n")


RIVALS = [drop_table, flush_table, delete_jump, empty_service_chain, delete_service_chain, double_jump]


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_is_found_out_by_looking_afresh(
    rival: Callable[[FakeKernel], None], machine: Machine, kernel: FakeKernel, tmp_path: Path
) -> None:
    machine.become(FIRST)
    rival(kernel)
    assert rules(kernel) != written_by(FIRST, tmp_path)
    machine.dataplane.invalidate_all()
    assert machine.step()
    assert rules(kernel) == written_by(FIRST, tmp_path)


def test_a_rule_inserted_before_our_jump_stays_before_it(machine: Machine, kernel: FakeKernel) -> None:
    machine.become(FIRST)
    before = kernel.chains("nat")["PREROUTING"]
    kernel.restore("*nat\n-I PREROUTING 1 -s 198.51.100.1/32 -j ACCEPT\nCOMMIT\n")
    machine.dataplane.invalidate_all()
    assert not machine.plan()
    kernel.restore(f"*nat\n-D PREROUTING {before[0]}\nCOMMIT\n")
    machine.dataplane.invalidate_all()
    machine.step()
    assert kernel.chains("nat")["PREROUTING"] == ["-s 198.51.100.1/32 -j ACCEPT", *before]


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_between_plan_and_apply_costs_one_retry_at_most(
    rival: Callable[[FakeKernel], None], machine: Machine, kernel: FakeKernel, tmp_path: Path
) -> None:
    """As the drift check sees it: the reconciler steps, and some time later looks afresh."""
    machine.become(FIRST)
    machine.declare(SECOND)
    plan = machine.plan()
    rival(kernel)
    try:
        machine.apply(plan)
    except ApplyError:
        machine.step()
    machine.dataplane.invalidate_all()
    machine.step()
    assert rules(kernel) == written_by(SECOND, tmp_path)
    assert not machine.plan()


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_between_two_blocks_costs_one_retry_at_most(
    rival: Callable[[FakeKernel], None], machine: Machine, kernel: FakeKernel, tmp_path: Path
) -> None:
    machine.become(FIRST)
    second = len(kernel.blocks) + 2
    kernel.before_block = lambda number: rival(kernel) if number == second else None
    try:
        machine.become(SECOND)
    except ApplyError:
        machine.step()
    machine.dataplane.invalidate_all()
    machine.step()
    assert rules(kernel) == written_by(SECOND, tmp_path)


def test_missing_ip6tables_does_not_hold_back_ipv4(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.absent.add("ip6tables")
    machine = Machine(kernel.run, tmp_path)
    with pytest.raises(ApplyError, match="ip6tables cannot be run"):
        machine.become(BOTH_FAMILIES)
    assert kernel.saved(Family.IPV4) == written_by(BOTH_FAMILIES, tmp_path)[0]


def test_missing_ip6tables_is_no_fault_without_ipv6_services(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.absent.add("ip6tables")
    machine = Machine(kernel.run, tmp_path)
    machine.become([numbered(1, "10.244.0.1")])
    assert not machine.plan()
    assert "ip6tables cannot be run" in machine.dataplane.versions()["ipv6"]


def test_failing_ipv4_does_not_hold_back_ipv6(machine: Machine, kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.failing[1] = OUTSIDE
    with pytest.raises(ApplyError):
        machine.become(BOTH_FAMILIES)
    assert kernel.saved(Family.IPV6) == written_by(BOTH_FAMILIES, tmp_path)[1]
    machine.step()
    assert rules(kernel) == written_by(BOTH_FAMILIES, tmp_path)


CANARY = "*{}\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n"


@pytest.mark.parametrize("table", ["mangle", "nat", "filter"])
def test_kube_prefix_is_refused_beside_a_kube_proxy(table: str, kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.restore(CANARY.format(table))
    before = rules(kernel)
    machine = Machine(kernel.run, tmp_path, chain_prefix="KUBE")
    with pytest.raises(ApplyError, match=r"chain_prefix KUBE is refused .* force_chain_prefix"):
        machine.become(FIRST)
    assert before[0] == kernel.saved(Family.IPV4)


def test_kube_prefix_beside_a_kube_proxy_can_be_forced(kernel: FakeKernel, tmp_path: Path) -> None:
    kernel.restore(CANARY.format("nat"))
    machine = Machine(kernel.run, tmp_path, chain_prefix="KUBE", force_chain_prefix=True)
    machine.become(FIRST)
    machine.become([])
    assert kernel.chains("nat")["KUBE-PROXY-CANARY"] == []
    assert [name for name in kernel.chains("nat") if name.startswith("KUBE-")] == ["KUBE-PROXY-CANARY"]


def test_own_prefix_beside_a_kube_proxy_is_fine(machine: Machine, kernel: FakeKernel) -> None:
    kernel.restore(CANARY.format("nat"))
    machine.become(FIRST)
    assert "VIPD-SERVICES" in kernel.chains("nat")


@pytest.mark.parametrize(
    ("version", "usable"), [("1.8.2", False), ("1.8.0", False), ("1.8.3", True), ("1.6.1", True)]
)
def test_iptables_that_duplicates_rules_is_refused(version: str, usable: bool, tmp_path: Path) -> None:
    kernel = FakeKernel(version=version)
    machine = Machine(kernel.run, tmp_path)
    if usable:
        machine.become([numbered(1, "10.244.0.1")])
        assert ("--random-fully" in kernel.saved()) == (version != "1.6.1")
        return
    with pytest.raises(ApplyError, match=f"{version} .*1.8.3 or later"):
        machine.become([numbered(1, "10.244.0.1")])
    assert not kernel.blocks


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_variant_is_chosen_by_setting(variant: str, tmp_path: Path) -> None:
    kernel = FakeKernel(default="legacy" if variant == "nft" else "nft")
    Machine(kernel.run, tmp_path, iptables_variant=variant).become(BOTH_FAMILIES)
    assert {b.program for b in kernel.blocks} == {
        f"{stem}-{variant}-restore" for stem in ("iptables", "ip6tables")
    }
    assert kernel.saved(variant=variant) == written_by(BOTH_FAMILIES, tmp_path)[0]
    assert not kernel.saved()


def test_missing_variant_is_named_with_a_way_out() -> None:
    kernel = FakeKernel()
    kernel.absent.add("iptables-legacy")
    with pytest.raises(ApplyError, match=r"iptables-legacy cannot be run.*hint: set iptables_variant: auto"):
        asyncio.run(find_tools(Family.IPV4, "legacy", kernel.run))


def test_tables_and_prefix_are_recorded_before_the_first_write(
    machine: Machine, kernel: FakeKernel, tmp_path: Path
) -> None:
    kernel.restore("*filter\n:FOREIGN - [0:0]\nCOMMIT\n")
    recorded = []
    kernel.before_block = lambda number: recorded.append(HostChanges(tmp_path).read())
    machine.become([numbered(1, "10.244.0.1")])
    assert recorded[0].prefixes == ["VIPD"]
    assert recorded[0].tables == ["ipv4 nat"]
