"""Verdicts outlive changes of checks, restarts and crashes, for a while."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.health.stories import REFUSED, asked, service, shares, shown, told
from tests.lab.cached import cached
from tests.lab.inside import Vipd, running

ONE, TWO, PLACE = "10.244.0.1", "10.244.0.2", "10.244.0.1:80"
WEB = service("web", ONE, TWO)
LONG = "type: tcp, interval: 60s, timeout: 1s, fall: 9"
"""Too slow for another verdict in a story of some seconds."""


def declare_web(vipd: Vipd) -> None:
    vipd.declare(WEB)


async def one_dies(vipd: Vipd) -> None:
    """One of the two backends is unhealthy in the end."""
    await asyncio.sleep(4)
    vipd.backends[ONE] = REFUSED
    await asyncio.sleep(6)
    assert shares(vipd) == {f"{TWO}:80": 1}


async def first_health(vipd: Vipd, name: str = "web") -> dict[str, str]:
    """What is known before anybody was asked."""
    return {place: endpoint["health"] for place, endpoint in (await shown(vipd, name)).items()}


def after_restart(root: Path, block: str = WEB, later: float = 20.0, name: str = "web") -> dict[str, str]:
    """What a vipd knows that starts `later` than the first one did from what that left on disk."""
    story = partial(first_health, name=name)
    return running(story, lambda vipd: vipd.declare(block), root, simulated=True, later=later)


def test_a_changed_check_keeps_the_verdict_and_counts_anew() -> None:
    async def story(vipd: Vipd) -> None:
        await one_dies(vipd)
        vipd.declare(service("web", ONE, TWO, check="rise: 4, fall: 2"))
        await vipd.reload()
        one = (await shown(vipd))[PLACE]
        assert (one["health"], one["check"]) == ("unhealthy", f"as before: {REFUSED}, 3 of 3")
        for row in range(1, 4):
            one = await asked(vipd, True, ONE)
            assert (one["health"], one["check"]) == ("unhealthy", f"answered in 1.0 ms, {row} of 4")
        assert (await asked(vipd, True, ONE))["health"] == "healthy"
        await asked(vipd, REFUSED, ONE)
        vipd.declare(service("web", ONE, TWO, check="rise: 4, fall: 3"))
        await vipd.reload()
        for _ in range(2):
            assert (await asked(vipd, REFUSED, ONE))["health"] == "healthy", "counted anew"
        assert (await asked(vipd, REFUSED, ONE))["health"] == "unhealthy"

    running(story, declare_web, simulated=True)


def test_a_check_inherits_from_that_which_it_replaces_in_its_service_alone() -> None:
    """Of two, it is not known which one."""

    async def story(vipd: Vipd) -> None:
        vipd.backends[ONE] = REFUSED
        await asyncio.sleep(10)
        other = service("other", ONE, check="fall: 9, rise: 2", number=2)
        vipd.declare(WEB, other)
        await vipd.reload()
        assert (await shown(vipd, "other"))[PLACE]["health"] == "unknown", "another check of another service"
        vipd.declare(service("web", ONE, TWO, check="fall: 9, rise: 4"), other)
        await vipd.reload()
        assert (await shown(vipd))[PLACE]["health"] == "unhealthy"

    running(story, declare_web, simulated=True)


@pytest.mark.parametrize("block", [WEB, service("web", ONE, TWO, check=LONG)], ids=["same", "another"])
def test_verdicts_outlive_a_restart_and_another_check(block: str, tmp_path: Path) -> None:
    """A dead backend does not go back to work because vipd was updated."""
    running(one_dies, declare_web, tmp_path, simulated=True)
    assert after_restart(tmp_path, block) == {PLACE: "unhealthy", f"{TWO}:80": "healthy"}


def test_two_checks_of_one_backend_have_a_verdict_each(tmp_path: Path) -> None:
    """In whatever order they are declared."""
    patient = service("patient", ONE, check="fall: 50", number=2)

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(4)
        vipd.backends[ONE] = REFUSED
        await asyncio.sleep(6)

    running(story, lambda vipd: vipd.declare(WEB, patient), tmp_path, simulated=True)
    for blocks in ((WEB, patient), (patient, WEB)):
        root = tmp_path.with_name(f"copy-{blocks[0][:20].strip()}"[-30:].replace(" ", ""))
        shutil.copytree(tmp_path, root, ignore=shutil.ignore_patterns("vipd.sock"))
        found = {name: after_restart(root, "".join(blocks), name=name)[PLACE] for name in ("web", "patient")}
        assert found == {"web": "unhealthy", "patient": "healthy"}


def test_of_two_ports_of_a_backend_each_has_its_own(tmp_path: Path) -> None:
    """One that is new has none, beside one that is known."""
    ports = [f"{ONE}:{number}" for number in (81, 82)]

    async def story(vipd: Vipd) -> None:
        vipd.backends[ports[0]] = REFUSED
        await asyncio.sleep(10)

    def known(name: str, first: list[str], then: str) -> dict[str, str]:
        (tmp_path / name).mkdir()
        running(story, lambda vipd: vipd.declare(service("web", *first)), tmp_path / name, simulated=True)
        return after_restart(tmp_path / name, then)

    changed = service("web", *ports, check=LONG)
    assert known("both", ports, changed) == {ports[0]: "unhealthy", ports[1]: "healthy"}
    assert known("one", ports[:1], service("web", *ports)) == {ports[0]: "unhealthy", ports[1]: "unknown"}


@pytest.mark.parametrize("later", [620.0, -100.0], ids=["old", "of the future"])
def test_nothing_is_trusted_that_is_old_or_of_the_future(later: float, tmp_path: Path) -> None:
    running(one_dies, declare_web, tmp_path, simulated=True)
    assert after_restart(tmp_path, later=later) == {PLACE: "unknown", f"{TWO}:80": "unknown"}


def test_each_verdict_has_its_own_age(tmp_path: Path) -> None:
    """That of a backend which was left out counts from then."""

    async def story(vipd: Vipd) -> None:
        await one_dies(vipd)
        vipd.declare(service("web", TWO))
        await vipd.reload()
        await asyncio.sleep(400)

    running(story, declare_web, tmp_path, simulated=True)
    assert after_restart(tmp_path, later=800.0) == {PLACE: "unknown", f"{TWO}:80": "healthy"}


def test_a_backend_that_is_left_out_is_remembered_for_a_while() -> None:
    async def story(vipd: Vipd) -> None:
        await one_dies(vipd)
        for seconds, health in ((590, "unhealthy"), (670, "unknown")):
            vipd.declare(service("web", TWO))
            await vipd.reload()
            await asyncio.sleep(seconds)
            verdicts = str(cached(vipd.state_dir, "verdict"))
            vipd.declare(WEB)
            await vipd.reload()
            assert (ONE in verdicts) is (health == "unhealthy")
            assert (await shown(vipd))[PLACE]["health"] == health

    running(story, declare_web, simulated=True)


def crashed(vipd: Vipd, root: Path) -> None:
    """What is on disk at this moment, as a crash leaves it."""
    shutil.copytree(vipd.root, root, ignore=shutil.ignore_patterns("vipd.sock"))


def test_a_crash_forgets_no_bad_verdict_and_good_ones_of_some_seconds(tmp_path: Path) -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(10)
        crashed(vipd, tmp_path / "healthy")
        vipd.backends[ONE] = REFUSED
        await vipd.until(lambda: PLACE not in shares(vipd))
        await asyncio.sleep(0.2)
        crashed(vipd, tmp_path / "bad")
        vipd.backends[ONE] = True
        await vipd.until(lambda: PLACE in shares(vipd))
        await asyncio.sleep(6)
        crashed(vipd, tmp_path / "again")

    running(story, declare_web, simulated=True)
    found = {name: after_restart(tmp_path / name, later=30.0)[PLACE] for name in ("healthy", "bad", "again")}
    assert found == {"healthy": "healthy", "bad": "unhealthy", "again": "healthy"}


def test_crashes_in_a_row_bring_no_dead_backend_back(tmp_path: Path) -> None:
    """Each of them minutes after the one before, but too soon for another verdict."""
    (tmp_path / "0").mkdir()
    running(one_dies, declare_web, tmp_path / "0", simulated=True)
    slow = service("web", ONE, TWO, check=LONG)

    async def story(vipd: Vipd) -> None:
        assert (await first_health(vipd))[PLACE] == "unhealthy"
        await asyncio.sleep(6)
        crashed(vipd, tmp_path / str(number + 1))

    for number in range(5):
        root, later = tmp_path / str(number), 300.0 * (number + 1)
        running(story, lambda vipd: vipd.declare(slow), root, simulated=True, later=later)


def test_crashes_at_any_moment_bring_no_dead_backend_back_while_many_die_and_return(tmp_path: Path) -> None:
    """Each life begins with what the one before had on disk when it was killed. Of two checks of a backend
    one is slower to condemn."""
    chance, dead, condemned = Random(1), set[str](), set[str]()
    addresses = [f"10.244.0.{n}" for n in range(1, 31)]
    served = {"web": addresses, "patient": addresses[::3]}
    patient = service("patient", *served["patient"], check="fall: 4", number=2)

    async def story(vipd: Vipd) -> None:
        for name, some in served.items():
            known = {
                place for place, one in (await shown(vipd, name)).items() if one["health"] == "unhealthy"
            }
            assert {f"{address}:80" for address in condemned & {*some}} <= known
        for seconds in (6.0, chance.uniform(0.1, 3.0)):  # long enough for a verdict, or not
            for address in chance.sample(addresses, 8):
                dead.symmetric_difference_update({address})
                vipd.backends[address] = REFUSED if address in dead else True
            condemned.intersection_update(dead)
            await asyncio.sleep(seconds)
            if seconds == 6.0:
                condemned.update(dead)
        crashed(vipd, tmp_path / str(life + 1))

    def prepare(vipd: Vipd) -> None:
        vipd.backends.update(dict.fromkeys(dead, REFUSED))
        vipd.declare(service("web", *addresses), patient)

    (tmp_path / "0").mkdir()
    for life in range(8):
        running(story, prepare, tmp_path / str(life), simulated=True, later=20.0 * life)
    assert condemned


def test_verdicts_that_cannot_be_saved_are_told_until_they_can() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(5)
        file = vipd.state_dir / "cache.db"
        file.unlink(missing_ok=True)
        (file / "in the way").mkdir(parents=True)
        await one_dies(vipd)
        fault = f"{file}: cannot be written: cache.db is not a regular file"
        assert len(told(vipd, fault)) == 1
        assert f"{fault}; a restart begins without " in str((await vipd.status())["warnings"])
        await asyncio.sleep(300)
        assert len(told(vipd, fault)) == 1
        shutil.rmtree(file)
        await asyncio.sleep(60)
        assert fault not in str((await vipd.status())["warnings"])
        assert ONE in str(cached(vipd.state_dir, "verdict"))

    running(story, declare_web, simulated=True)


def test_a_save_that_hangs_is_told_and_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, released, hangs = sqlite3.connect, threading.Event(), threading.Event()

    def slow(address: str, **options: Any) -> Any:
        if "cache.db" in address and threading.current_thread().name == "vipd cache":
            hangs.set()
            released.wait(120)
        return connect(address, **options)

    async def story(vipd: Vipd) -> None:
        vipd.backends[ONE] = REFUSED
        assert await asyncio.to_thread(hangs.wait, 60)
        status = await vipd.until_status(lambda status: "cache.db" in str(status["warnings"]))
        assert "cache.db: the disk has not answered for " in str(status["warnings"])

    def prepare(vipd: Vipd) -> None:
        vipd.declare(service("web", ONE, check="fall: 1"))

    monkeypatch.setattr(sqlite3, "connect", slow)
    try:
        running(story, prepare)
    finally:
        released.set()
