"""Verdicts follow rows of answers: never sooner, never later, and coming back may be held."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.health.stories import REFUSED, Answering, asked, service, shares, shown, told
from tests.lab.inside import Vipd, running
from vipd.health.flapping import Flapping
from vipd.health.state import HealthRecord, HealthState

ONE, TWO = "10.244.0.1", "10.244.0.2"


def test_a_verdict_takes_a_row_of_answers_which_is_counted() -> None:
    """Not being able to ask changes no verdict, and breaks no row."""
    good, answered = True, "answered in 1.0 ms"
    steps = [
        (good, "unknown", f"{answered}, 1 of 2", True),
        (REFUSED, "unknown", f"{REFUSED}, 1 of 3", True),
        (good, "unknown", f"{answered}, 1 of 2", True),
        (None, "unknown", f"cannot be asked: no descriptors; {answered}, 1 of 2", True),
        (good, "healthy", answered, True),
        (good, "healthy", answered, True),
        (REFUSED, "healthy", f"{REFUSED}, 1 of 3", True),
        (REFUSED, "healthy", f"{REFUSED}, 2 of 3", True),
        (None, "healthy", f"cannot be asked: no descriptors; {REFUSED}, 2 of 3", True),
        (REFUSED, "unhealthy", f"{REFUSED}, 3 of 3", False),
        ("status 500", "unhealthy", "status 500, 3 of 3", False),
        (good, "unhealthy", f"{answered}, 1 of 2", False),
        (REFUSED, "unhealthy", f"{REFUSED}, 1 of 3", False),
        (good, "unhealthy", f"{answered}, 1 of 2", False),
        (good, "healthy", answered, True),
    ]

    async def story(vipd: Vipd) -> None:
        for number, (answer, health, check, serves) in enumerate(steps):
            endpoint = await asked(vipd, answer, ONE)
            assert (endpoint["health"], endpoint["check"]) == (health, check), number
            assert endpoint["ready"] is serves
            assert (f"{ONE}:80" in shares(vipd)) is serves
            warned = f"tcp {ONE}:80 cannot be asked: no descriptors" in (await vipd.status())["warnings"]
            assert warned is (answer is None)

    running(story, lambda vipd: vipd.declare(service("web", ONE, TWO)), simulated=True)


def test_until_the_first_verdict_start_says_what_counts() -> None:
    async def story(vipd: Vipd) -> None:
        assert vipd.kernel.serving().get("late 10.96.0.2:80/tcp") == {}
        assert vipd.kernel.serving()["web 10.96.0.1:80/tcp"] == {f"{ONE}:80": 1}
        await asyncio.sleep(3)
        assert vipd.kernel.serving()["late 10.96.0.2:80/tcp"] == {f"{TWO}:80": 1}

    blocks = service("web", ONE), service("late", TWO, check="start: unhealthy", number=2)
    running(story, lambda vipd: vipd.declare(*blocks), simulated=True)


TIMINGS = [(1, 1), (1, 3), (2, 3), (5, 4)]
BACKENDS = [[f"10.244.{number}.{n}" for n in range(1, 5)] for number in range(len(TIMINGS))]
ANSWERS = 50


def rows_of_answers(chance: Random) -> list[object]:
    """Single ones and rows of all kinds."""
    kinds: tuple[object, ...] = (True, True, REFUSED, None)
    rows = [[chance.choice(kinds)] * chance.choice((1, 1, 2, 3, 12)) for _ in range(40)]
    return [answer for row in rows for answer in row][:ANSWERS]


class Judge:
    """Sees whether what is shown of backends follows from what they answered."""

    def __init__(self) -> None:
        chance = Random(1)
        self._rows = {f"{address}:80": rows_of_answers(chance) for some in BACKENDS for address in some}
        self._states: dict[str, str] = {}
        self.backends = Answering(self._answer)

    def _answer(self, address: str, number: int) -> object:
        return self._rows[address][number] if number < ANSWERS else True

    def see(self, address: str, state: str, rise: int, fall: int) -> None:
        """What is shown of a backend may be older than its last answers by two of them."""
        row = [answer is True for answer in self.backends.given[address] if answer is not None]
        rows = [row[: len(row) - newer] for newer in range(3)]
        if state != self._states.get(address, "unknown"):
            wanted = [True] * rise if state == "healthy" else [False] * fall
            assert any(row[-len(wanted) :] == wanted for row in rows), (address, row)
        self._states[address] = state
        if all(len(row) >= fall and not any(row[-fall:]) for row in rows):
            assert state == "unhealthy", (address, row)


def test_no_row_of_answers_changes_a_verdict_too_early_or_too_late() -> None:
    """Whatever was before, flapping included; and who answers well returns within the longest hold."""
    judge = Judge()

    async def story(vipd: Vipd) -> None:
        for _ in range(ANSWERS):
            await asyncio.sleep(1)
            for number, (rise, fall) in enumerate(TIMINGS):
                for address, endpoint in (await shown(vipd, f"s{number}")).items():
                    judge.see(address, endpoint["health"], rise, fall)
        await asyncio.sleep(LONGEST_HOLD + 10)
        for number in range(len(TIMINGS)):
            assert {e["health"] for e in (await shown(vipd, f"s{number}")).values()} == {"healthy"}

    def prepare(vipd: Vipd) -> None:
        vipd.backends = judge.backends
        vipd.declare(
            *(
                service(f"s{n}", *BACKENDS[n], check=f"rise: {rise}, fall: {fall}", number=n + 1)
                for n, (rise, fall) in enumerate(TIMINGS)
            )
        )

    running(story, prepare, simulated=True)


def test_death_is_noticed_within_fall_intervals() -> None:
    """However the pauses are shortened."""
    addresses = [f"10.244.0.{n}" for n in range(1, 31)]

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(30)
        vipd.backends.update(dict.fromkeys(addresses, REFUSED))
        await asyncio.sleep(0.7)
        assert len(shares(vipd)) == 30, "three answers take longer"
        await asyncio.sleep(2.4)
        assert shares(vipd) == {}

    blocks = service("web", *addresses, check="type: tcp, interval: 1s, timeout: 1s, jitter: 50%")
    running(story, lambda vipd: vipd.declare(blocks), simulated=True)


INTERVAL, RISE, FALL = 5.0, 2, 3
SLOWER = service("web", ONE, TWO, check="type: tcp, interval: 5s, jitter: 0%")
WINDOW = 6 * (RISE + FALL) * INTERVAL
LONGEST_HOLD = 600.0


async def cycle(vipd: Vipd) -> float:
    """A backend goes down and up as fast as it can; the seconds that it was kept down, in whole intervals."""
    clock = asyncio.get_running_loop().time
    vipd.backends[ONE] = REFUSED
    went = clock()
    while f"{ONE}:80" in shares(vipd):  # noqa: ASYNC110 (it has no event)
        await asyncio.sleep(0.2)
    assert clock() - went <= FALL * INTERVAL + 0.3, "going down is not delayed"
    vipd.backends[ONE] = True
    down = clock()
    while f"{ONE}:80" not in shares(vipd):  # noqa: ASYNC110
        await asyncio.sleep(1)
    return round((clock() - down) / INTERVAL) * INTERVAL


def test_a_flapping_backend_is_held_down_longer_each_time() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(20)
        kept = [await cycle(vipd) for _ in range(10)]
        usual = RISE * INTERVAL
        wanted = [*[usual] * 3, 25.0, 50.0, 100.0, 200.0, 400.0, *[LONGEST_HOLD] * 2]
        assert kept == pytest.approx(wanted, abs=INTERVAL)
        # After quiet time it comes back as fast as any: each window without changes takes one level back.
        await asyncio.sleep(6 * WINDOW)
        assert await cycle(vipd) == pytest.approx(50.0, abs=INTERVAL)
        await asyncio.sleep(20 * WINDOW)
        assert await cycle(vipd) == usual

    running(story, lambda vipd: vipd.declare(SLOWER), simulated=True)


def test_the_hold_is_told_while_it_lasts() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(20)
        for _ in range(3):
            await cycle(vipd)
        for _ in range(FALL):
            await asked(vipd, REFUSED, ONE)
        endpoint = await asked(vipd, True, ONE)
        held = "flapping: 7 changes in 80 s, held down for 20 s; answered in 1.0 ms, 1 of 2"
        assert (endpoint["health"], endpoint["check"]) == ("unhealthy", held)
        assert endpoint["reason"] == f"unhealthy: {held}"
        await asyncio.sleep(25)
        endpoint = (await shown(vipd))[f"{ONE}:80"]
        assert (endpoint["health"], endpoint["check"]) == ("healthy", "answered in 1.0 ms")

    running(story, lambda vipd: vipd.declare(SLOWER), simulated=True)


def test_slow_changes_are_no_flapping() -> None:
    async def story(vipd: Vipd) -> None:
        for _ in range(12):
            await asyncio.sleep(WINDOW / 2)
            assert await cycle(vipd) == RISE * INTERVAL

    running(story, lambda vipd: vipd.declare(SLOWER), simulated=True)


def test_a_verdict_is_a_line_of_the_log_but_for_the_first_good_one() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(5)
        for answer in (REFUSED, True):
            vipd.backends[ONE] = answer
            await asyncio.sleep(5)
        assert told(vipd, ":80 is ") == [
            f"tcp {ONE}:80 is unhealthy: {REFUSED}, 3 of 3",
            f"tcp {ONE}:80 is healthy: answered in 1.0 ms",
        ]
        levels = [record.levelname for record in vipd.journal if ":80 is " in record.getMessage()]
        assert levels == ["WARNING", "INFO"]

    running(story, lambda vipd: vipd.declare(service("web", ONE, TWO)), simulated=True)


def test_of_many_verdicts_at_once_most_are_counted() -> None:
    addresses = [f"10.244.0.{n}" for n in range(1, 41)]

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(10)
        vipd.backends.update(dict.fromkeys(addresses, REFUSED))
        await asyncio.sleep(20)
        assert len(told(vipd, "is unhealthy")) == 20
        assert told(vipd, "of other backends") == [
            "of other backends, 20 became unhealthy; hint: vipctl list -o wide"
        ]
        vipd.backends[addresses[0]] = True
        await asyncio.sleep(10)
        assert len(told(vipd, "is healthy")) == 1

    running(story, lambda vipd: vipd.declare(service("web", *addresses)), simulated=True)


def test_an_unexpected_fault_with_one_backend_is_its_trouble_alone() -> None:
    """It is logged once, with its traceback, and shown."""

    def answer(address: str, number: int) -> object:
        if address == f"{TWO}:80":
            raise ZeroDivisionError("by chance")
        return True if number < 5 else REFUSED

    def prepare(vipd: Vipd) -> None:
        vipd.backends = Answering(answer)
        vipd.declare(service("web", ONE, TWO))

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(4)
        assert (await shown(vipd))[f"{ONE}:80"]["health"] == "healthy"
        await asyncio.sleep(20)
        endpoints = await shown(vipd)
        trouble = (
            f"internal error while checking tcp {TWO}:80: ZeroDivisionError: by chance; please report it"
        )
        assert endpoints[f"{ONE}:80"]["health"] == "unhealthy"
        assert endpoints[f"{TWO}:80"]["health"] == "unknown"
        assert trouble in endpoints[f"{TWO}:80"]["check"]
        assert any(trouble in warning for warning in (await vipd.status())["warnings"])
        assert len([record for record in vipd.journal if record.exc_info]) == 1

    running(story, prepare, simulated=True)


def test_a_healthy_backend_is_not_said_to_be_held_down() -> None:
    """A hold that is over lasts again by the clock if that was set back before a restart."""
    held = Flapping((1.0,), level=1, held_until=40.0)
    record = HealthRecord(0.0, HealthState.HEALTHY, last_reason="answered", flapping=held)
    assert record.reason(30.0) == "answered"
