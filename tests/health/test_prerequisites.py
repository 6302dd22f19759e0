"""What this host lacks for checks: asked in threads, and whatever hangs there holds up nobody else."""

from __future__ import annotations

import asyncio
import threading

from vipd.health.prerequisites import UNANSWERED, Prerequisites
from vipd.model.check import Check, ExecProbe

QUICK, SLOW = Check(ExecProbe(command=("/bin/quick",))), Check(ExecProbe(command=("/bin/slow",)))
PATIENCE_SECONDS = 30.0


class SlowPrerequisites:
    """Answers at once, but for one check whose answer waits to be released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.asked: list[Check] = []

    def __call__(self, check: Check) -> tuple[str, ...]:
        self.asked.append(check)
        if check is SLOW:
            self.released.wait(PATIENCE_SECONDS)
        return ("no such file; hint: make one",)


def late(prerequisites: Prerequisites) -> bool:
    return prerequisites.answered_late


def test_what_hangs_is_a_problem_of_its_own_and_asked_once() -> None:
    async def story() -> None:
        host = SlowPrerequisites()
        prerequisites = Prerequisites(host, patience=0.05)
        found = await prerequisites.problems([QUICK, SLOW])
        assert found[SLOW] == UNANSWERED
        assert found[QUICK] == ("no such file; hint: make one",)
        for _ in range(5):
            assert (await prerequisites.problems([SLOW]))[SLOW] == UNANSWERED
        assert host.asked.count(SLOW) == 1, "no further thread hangs"
        assert not late(prerequisites)
        host.released.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not late(prerequisites):  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.01)
        assert (await prerequisites.problems([SLOW]))[SLOW] == ("no such file; hint: make one",)
        assert not late(prerequisites)

    asyncio.run(story())


def test_any_number_of_questions_that_hang_leaves_a_bounded_number_of_threads() -> None:
    released = threading.Event()

    def hang(_: Check) -> tuple[str, ...]:
        released.wait(PATIENCE_SECONDS)
        return ()

    async def story() -> None:
        checks = [Check(ExecProbe(command=("/bin/slow", str(n)))) for n in range(200)]
        before = threading.active_count()
        found = await Prerequisites(hang, patience=0.05).problems(checks)
        assert set(found.values()) == {UNANSWERED}
        assert threading.active_count() - before <= 16

    asyncio.run(story())
    released.set()


def test_an_unexpected_exception_is_a_problem_of_the_check() -> None:
    def fail(_: Check) -> tuple[str, ...]:
        raise IndexError("tuple index out of range")

    found = asyncio.run(Prerequisites(fail).problems([QUICK]))
    (told,) = found[QUICK]
    assert told.startswith("internal error while asking this host about it: IndexError")
