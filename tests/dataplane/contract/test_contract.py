"""The promises of `vipd.dataplane.base.Dataplane`, one by one, of every dataplane."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.contract.contestants import CONTESTANTS, HOLDING, REFUSAL, Contestant, Held
from tests.dataplane.declared import kube_like_services, numbered
from vipd.dataplane.base import DATAPLANES, ApplyError
from vipd.model.service import Family

pytestmark = pytest.mark.root

Story = Callable[[Contestant], Awaitable[None]]
Play = Callable[[Story], None]

ONE, OTHER, THIRD = numbered(1, "10.244.0.1"), numbered(2, "10.244.0.2"), numbered(3, "10.244.0.3@2")
BAD_BACKEND = "10.244.0.66"
BAD = numbered(2, BAD_BACKEND)
FIRST = (*kube_like_services(), ONE, OTHER)
SECOND = (kube_like_services()[0], replace(OTHER, backends=(*OTHER.backends, *THIRD.backends)), THIRD)


@pytest.fixture(params=CONTESTANTS, ids=lambda kind: kind.__name__.lower())
def kind(request: pytest.FixtureRequest) -> type[Contestant]:
    given: type[Contestant] = request.param
    return given


@pytest.fixture
def play(kind: type[Contestant], tmp_path: Path) -> Play:
    """Plays a story with a contestant that has just been started."""

    def played(story: Story) -> None:
        async def whole() -> None:
            with kind(tmp_path) as contestant:
                await contestant.restart()
                await story(contestant)

        asyncio.run(whole())

    return played


async def cold(contestant: Contestant) -> Held:
    """What the kernel of a dataplane that knows nothing but the same forwardings holds."""
    with type(contestant)(contestant.settings.state_dir / "cold") as fresh:
        fresh.forwardings = dict(contestant.forwardings)
        await fresh.restart()
        await fresh.step()
        return fresh.held()


async def as_cold(contestant: Contestant) -> None:
    """All is written, and is what a cold start writes."""
    assert not await contestant.dataplane.plan()
    assert contestant.held() == await cold(contestant)


async def write_that_waits(contestant: Contestant) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A change that is being written, and the gate that it waits for."""
    await contestant.become(*FIRST)
    contestant.declare(SECOND)
    plan, gate = await contestant.dataplane.plan(), asyncio.Event()
    entered = contestant.hold(gate)
    writing = asyncio.create_task(contestant.dataplane.apply(plan))
    await asyncio.wait_for(entered.wait(), 120)
    return writing, gate


def test_to_be_told_of_forwardings_touches_nothing(play: Play) -> None:
    async def story(one: Contestant) -> None:
        before = one.held()
        one.declare(FIRST)
        assert one.held() == before
        await one.dataplane.plan()
        assert one.held() == before

    play(story)


def test_any_walk_ends_like_a_cold_start_and_without_services_nothing_is_left(play: Play) -> None:
    async def story(one: Contestant) -> None:
        before = one.held()
        for services in (FIRST, SECOND, (ONE,), FIRST):
            await one.become(*services)
        await as_cold(one)
        await one.become()
        assert one.held() == before

    play(story)


def test_a_plan_is_text_while_there_is_something_to_do(play: Play) -> None:
    async def story(one: Contestant) -> None:
        one.declare(FIRST)
        plan = await one.dataplane.plan()
        assert plan
        assert str(plan)
        assert str(await one.dataplane.plan()) == str(plan), "a plan that is not applied changes nothing"
        await one.step()
        plan = await one.dataplane.plan()
        assert not plan
        assert str(plan) == ""

    play(story)


def test_a_new_process_finds_nothing_to_do(play: Play) -> None:
    async def story(one: Contestant) -> None:
        await one.become(*FIRST)
        await one.restart()
        assert not await one.dataplane.plan()
        await one.become(*SECOND)
        await as_cold(one)

    play(story)


def test_what_somebody_else_did_is_seen_by_a_look_afresh(play: Play) -> None:
    async def story(one: Contestant) -> None:
        await one.become(*FIRST)
        one.disturb()
        disturbed = one.held()
        one.dataplane.invalidate_all()
        assert await one.dataplane.plan()
        assert one.held() == disturbed
        await one.step()
        await as_cold(one)

    play(story)


def test_a_failure_is_told_blames_nobody_and_is_made_good(play: Play) -> None:
    async def story(one: Contestant) -> None:
        await one.become(*FIRST)
        one.declare(SECOND)
        with one.failing(), pytest.raises(ApplyError, match=HOLDING):
            await one.step()
        assert not one.dataplane.quarantined()
        await one.step()
        await as_cold(one)

    play(story)


def test_who_is_refused_is_named_and_holds_back_nobody(play: Play) -> None:
    async def story(one: Contestant) -> None:
        await one.become(ONE, OTHER)
        with one.refusing(BAD_BACKEND):
            await one.become(ONE, BAD, THIRD)
            ((key, reason),) = one.dataplane.quarantined().items()
            assert key.service == BAD.name
            assert REFUSAL in reason
            assert not await one.dataplane.plan()
            # It goes on as the kernel had it; all others are as they should be.
            found = one.held()
            one.declare((ONE, OTHER, THIRD))
            assert found == await cold(one)

    play(story)


def test_a_new_form_gets_a_new_chance_and_so_does_a_look_afresh(play: Play) -> None:
    async def story(one: Contestant) -> None:
        with one.refusing(BAD_BACKEND):
            await one.become(ONE, BAD)
            assert one.dataplane.quarantined()
            await one.become(ONE, OTHER)
            assert not one.dataplane.quarantined()
            await as_cold(one)
            await one.become(ONE, BAD)
            await one.become(ONE)
            assert not one.dataplane.quarantined()
            await one.become(ONE, BAD)
        one.dataplane.invalidate_all()
        await one.step()
        assert not one.dataplane.quarantined()
        await as_cold(one)

    play(story)


def test_to_forget_amid_a_write_makes_the_next_plan_look(play: Play) -> None:
    async def story(one: Contestant) -> None:
        writing, gate = await write_that_waits(one)
        one.dataplane.invalidate_all()
        gate.set()
        await writing
        one.disturb()
        assert await one.dataplane.plan()
        await one.step()
        await as_cold(one)

    play(story)


def test_a_write_that_is_cancelled_is_made_good(play: Play) -> None:
    async def story(one: Contestant) -> None:
        writing, gate = await write_that_waits(one)
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing
        gate.set()
        await one.step()
        await as_cold(one)

    play(story)


def test_it_says_what_it_is_and_where_a_service_is_found(play: Play) -> None:
    async def story(one: Contestant) -> None:
        await one.become(*FIRST)
        assert one.dataplane.name in DATAPLANES
        assert one.dataplane.versions().keys() == {str(family) for family in Family}
        assert all(one.dataplane.versions().values())
        assert one.dataplane.warnings() == ()
        assert one.dataplane.quarantined() == {}
        for forwarding in one.forwardings.values():
            chain, of_endpoints = one.dataplane.chains_of(forwarding)
            assert chain
            assert of_endpoints.keys() == set(forwarding.reachable())
        await one.dataplane.host_changed(frozenset({"192.0.2.1"}))
        await one.dataplane.host_changed(frozenset({"192.0.2.1", "2001:db8::1"}))
        await as_cold(one)

    play(story)
