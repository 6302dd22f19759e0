"""Answers that many ask for: made once, never of an earlier state than that of the request."""

from __future__ import annotations

import asyncio

from tests.lab.simulated_time import simulate
from vipd.control.shared_run import KEPT_SECONDS, SharedAnswers


class Maker:
    """Makes answers, each of the state when it begins, in two seconds."""

    def __init__(self) -> None:
        self.state, self.made, self.at_a_time = 0, 0, 0
        self.answers = SharedAnswers(lambda: self.state)

    async def make(self) -> bytes:
        state, self.made = self.state, self.made + 1
        self.at_a_time += 1
        assert self.at_a_time == 1, "one is made at a time"
        try:
            await asyncio.sleep(2)
        finally:
            self.at_a_time -= 1
        return b"%d" % state

    async def body(self, key: str = "a", *, kept: bool = True) -> bytes:
        return await self.answers.body(key, self.make, kept=kept)


def test_all_that_ask_share_one_answer_while_the_state_is_the_same() -> None:
    async def story() -> None:
        maker = Maker()
        bodies = await asyncio.gather(*(maker.body() for _ in range(60)))
        assert ({id(body) for body in bodies}, maker.made) == ({id(bodies[0])}, 1)
        assert await maker.body() is bodies[0]
        await asyncio.sleep(KEPT_SECONDS / 2)
        assert (await maker.body(), maker.made) == (b"0", 1)
        await asyncio.sleep(KEPT_SECONDS)
        assert maker.answers._answers == {}, "nothing is kept for nobody"
        assert (await maker.body(), maker.made) == (b"0", 2)

    simulate(story())


def test_no_answer_is_of_a_state_before_its_request() -> None:
    async def story() -> None:
        maker = Maker()
        early = asyncio.create_task(maker.body())
        await asyncio.sleep(1)
        maker.state = 1
        late = [asyncio.create_task(maker.body()) for _ in range(9)]
        await asyncio.sleep(2)
        maker.state = 2  # while theirs is made
        assert [await early, *[await task for task in late]] == [b"0", *[b"1"] * 9]
        assert (await maker.body(), maker.made) == (b"2", 3)

    simulate(story())


def test_numbers_are_never_older_than_their_request() -> None:
    async def story() -> None:
        maker = Maker()
        for number in (1, 2):
            bodies = await asyncio.gather(*(maker.body(kept=False) for _ in range(9)))
            assert len(set(bodies)) == 1
            assert maker.made == 2 * number

    simulate(story())


def test_kinds_are_made_in_turn_and_who_hangs_up_leaves_the_others_theirs() -> None:
    async def story() -> None:
        maker = Maker()
        gone = asyncio.create_task(maker.body())
        others = [asyncio.create_task(maker.body(key)) for key in "aab"]
        await asyncio.sleep(1)
        gone.cancel()
        assert [await task for task in others] == [b"0"] * 3

    simulate(story())
