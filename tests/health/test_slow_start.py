"""Shares of backends that come back, and that say their own weight: in rules, and as they are shown."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.health.stories import REFUSED, service, shares, shown
from tests.lab.inside import Vipd, running

BACKENDS = ("10.244.0.1", "{address: 10.244.0.2, weight: 1}", "{address: 10.244.0.3, weight: 3}")
SLOW = service("web", *BACKENDS, more="slow_start: 60s")
ONE, TWO, THREE = (f"10.244.0.{n}:80" for n in (1, 2, 3))


async def two_comes_back(vipd: Vipd) -> None:
    """The second backend has just become healthy again."""
    await asyncio.sleep(5)
    assert shares(vipd) == {ONE: 1, TWO: 1, THREE: 3}, "who was never down has no slow start"
    vipd.backends["10.244.0.2"] = REFUSED
    await vipd.until(lambda: TWO not in shares(vipd))
    vipd.backends["10.244.0.2"] = True
    await vipd.until(lambda: TWO in shares(vipd))


async def view(vipd: Vipd) -> dict[str, tuple[int, int, str]]:
    """The weight, the share in percent and the reason that are shown of each backend."""
    return {
        place: (endpoint["weight"], round(100 * endpoint["share"]), endpoint["reason"])
        for place, endpoint in (await shown(vipd)).items()
    }


def test_a_share_grows_step_by_step_to_its_full() -> None:
    """It is shown with the weights that are declared, and is the reason of its own alone."""

    async def story(vipd: Vipd) -> None:
        await two_comes_back(vipd)
        steps = []
        await asyncio.sleep(1)  # between two steps
        for _ in range(12):
            serving = shares(vipd)
            assert serving[THREE] == 3 * serving[ONE]
            steps.append(round(10 * serving[TWO] / serving[ONE]))
            if steps[-1] < 10:
                assert (await view(vipd))[TWO][::2] == (1, "slow start")
            await asyncio.sleep(6)
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10]
        assert shares(vipd) == {ONE: 1, TWO: 1, THREE: 3}
        assert await view(vipd) == {ONE: (1, 20, ""), TWO: (1, 20, ""), THREE: (3, 60, "")}

    running(story, lambda vipd: vipd.declare(SLOW), simulated=True)


def test_a_slow_start_begins_when_a_backend_serves_that_had_not_served() -> None:
    """Also one that waits for its first verdict."""
    late = service("web", *BACKENDS[:2], check="start: unhealthy", more="slow_start: 60s")

    async def story(vipd: Vipd) -> None:
        vipd.backends["10.244.0.2"] = REFUSED
        await asyncio.sleep(100)
        assert await view(vipd) == {ONE: (1, 100, ""), TWO: (1, 0, f"unhealthy: {REFUSED}, 3 of 3")}
        vipd.backends["10.244.0.2"] = True
        await vipd.until(lambda: TWO in shares(vipd))
        assert (await view(vipd))[TWO] == (1, 9, "slow start")

    running(story, lambda vipd: vipd.declare(late), simulated=True)


def test_a_slow_start_goes_on_over_a_restart(tmp_path: Path) -> None:
    """By clocks that began anew."""

    async def first(vipd: Vipd) -> float:
        await two_comes_back(vipd)
        await asyncio.sleep(20)
        return asyncio.get_running_loop().time()

    async def second(vipd: Vipd) -> None:
        assert round(10 * shares(vipd)[TWO] / shares(vipd)[ONE]) in (5, 6)
        await asyncio.sleep(10)
        assert round(10 * shares(vipd)[TWO] / shares(vipd)[ONE]) in (7, 8)

    ended = running(first, lambda vipd: vipd.declare(SLOW), tmp_path, simulated=True)
    running(second, lambda vipd: vipd.declare(SLOW), tmp_path, simulated=True, later=ended + 10)


def test_a_weight_that_a_backend_says_counts_where_the_service_listens() -> None:
    async def story(vipd: Vipd) -> None:
        vipd.backends |= {"10.244.0.1": 7, "10.244.0.3": 0}
        await asyncio.sleep(5)
        assert vipd.kernel.serving() == {
            "web 10.96.0.1:80/tcp": {ONE: 7, TWO: 1},
            "deaf 10.96.0.2:80/tcp": {ONE: 1, TWO: 1, THREE: 3},
        }
        said = "weight 7 said by its check"
        assert (await view(vipd))[ONE] == (7, 88, said)
        vipd.backends["10.244.0.1"] = REFUSED
        await asyncio.sleep(1.5)
        assert (await view(vipd))[ONE] == (7, 88, said), "that of the last good answer"
        vipd.backends["10.244.0.1"] = True
        await asyncio.sleep(2)
        assert (await view(vipd))[ONE] == (1, 50, "")

    http = "type: http, interval: 1s, timeout: 1s, jitter: 0%"
    listens = service("web", *BACKENDS, check=http, more="weight_from: check")
    deaf = service("deaf", *BACKENDS, check=http, number=2)
    running(story, lambda vipd: vipd.declare(listens, deaf), simulated=True)


def test_a_dead_last_resort_does_not_serve() -> None:
    """If neither the backends nor the fallback can serve, flows are refused."""

    async def story(vipd: Vipd) -> None:
        assert shares(vipd) == {"10.244.0.8:80": 1}
        vipd.backends["10.244.0.8"] = REFUSED
        await asyncio.sleep(5)
        assert shares(vipd) == {}

    sorry = service("web", more="fallback: {backends: [10.244.0.8]}")
    running(story, lambda vipd: vipd.declare(sorry), simulated=True)
