"""When backends are asked, and who waits for whom: a vipd in simulated time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from tests.health.stories import REFUSED, Answering, service, shares, shown, told
from tests.lab.inside import Vipd, running
from tests.lab.simulated_time import pass_over

ONE = "10.244.0.1"


def addresses(count: int, third: int = 0) -> list[str]:
    return [f"10.244.{third + n // 250}.{n % 250 + 1}" for n in range(count)]


def prepared(backends: Answering, *blocks: str, **files: str) -> Callable[[Vipd], None]:
    """What a story begins with: these backends, a file of these blocks, and one of each further name."""

    def prepare(vipd: Vipd) -> None:
        vipd.backends = backends
        vipd.declare(*blocks)
        for name, text in files.items():
            vipd.declare(text, name=f"{name}.yaml")

    return prepare


def test_pauses_are_never_longer_than_the_interval_and_differ() -> None:
    backends = Answering()

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(30)
        pauses = backends.pauses(f"{ONE}:80")[1:]
        assert max(pauses) <= 1.01
        assert min(pauses) >= 0.49
        assert len({round(pause, 2) for pause in pauses}) > 5

    jitter = service("web", ONE, check="type: tcp, interval: 1s, timeout: 1s, jitter: 50%")
    running(story, prepared(backends, jitter), simulated=True)


def test_new_backends_are_spread_and_asked_soon() -> None:
    """One is asked at once; thousands are not all asked at once."""
    backends = Answering()
    many = service("web", *addresses(2000), check="type: tcp, interval: 9s, rise: 100")

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(6)
        first = sorted(times[0] for times in backends.times.values())
        assert len(first) == 2000
        first = [at - first[0] for at in first]
        assert 3.5 < first[-1] <= 4.2
        counts = Counter(int(at * 10) for at in first)
        assert max(counts.values()) < 100, "in a tenth of a second"

    running(story, prepared(backends, many), simulated=True)


def test_a_check_that_still_runs_when_the_next_is_due_is_followed_at_once() -> None:
    """Also where all of them do, again and again."""
    backends = Answering(lambda *_: ...)

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(30)
        for pauses in map(backends.pauses, (f"{ONE}:80", "10.244.0.2:80")):
            assert len(pauses) >= 27
            assert max(pauses[1:]) <= 1.05

    running(story, prepared(backends, service("web", ONE, "10.244.0.2")), simulated=True)


def test_who_stays_keeps_its_time_when_others_come_and_go() -> None:
    backends = Answering()

    async def story(vipd: Vipd) -> None:
        for number in range(60):
            vipd.declare(service("web", ONE), service("other", f"10.244.1.{number + 1}", number=2))
            await vipd.reload()
            await asyncio.sleep(0.1)
        pauses = backends.pauses(f"{ONE}:80")[1:]
        assert len(pauses) >= 3
        assert {round(pause, 1) for pause in pauses} == {1.0}

    running(story, prepared(backends, service("web", ONE)), simulated=True)


def test_services_share_a_check_and_it_lasts_as_long_as_one_needs_it() -> None:
    backends = Answering(lambda address, number: REFUSED if number > 4 else True)
    one, other = service("one", ONE), service("other", ONE, number=2)

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(4)
        assert len(backends.given[f"{ONE}:80"]) <= 5
        vipd.declare(other)
        await vipd.reload()
        assert (await shown(vipd, "other"))[f"{ONE}:80"]["health"] == "healthy"
        await asyncio.sleep(10)
        assert shares(vipd) == {}
        vipd.declare()
        await vipd.reload()
        lines, questions = len(vipd.journal), len(backends.given[f"{ONE}:80"])
        await asyncio.sleep(10)
        assert len(backends.given[f"{ONE}:80"]) == questions, "nobody needs it"
        assert len(vipd.journal) == lines
        vipd.declare(one)
        await vipd.reload()
        assert shares(vipd) == {}, "who comes back is as it was"

    running(story, prepared(backends, one, other), simulated=True)


def test_after_a_stall_checks_start_in_turns_with_everything_else() -> None:
    """A thousand are due at once then, and in the first turn some of each type."""
    turn, turns = 0, Counter[int]()

    def answer(address: str, number: int) -> object:
        turns[turn] += 1
        return True

    backends = Answering(answer)
    blocks = [
        service("tcp", *addresses(1500), check="type: tcp, interval: 20s, jitter: 0%, rise: 100"),
        service("http", ONE, check="type: https, port: 8443, interval: 20s, jitter: 0%", number=2),
    ]

    async def story(vipd: Vipd) -> None:
        nonlocal turn
        await asyncio.sleep(30)
        turns.clear()
        pass_over(25)
        while turns.total() < 1400:
            await asyncio.sleep(0)
            turn += 1
        assert max(turns.values()) <= 128
        assert 55 <= backends.times[f"{ONE}:8443"][-1] < 55.05

    running(story, prepared(backends, *blocks), simulated=True)


HANGS = "type: exec, command: [/bin/true], interval: 5s, timeout: 2s, jitter: 0%"


@pytest.mark.root
def test_programs_that_hang_delay_neither_those_that_do_not_nor_other_checks() -> None:
    """An author has room for 32 of them, and many hang for two seconds of every five."""
    hanging, good = addresses(120), ["10.244.9.1", "10.244.9.2"]
    backends = Answering(lambda address, _: ... if address.startswith("10.244.0.") else True)
    blocks = [
        service("hangs", *hanging, check=HANGS),
        service("good", *good, check=HANGS, number=2),
        service("plain", "10.244.9.3", number=3),
    ]

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(120)
        assert max(pause for address in good for pause in backends.pauses(f"{address}:80")[4:]) <= 5.1
        assert max(backends.pauses("10.244.9.3:80")) <= 1.1
        late = [text for text in (await vipd.status())["warnings"] if "are all there is room for" in text]
        (trouble,) = late
        assert trouble.startswith(
            "32 exec checks at once are all there is room for, 24 of which hung before: "
        )
        assert " s late; hint: give those that hang a shorter timeout" in trouble
        assert len(told(vipd, "exec checks at once are all there is room for")) == 1, "until it is over"
        vipd.declare(*blocks[1:])
        await vipd.reload()
        await asyncio.sleep(55)
        assert told(vipd, "have been in time") == []
        await asyncio.sleep(15)
        assert told(vipd, "have been in time") == ["health checks have been in time for 60 s"]

    running(story, prepared(backends, *blocks), simulated=True)


@pytest.mark.root
def test_a_program_that_hung_gets_its_turn_beside_many_that_do_not() -> None:
    backends = Answering(lambda address, _: ... if address.startswith("10.244.9.") else True)
    blocks = [
        service("good", *addresses(2000), check=HANGS + ", rise: 100"),
        service("slow", "10.244.9.1", check=HANGS, number=2),
    ]

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(60)
        assert len(backends.times["10.244.9.1:80"]) >= 5

    running(story, prepared(backends, *blocks), simulated=True)


@pytest.mark.root
def test_one_authors_programs_leave_room_for_anothers_however_many_and_long_they_are() -> None:
    backends = Answering(lambda address, _: ... if address.startswith("10.244.0.") else True)
    forever = "type: exec, command: [/bin/true], interval: 60m, timeout: 60m"
    each_second = "type: exec, command: [/bin/true], interval: 1s, timeout: 1s, jitter: 0%"

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(60)
        assert len(backends.times["10.244.9.1:80"]) >= 55
        assert max(backends.pauses("10.244.9.1:80")) <= 1.1
        assert len([times for address, times in backends.times.items() if times]) == 33
        assert "32 exec checks at once are all there is room for" in "".join(
            (await vipd.status())["warnings"]
        )

    files = {
        "a": service("hangs", *addresses(100), check=forever),
        "b": service("other", "10.244.9.1", check=each_second, number=2),
    }
    running(story, prepared(backends, **files), simulated=True)
