"""When targets are asked, with probers that answer as the test says."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from tests.lab.simulated_time import pass_over, simulate
from vipd.health.probes.base import Attempt, ProbeCallback
from vipd.health.result import ProbeResult
from vipd.health.scheduler import Scheduler
from vipd.model.check import ExecProbe, TcpProbe, Timing
from vipd.model.check_target import CheckTarget
from vipd.model.fair_queue import FairQueue
from vipd.model.service import Protocol

GOOD = ProbeResult.success(0.001)


class Held:
    """A probe that ends when it is told to."""

    def __init__(self, target: CheckTarget, done: ProbeCallback) -> None:
        self.target, self.done, self.cancelled = target, done, False

    def cancel(self) -> None:
        self.cancelled = True


class Probers:
    """Remembers when it was asked for what."""

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.asked: list[tuple[float, CheckTarget]] = []
        self.held: list[Held] = []
        self.answers: list[CheckTarget] = []

    def ask(self, target: CheckTarget, done: ProbeCallback) -> Attempt:
        self.asked.append((asyncio.get_running_loop().time(), target))
        held = Held(target, done)
        if self.at_once:
            done(GOOD)
        else:
            self.held.append(held)
        return held

    def answered(self, target: CheckTarget, result: ProbeResult) -> None:
        self.answers.append(target)

    def times(self, target: CheckTarget) -> list[float]:
        return [at for at, asked in self.asked if asked == target]


def target(number: int, **timing: float) -> CheckTarget:
    return CheckTarget(f"10.0.0.{number}", 80, Protocol.TCP, TcpProbe(), Timing(**timing))  # type: ignore[arg-type]


def scheduler(probers: Probers, at_once: int = 100, part: Callable[[], float] | None = None) -> Scheduler:
    loop = asyncio.get_running_loop()
    # One author gets half of them.
    slots = {"": FairQueue("checks", 2 * at_once), "exec": FairQueue("exec checks", 8)}
    return Scheduler(loop, probers.ask, probers.answered, part or random.Random(1).random, slots)


def test_pauses_are_never_longer_than_the_interval() -> None:
    asked = target(1, interval=0.2, timeout=0.1, jitter=0.5)

    async def story() -> list[float]:
        probers = Probers(at_once=True)
        made = scheduler(probers)
        made.add([asked])
        await asyncio.sleep(1.5)
        made.stop()
        times = probers.times(asked)
        return [after - before for before, after in pairwise(times)]

    pauses = simulate(story())
    assert len(pauses) >= 6
    assert max(pauses) <= 0.2 + 1e-9
    assert len({round(pause, 2) for pause in pauses}) > 2


def test_a_probe_that_runs_when_the_next_is_due_is_followed_at_once() -> None:
    asked = target(1, interval=0.1, timeout=0.1)

    async def story() -> None:
        probers = Probers()
        made = scheduler(probers)
        made.add([asked])
        await asyncio.sleep(0.4)
        assert len(probers.held) == 1
        probers.held[0].done(GOOD)
        await asyncio.sleep(0.02)
        assert len(probers.held) == 2
        made.stop()

    simulate(story())


def test_those_that_were_all_overtaken_at_once_go_on_for_ever() -> None:
    both = [target(number, interval=0.1, timeout=0.1) for number in (1, 2)]

    async def story() -> None:
        probers = Probers()
        made = scheduler(probers)
        made.add(both)
        for round_ in range(1, 4):
            await asyncio.sleep(0.3)  # long enough for every one to be due while it runs
            assert len(probers.held) == 2 * round_
            for held in probers.held[-2:]:
                held.done(GOOD)
        made.stop()

    simulate(story())


def test_no_more_run_at_once_than_there_is_room_for_and_all_get_their_turn() -> None:
    async def story() -> None:
        probers = Probers()
        made = scheduler(probers, at_once=3, part=lambda: 0.0)
        targets = [target(number, interval=9.0) for number in range(10)]
        made.add(targets)
        for _ in range(10):
            await asyncio.sleep(0.01)
            assert made.running == min(3, 10 - len(probers.answers))
            for held in probers.held:
                held.done(GOOD)
            probers.held.clear()
        assert Counter(probers.answers) == Counter(targets)
        made.stop()

    simulate(story())


def test_what_is_removed_is_cancelled_and_makes_room() -> None:
    async def story() -> None:
        probers = Probers()
        made = scheduler(probers, at_once=1, part=lambda: 0.0)
        made.add([target(1, interval=9.0)])
        await asyncio.sleep(0.05)
        made.add([target(2, interval=9.0), target(3, interval=9.0)])
        await asyncio.sleep(0.05)
        assert [held.target for held in probers.held] == [target(1, interval=9.0)]
        made.remove(target(2, interval=9.0))
        made.remove(target(1, interval=9.0))
        made.remove(target(1, interval=9.0))
        await asyncio.sleep(0.05)
        assert probers.held[0].cancelled
        assert [held.target for held in probers.held[1:]] == [target(3, interval=9.0)]
        probers.held[0].done(GOOD)
        assert probers.answers == []
        made.stop()
        assert probers.held[1].cancelled
        assert made.running == 0

    simulate(story())


def test_who_stays_keeps_its_time_when_others_come_and_go() -> None:
    stays = target(1, interval=0.3, timeout=0.1, jitter=0.0)

    async def story() -> list[float]:
        probers = Probers(at_once=True)
        made = scheduler(probers, part=lambda: 0.999)
        made.add([stays])
        for number in range(30):
            made.add([target(2 + number, interval=0.3)])
            await asyncio.sleep(0.05)
            made.remove(target(2 + number, interval=0.3))
            made.add([stays])
        made.stop()
        return probers.times(stays)

    times = simulate(story())
    assert 4 <= len(times) <= 6


def test_after_a_stall_probes_start_in_turns_with_everything_else() -> None:
    """Thousands are due at once then."""

    async def story() -> None:
        probers = Probers(at_once=True)
        made = scheduler(probers, at_once=10_000, part=lambda: 0.0)
        made.add([target(number, interval=9.0) for number in range(1000)])
        turns, seen = 0, []
        pass_over(0.05)
        while len(probers.asked) < 1000:
            await asyncio.sleep(0)
            turns += 1
            seen.append(len(probers.asked))
        assert max(b - a for a, b in pairwise(seen)) <= 128
        made.stop()

    simulate(story())


class Programs(Probers):
    """Those of even numbers answer at once, the others hang until their timeout."""

    def ask(self, target: CheckTarget, done: ProbeCallback) -> Attempt:
        held = super().ask(target, done)
        hangs = target.kind == "exec" and int(target.address.rpartition(".")[2]) % 2
        takes = target.timing.timeout if hangs else 0.01
        asyncio.get_running_loop().call_later(takes, done, ProbeResult.timeout(2.0) if hangs else GOOD)
        return held


def test_checks_that_hang_delay_neither_good_ones_of_their_type_nor_others() -> None:
    """There are places for four programs, and forty that hang for two seconds of every five."""
    hanging = [replace(target(n), probe=ExecProbe(), port=1000 + n) for n in range(1, 80, 2)]
    good = [replace(target(n), probe=ExecProbe()) for n in (80, 82)]
    plain = [target(100)]

    async def story() -> tuple[list[float], list[float], list[str]]:
        probers = Programs()
        made = scheduler(probers)
        made.add([*hanging, *good, *plain])
        await asyncio.sleep(120.0)
        troubles = made.warnings()
        made.stop()
        late = [pause for each in good for pause in pauses_of(probers.times(each)[4:])]
        return late, [pause for each in plain for pause in pauses_of(probers.times(each))], troubles

    late, others, troubles = simulate(story())
    assert max(others) <= 5.1
    assert max(late) <= 5.1
    (trouble,) = troubles
    assert trouble.startswith("4 exec checks at once are all there is room for, 3 of which hung before: ")
    assert " s late; hint: " in trouble


def pauses_of(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def test_what_hung_gets_its_turn_beside_many_that_do_not() -> None:
    async def story() -> int:
        probers = Programs()
        made = scheduler(probers)
        slow = replace(target(1), probe=ExecProbe())
        made.add([slow, *(replace(target(0), probe=ExecProbe(), port=n + 1) for n in range(3000))])
        await asyncio.sleep(60.0)
        made.stop()
        return len(probers.times(slow))

    assert simulate(story()) >= 5


def test_one_authors_checks_leave_room_for_anothers_however_many_and_long_they_are() -> None:
    hanging = [target(n % 250, timeout=3600.0, interval=3600.0) for n in range(250)]
    hanging += [replace(each, port=port) for each in hanging for port in range(1000, 1008)]
    other = replace(target(1, interval=1.0), port=81)

    async def story() -> list[float]:
        loop, probers = asyncio.get_running_loop(), Probers()
        slots = {"": FairQueue("checks", 200)}

        def ask(asked: CheckTarget, done: ProbeCallback) -> Attempt:
            if asked == other:
                loop.call_later(0.01, done, GOOD)
            return probers.ask(asked, done)

        def authors_of(asked: CheckTarget) -> set[str]:
            return {"file:b"} if asked == other else {f"etcd:{asked.port % 3}"}

        made = Scheduler(loop, ask, probers.answered, random.Random(1).random, slots, authors_of)
        made.add(hanging)
        await asyncio.sleep(60.0)
        made.add([other])
        await asyncio.sleep(60.0)
        assert "checks at once are all there is room for" in made.warnings()[0]
        made.stop()
        return pauses_of([60.0, *probers.times(other)])

    assert max(simulate(story())) <= 1.1


def test_more_checks_than_a_turn_starts_do_not_keep_out_those_of_another_type() -> None:
    """After a stall thousands of one type are due at once: programs are started in the first turn, too."""
    many = [replace(target(n % 250), port=1 + n // 250) for n in range(2000)]
    program = replace(target(1), probe=ExecProbe(command=("/bin/true",)))

    async def story() -> list[str]:
        probers = Probers()
        made = scheduler(probers, at_once=5000, part=lambda: 0.0)
        made.add([*many, program])
        await asyncio.sleep(0.001)
        made.stop()
        return [asked.kind for _, asked in probers.asked]

    assert "exec" in simulate(story())[:64]
