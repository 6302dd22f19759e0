"""The real watcher: every save is seen, whatever way it is made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import watchfiles

from tests.model.samples import HEAD, block
from tests.sources.room import GOOD, OTHER, Room, link_swap
from vipd.control.catalog import merge
from vipd.host.supervisor import Supervisor
from vipd.sources.files import FileSource

SEEN_WITHIN_SECONDS = 60.0


class Watching:
    """A source whose changes are followed by scans, as the daemon does it."""

    def __init__(self, room: Room) -> None:
        self._room = room

    async def follow(self) -> None:
        """Step at every change."""
        async for _ in self._room.source.changes():
            self._room.step()

    async def see(self, *names: str) -> None:
        """Return once just these services serve; AssertionError when that takes too long."""
        end = asyncio.get_running_loop().time() + SEEN_WITHIN_SECONDS
        while asyncio.get_running_loop().time() < end:
            units = self._room.source.units()
            if set(merge(units).services) == set(names):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(
            f"{set(names)} not seen; serving {set(merge(self._room.source.units()).services)}"
        )


@contextlib.asynccontextmanager
async def watching(room: Room) -> AsyncIterator[Watching]:
    """The watcher at work; a moment is given to it to begin."""
    watch = Watching(room)
    room.step()
    task = asyncio.create_task(Supervisor().run("watching files", watch.follow))
    await asyncio.sleep(0.15)
    try:
        yield watch
    finally:
        if task.done():
            task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def watched(room: Room, story: Callable[[Watching], Awaitable[None]]) -> None:
    """Run a story beside the watcher."""

    async def run() -> None:
        async with watching(room) as watch:
            await story(watch)

    asyncio.run(run())


def named(number: int) -> str:
    """A declaration whose service is called `sNUMBER`."""
    return HEAD + block("10.96.0.10", f"s{number}", "10.244.0.5")


def test_each_of_twenty_saves_by_rename_is_seen(room: Room) -> None:
    async def story(watch: Watching) -> None:
        for number in range(20):
            room.save("a.yaml", named(number))
            await watch.see(f"s{number}")

    watched(room, story)


def test_writes_in_place_new_files_and_deletions_are_seen(room: Room) -> None:
    async def story(watch: Watching) -> None:
        room.write("a.yaml", GOOD)
        await watch.see("dns")
        with (room.directory / "a.yaml").open("r+") as file:
            file.truncate()
            file.flush()
            await asyncio.sleep(0.1)
            file.write(OTHER)
        await watch.see("web")
        room.save("b.yaml", GOOD)
        await watch.see("web", "dns")
        (room.directory / "a.yaml").rename(room.root / "away.yaml")
        await watch.see("dns")
        (room.directory / "b.yaml").unlink()
        await watch.see()

    watched(room, story)


def test_a_swapped_link_inside_the_directory_is_seen(room: Room) -> None:
    link_swap(room, "v1", GOOD)
    (room.directory / "a.yaml").symlink_to("..data/a.yaml")

    async def story(watch: Watching) -> None:
        await watch.see("dns")
        link_swap(room, "v2", OTHER)
        await watch.see("web")
        link_swap(room, "v3", named(3))
        await watch.see("s3")

    watched(room, story)


def test_a_directory_made_after_the_start_is_seen_with_every_later_save(room: Room) -> None:
    room.directory.rmdir()
    room.source = FileSource(room.directory / "deeper", room.kept)

    async def story(watch: Watching) -> None:
        room.directory.mkdir()
        await asyncio.sleep(0.5)
        room.directory = room.directory / "deeper"
        room.directory.mkdir()
        await asyncio.sleep(0.5)
        room.save("a.yaml", GOOD)
        await watch.see("dns")
        room.save("a.yaml", OTHER)
        await watch.see("web")

    watched(room, story)


def test_a_removed_directory_is_seen_when_it_comes_back(room: Room) -> None:
    room.write("a.yaml", GOOD)

    async def story(watch: Watching) -> None:
        room.directory.rename(room.root / "away")
        async with asyncio.timeout(SEEN_WITHIN_SECONDS):
            while not room.source.faults():  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.01)
        await watch.see("dns")
        room.directory.mkdir()
        room.save("a.yaml", OTHER)
        await watch.see("web")
        assert room.source.faults() == ()
        room.save("a.yaml", GOOD)
        await watch.see("dns")

    watched(room, story)


def test_a_directory_exchanged_for_another_is_seen(room: Room) -> None:
    room.write("a.yaml", GOOD)

    async def story(watch: Watching) -> None:
        fresh = room.root / "fresh"
        fresh.mkdir()
        (fresh / "a.yaml").write_text(OTHER)
        room.directory.rename(room.root / "old")
        fresh.rename(room.directory)
        await watch.see("web")
        await asyncio.sleep(0.3)
        room.save("a.yaml", named(1))
        await watch.see("s1")

    watched(room, story)


def test_a_services_directory_that_is_a_link_is_followed_when_it_is_swapped(room: Room) -> None:
    room.directory.rmdir()
    for version, text in (("v1", GOOD), ("v2", OTHER)):
        (room.root / version).mkdir()
        (room.root / version / "a.yaml").write_text(text)
    room.directory.symlink_to("v1")

    async def story(watch: Watching) -> None:
        await watch.see("dns")
        (room.root / "link").symlink_to("v2")
        (room.root / "link").rename(room.directory)
        await watch.see("web")

    watched(room, story)


def test_a_save_between_the_first_scan_and_the_watch_is_seen(room: Room) -> None:
    async def story() -> None:
        room.step()
        room.save("a.yaml", GOOD)
        watch = Watching(room)
        task = asyncio.create_task(Supervisor().run("watching files", watch.follow))
        try:
            await watch.see("dns")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(story())


def test_a_watch_that_breaks_does_not_end_the_watching(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = watchfiles.awatch, []

    def flaky(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "OS file watch limit reached")
        return real(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(watchfiles, "awatch", flaky)

    async def story(watch: Watching) -> None:
        await asyncio.sleep(1.0)
        room.save("a.yaml", GOOD)
        await watch.see("dns")

    watched(room, story)
