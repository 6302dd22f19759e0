"""Which host holds an address: decisions for one host, and a simulation of several with one store."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from vipd.sources.etcd.election import (
    MAX_PREEMPTIONS,
    RANK_STEP_SECONDS,
    SETTLE_SECONDS,
    Candidate,
    Claim,
    Election,
    HandOver,
    Holding,
    LeaseTimes,
    Position,
    Release,
    View,
    rank,
)

ADDRESS = "192.0.2.10"
ADDRESSES = frozenset(f"192.0.2.{number}" for number in range(1, 201))
LATER = SETTLE_SECONDS + 10 * RANK_STEP_SECONDS


class Fleet:
    """Hosts that decide by the same keys, with leases that end when a host is lost."""

    def __init__(self, names: str, addresses: frozenset[str], preempt_delay: float = 0.0) -> None:
        self.addresses, self.revision, self.now = addresses, 10, 1000.0
        self.holders: dict[str, Holding] = {}
        self.candidates: dict[str, Candidate] = {}
        self.elections = {name: Election(preempt_delay) for name in names}
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        self.revision += 1
        self.candidates[name] = Candidate(name, self.revision, self.revision, self.addresses, instance=name)

    def lose(self, name: str) -> None:
        lease = self.candidates.pop(name).lease
        self.holders = {a: h for a, h in self.holders.items() if h.lease != lease}

    def step(self, *names: str, leaving: bool = False, seconds: float = 0.5) -> None:
        self.now += seconds
        for name in names or tuple(self.candidates):
            mine, view = self.candidates[name], View(dict(self.holders), dict(self.candidates))
            ready = frozenset[str]() if leaving else mine.addresses
            for action in self.elections[name].decide(
                view, Position(name, mine.lease, name, ready), self.now
            ):
                self.do(name, mine.lease, action)

    def do(self, name: str, lease: int, action: Claim | HandOver | Release) -> None:
        held = self.holders.get(action.address)
        self.revision += 1
        if isinstance(action, Claim):
            if (held.mod_revision if held else 0) == action.mod_revision:
                self.holders[action.address] = Holding(name, lease, self.revision, instance=name)
        elif held == action.held and isinstance(action, HandOver):
            self.holders[action.address] = Holding(
                action.to.host, action.to.lease, self.revision, previous=name, instance=action.to.instance
            )
        elif held == action.held:
            del self.holders[action.address]

    def settle(self) -> None:
        for _ in range(20):
            self.step()

    def share(self) -> dict[str, int]:
        held = Counter(holding.host for holding in self.holders.values())
        return {name: held[name] for name in sorted({*self.candidates, *held})}


def test_addresses_are_spread_and_stay_where_they_are() -> None:
    fleet = Fleet("abcd", ADDRESSES)
    fleet.settle()
    assert sum(fleet.share().values()) == len(ADDRESSES)
    assert all(25 <= number <= 75 for number in fleet.share().values()), fleet.share()
    before = dict(fleet.holders)
    fleet.lose("a")
    fleet.settle()
    moved = {a for a, holding in fleet.holders.items() if holding.host != before[a].host}
    assert moved == {a for a, holding in before.items() if holding.host == "a"}
    assert len({fleet.holders[a].host for a in moved}) == 3, "a lost host's addresses go to all others"
    fleet.join("a")
    fleet.settle()
    assert fleet.share()["a"] == 0, "without a delay for it nothing goes back"


def test_addresses_go_back_after_the_delay_a_few_at_a_time() -> None:
    fleet = Fleet("ab", ADDRESSES, preempt_delay=30.0)
    fleet.lose("a")
    fleet.settle()
    assert fleet.share() == {"b": len(ADDRESSES)}
    fleet.join("a")
    fleet.step(seconds=29.0)
    fleet.step(seconds=0.5)
    assert fleet.share()["a"] == 0
    fleet.step(seconds=29.6)
    assert fleet.share()["a"] == MAX_PREEMPTIONS
    fleet.settle()
    firsts = Counter(min("ab", key=lambda host: rank(address, host)) for address in ADDRESSES)
    assert fleet.share() == dict(firsts)
    assert fleet.holders[next(a for a, h in fleet.holders.items() if h.host == "a")].previous == "b"


def test_a_host_that_leaves_hands_over_and_the_last_one_releases() -> None:
    fleet = Fleet("ab", ADDRESSES)
    fleet.settle()
    fleet.step("a", leaving=True)
    assert fleet.share() == {"a": 0, "b": len(ADDRESSES)}
    fleet.lose("a")
    fleet.step("b", leaving=True)
    assert fleet.holders == {}


def test_a_host_waits_for_its_turn_and_for_others_that_start_with_it() -> None:
    first, second = sorted("ab", key=lambda host: rank(ADDRESS, host))
    candidates = {n: Candidate(n, 1, 1, frozenset({ADDRESS})) for n in "ab"}
    view, me = View({}, candidates), Position(second, 7, "", frozenset({ADDRESS}))
    election = Election(0)
    assert election.decide(view, me, 0.0) == []
    turn = SETTLE_SECONDS + RANK_STEP_SECONDS
    assert election.decide(view, me, turn - 0.01) == []
    assert election.decide(view, me, turn) == [Claim(ADDRESS)]
    leading = Election(0)
    held = View({ADDRESS: Holding(first, 1, 5)}, candidates)
    assert leading.decide(held, me, 0.0) == []
    vacant = LATER
    assert leading.decide(view, me, vacant) == [], "the first in rank has its turn first"
    assert leading.decide(view, me, vacant + RANK_STEP_SECONDS) == [Claim(ADDRESS)]
    alone = View({}, {second: candidates[second]})
    lost = Election(0)
    lost.decide(held, me, 0.0)
    assert lost.decide(alone, me, LATER) == [Claim(ADDRESS)], "at once when the holder is lost"


def test_nothing_is_decided_without_a_lease() -> None:
    view = View({ADDRESS: Holding("a", 5, 5)}, {"b": Candidate("b", 1, 1, frozenset({ADDRESS}))})
    assert Election(0).decide(view, Position("a", 0, "", frozenset()), LATER) == []


@pytest.mark.parametrize(("instance", "expected"), [("here", [Claim(ADDRESS, 5)]), ("another", [])])
def test_an_earlier_process_of_this_host_is_replaced_and_a_namesake_is_not(
    instance: str, expected: list[Claim]
) -> None:
    view = View({ADDRESS: Holding("a", 4, 5, instance=instance)}, {})
    assert Election(0).decide(view, Position("a", 6, "here", frozenset({ADDRESS})), LATER) == expected


def test_a_host_keeps_what_only_it_can_hold() -> None:
    held = Holding("a", 6, 5)
    me = Position("a", 6, "", frozenset({ADDRESS}))
    others = {"b": Candidate("b", 1, 1, frozenset({"192.0.2.99"}))}
    assert Election(1.0).decide(View({ADDRESS: held}, others), me, LATER) == []
    gone = replace(me, ready=frozenset())
    (release,) = Election(1.0).decide(View({ADDRESS: held}, others), gone, LATER)
    assert isinstance(release, Release)


@pytest.mark.parametrize("takeover", [3, 5, 10, 60])
def test_the_gate_closes_before_another_host_can_have_the_lease(takeover: int) -> None:
    times = LeaseTimes.within(takeover)
    assert 2 * times.gate + times.margin <= times.ttl + 1e-9
    assert times.interval * 2 < times.gate
    assert times.ttl + 1 <= takeover
