"""What a plan costs grows with its rules, and no faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.plan import Change, Installed, Plan, make_plan
from vipd.dataplane.iptables.ruleset import DesiredChains

REFUSALS = ChainId("filter", "VIPD-SERVICES")


class Counted(str):
    """A rule that counts how often its hash is asked for."""

    __slots__ = ()
    hashes = 0

    def __hash__(self) -> int:
        Counted.hashes += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def refusals(number: int, start: int = 0) -> Rules:
    return tuple(
        Counted(f"-d 10.96.0.1/32 -p tcp -m tcp --dport {n} -j REJECT") for n in range(start, start + number)
    )


def planned(number: int) -> Plan:
    """The plan that replaces half of the refusals."""
    installed = Installed({REFUSALS: refusals(number)})
    wanted = DesiredChains((), {REFUSALS: refusals(number, number // 2)}, {}, frozenset())
    return make_plan(wanted, installed, Names("VIPD"))


def hashes_of(work: Callable[[], object]) -> int:
    before = Counted.hashes
    work()
    return Counted.hashes - before


def test_a_plan_of_many_refusals_is_made_in_linear_time() -> None:
    few, many = (hashes_of(lambda n=n: planned(n)) for n in (200, 2000))  # type: ignore[misc]
    assert few
    assert many < 15 * few


@pytest.mark.parametrize("number", [50, 3000])
def test_a_difference_names_what_comes_and_goes(number: int) -> None:
    lines = str(planned(number)).splitlines()
    assert lines[0] == "filter VIPD-SERVICES"
    assert {line[0] for line in lines[1:]} == {"+", "-"}
    assert len([line for line in lines if line.startswith("- -A VIPD-SERVICES")]) == number // 2
    assert len([line for line in lines if line.startswith("+ -A VIPD-SERVICES")]) == number // 2


def test_a_plan_as_text_says_which_chains_come_go_and_differ() -> None:
    changes = (
        Change(REFUSALS, ("-j A", "-j B"), ("-j B", "-j C")),
        Change(ChainId("nat", "NEW"), None, ("-j A",)),
        Change(ChainId("nat", "OLD"), ("-j A",), None),
    )
    assert str(Plan(changes=changes, other_variant=Plan(changes=changes[2:]))).splitlines() == [
        "filter VIPD-SERVICES",
        "- -A VIPD-SERVICES -j A",
        "+ -A VIPD-SERVICES -j C",
        "nat NEW (new)",
        "+ -A NEW -j A",
        "nat OLD (removed)",
        "- -A OLD -j A",
        "# in the other iptables variant",
        "nat OLD (removed)",
        "- -A OLD -j A",
    ]
