"""Addresses that something else on the LAN answers for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from vipd.control.duplicate_detection import (
    ANSWER_SECONDS,
    ASK_SECONDS,
    DUPLICATE_SECONDS,
    DuplicateDetection,
)

ADDRESS = "192.0.2.10"
FLEET = {"02:00:00:00:00:01"}
STRANGER = "02:00:00:00:00:99"


class FakeLans:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.found: dict[str, str] = {}

    async def ask(self, addresses: Collection[str]) -> None:
        self.asked += addresses

    async def answers(self, addresses: Collection[str]) -> Mapping[str, str]:
        return {address: self.found[address] for address in addresses if address in self.found}


def watched() -> tuple[FakeLans, DuplicateDetection]:
    lans = FakeLans()
    return lans, DuplicateDetection(lans)


def step(
    detection: DuplicateDetection, now: float, held: Collection[str] = (), fleet: Collection[str] = FLEET
) -> None:
    asyncio.run(detection.step({ADDRESS}, held, fleet, now))


def test_an_address_is_clear_once_nothing_has_answered() -> None:
    lans, detection = watched()
    step(detection, 0.0)
    assert lans.asked == [ADDRESS]
    assert not detection.is_clear(ADDRESS)
    step(detection, ANSWER_SECONDS - 0.1)
    assert not detection.is_clear(ADDRESS)
    step(detection, ANSWER_SECONDS)
    assert detection.is_clear(ADDRESS)
    assert lans.asked == [ADDRESS]


def test_a_stranger_is_a_duplicate_until_it_is_gone_and_a_host_of_the_fleet_is_none() -> None:
    lans, detection = watched()
    lans.found[ADDRESS] = STRANGER
    step(detection, 0.0)
    step(detection, 2.0)
    assert not detection.is_clear(ADDRESS)
    assert detection.duplicates == {ADDRESS: STRANGER}
    lans.found[ADDRESS] = next(iter(FLEET))
    step(detection, ASK_SECONDS)
    assert not detection.is_clear(ADDRESS), "asked again, not answered yet"
    step(detection, ASK_SECONDS + 2.0)
    assert detection.is_clear(ADDRESS)
    assert detection.duplicates == {}


def test_a_holder_that_leaves_while_the_lan_is_asked_is_no_stranger() -> None:
    lans, detection = watched()
    lans.found[ADDRESS] = next(iter(FLEET))
    step(detection, 0.0)
    step(detection, ANSWER_SECONDS, fleet=())
    assert detection.is_clear(ADDRESS)
    step(detection, ASK_SECONDS, fleet=())
    step(detection, ASK_SECONDS + ANSWER_SECONDS, fleet=())
    assert detection.duplicates == {ADDRESS: lans.found[ADDRESS]}, "it left for good, and answers still"


def test_an_address_with_a_stranger_is_asked_about_again_soon() -> None:
    lans, detection = watched()
    lans.found[ADDRESS] = STRANGER
    step(detection, 0.0)
    step(detection, ANSWER_SECONDS)
    lans.found.clear()
    step(detection, DUPLICATE_SECONDS)
    step(detection, DUPLICATE_SECONDS + ANSWER_SECONDS)
    assert detection.is_clear(ADDRESS)
    assert lans.asked == [ADDRESS, ADDRESS]


def test_what_the_fleet_holds_is_clear_without_a_question_also_after_its_holder_is_lost() -> None:
    lans, detection = watched()
    step(detection, 0.0, held={ADDRESS})
    assert detection.is_clear(ADDRESS)
    assert lans.asked == []
    step(detection, 1.0)
    assert detection.is_clear(ADDRESS)
    assert lans.asked == [ADDRESS], "asked now, which its new holder does not wait for"


def test_an_address_that_is_not_announced_any_more_is_forgotten() -> None:
    lans, detection = watched()
    lans.found[ADDRESS] = STRANGER
    step(detection, 0.0)
    step(detection, 2.0)
    asyncio.run(detection.step(set(), (), FLEET, 3.0))
    assert detection.duplicates == {}
    lans.found.clear()
    step(detection, 4.0)
    assert lans.asked == [ADDRESS, ADDRESS]
