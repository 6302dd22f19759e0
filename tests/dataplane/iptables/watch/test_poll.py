"""When a poll looks, and what it trusts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from tests.dataplane.iptables.watch.test_comparison import NAMES, SAVED, SEP
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.saved_rules import read_saved
from vipd.dataplane.iptables.watch.external_change import ChangeKind, ExternalChange
from vipd.dataplane.iptables.watch.legacy_tables import Fingerprint, LegacyTables
from vipd.dataplane.iptables.watch.poll import MAX_CPU_SHARE, POLL_SECONDS, Expected, RulePoll, WatchedFamily
from vipd.model.service import Family


class Tables(LegacyTables):
    """Sizes as the scene has them."""

    def __init__(self) -> None:
        self.size = 1000

    def fingerprint(self, tables: Iterable[str]) -> tuple[Fingerprint, ...]:
        return tuple((self.size,) for _ in tables)

    def close(self) -> None:
        pass


class Scene:
    """A kernel with rules, a clock, and vipd's belief."""

    def __init__(self, cost: float = 0.0, tables: Tables | None = None) -> None:
        self.now, self.cpu, self.cost, self.reads = 100.0, 0.0, cost, 0
        self.busy = self.waited = 0.0
        """CPU that other work takes meanwhile; time that others keep us waiting."""
        self.saved, self.believed = SAVED, read_saved(SAVED, NAMES)
        self.writes, self.writing, self.write_during_read = 1, False, False
        watched = WatchedFamily(Family.IPV4, True, self.read, self.expected)
        self.poll = RulePoll(watched, NAMES, self.clock, tables=tables, cpu=lambda: self.cpu)

    def clock(self) -> float:
        return self.now

    async def read(self) -> str:
        self.reads += 1
        self.cpu += self.cost + self.busy
        self.now += self.cost + self.waited
        saved = self.saved
        self.writes += self.write_during_read
        return saved

    def expected(self) -> Expected | None:
        return None if self.writing else Expected(self.writes, self.believed)

    def look(self, after: float = POLL_SECONDS) -> ExternalChange | None:
        self.now += after
        return asyncio.run(self.poll.poll())

    def change(self) -> None:
        self.saved = SAVED.replace("10.244.0.5:80", "10.244.0.6:80")


def test_a_difference_is_reported_once_and_so_is_the_next() -> None:
    scene = Scene()
    assert scene.look() is None
    scene.change()
    found = scene.look()
    assert found is not None
    assert found.chains == {(Family.IPV4, ChainId("nat", SEP))}
    assert found.kinds == {ChangeKind.RULES_DIFFER}
    assert scene.look() is None
    scene.saved = scene.saved.replace("10.244.0.6", "10.244.0.7")
    assert scene.look() is not None


def test_the_same_damage_after_a_repair_is_reported_again() -> None:
    scene = Scene()
    scene.change()
    assert scene.look() is not None
    scene.saved, scene.writes = SAVED, scene.writes + 1
    assert scene.look() is None
    scene.change()
    assert scene.look() is not None


def test_what_is_there_before_the_first_look_is_reported() -> None:
    scene = Scene()
    scene.change()
    assert scene.look() is not None


def test_nothing_is_read_while_vipd_writes_or_knows_nothing() -> None:
    scene = Scene()
    scene.writing = True
    scene.change()
    assert scene.look() is None
    assert scene.reads == 0


def test_a_family_in_which_vipd_has_nothing_is_not_read() -> None:
    scene = Scene()
    scene.believed.chains.clear()
    assert scene.look() is None
    assert scene.reads == 0


def test_a_reading_during_which_vipd_wrote_is_not_trusted() -> None:
    scene = Scene()
    scene.change()
    scene.write_during_read = True
    assert scene.look() is None
    scene.write_during_read = False
    assert scene.look() is not None, "it is looked at again"


@pytest.mark.parametrize("cost", [0.001, 0.05, 0.4])
def test_readings_take_no_more_than_their_share(cost: float) -> None:
    scene = Scene(cost)
    start = scene.now
    while scene.now < start + 200:
        scene.look()
    share = scene.reads * cost / (scene.now - start)
    assert share <= MAX_CPU_SHARE * 1.1
    assert scene.reads >= (350 if cost == 0.001 else 200 * MAX_CPU_SHARE / cost * 0.8)


@pytest.mark.parametrize(("busy", "waited"), [(3.0, 0.0), (0.0, 3.0)])
def test_what_others_take_is_no_cost_of_a_reading(busy: float, waited: float) -> None:
    scene = Scene(cost=0.01)
    scene.busy, scene.waited = busy, waited
    for _ in range(4):
        scene.look()
    assert scene.reads == 4


def test_a_table_of_another_size_is_read_at_once_however_dear() -> None:
    tables = Tables()
    scene = Scene(cost=0.4, tables=tables)
    scene.look()
    scene.look()
    assert scene.reads == 1
    scene.change()
    tables.size += 100
    assert scene.look() is not None
    assert scene.reads == 2


def test_our_own_change_of_size_costs_no_reading() -> None:
    tables = Tables()
    scene = Scene(cost=0.4, tables=tables)
    scene.look()
    scene.look()
    for _ in range(5):
        tables.size += 100
        scene.writes += 1
        assert scene.look() is None
    assert scene.reads == 1


def test_a_change_of_size_met_by_our_write_is_read_again_soon() -> None:
    tables = Tables()
    scene = Scene(cost=0.4, tables=tables)
    scene.look()
    scene.look()
    scene.change()
    tables.size += 100
    scene.write_during_read = True
    assert scene.look() is None
    scene.write_during_read = False
    assert scene.look() is not None
