"""The real watcher: every save is seen, whatever way it is made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import watchfiles

from tests.model.samples import HEAD, block
from tests.sources.services_directory import GOOD, OTHER, ServicesDirectory, link_swap
from vipd.control.catalog import merge
from vipd.host.supervisor import Supervisor
from vipd.sources.files import FileSource

SEEN_WITHIN_SECONDS = 60.0


class Watching:
    """A source whose changes are followed by scans, as the daemon does it."""

    def __init__(self, services_dir: ServicesDirectory) -> None:
        self._services_dir = services_dir

    async def follow(self) -> None:
        """Step at every change."""
        async for _ in self._services_dir.source.changes():
            self._services_dir.step()

    async def see(self, *names: str) -> None:
        """Return once just these services serve; AssertionError when that takes too long."""
        end = asyncio.get_running_loop().time() + SEEN_WITHIN_SECONDS
        while asyncio.get_running_loop().time() < end:
            units = self._services_dir.source.units()
            if set(merge(units).services) == set(names):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(
            f"{set(names)} not seen; serving {set(merge(self._services_dir.source.units()).services)}"
        )


@contextlib.asynccontextmanager
async def watching(services_dir: ServicesDirectory) -> AsyncIterator[Watching]:
    """The watcher at work; a moment is given to it to begin."""
    watch = Watching(services_dir)
    services_dir.step()
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


def watched(services_dir: ServicesDirectory, story: Callable[[Watching], Awaitable[None]]) -> None:
    """Run a story beside the watcher."""

    async def run() -> None:
        async with watching(services_dir) as watch:
            await story(watch)

    asyncio.run(run())


def named(number: int) -> str:
    """A declaration whose service is called `sNUMBER`."""
    return HEAD + block("10.96.0.10", f"s{number}", "10.244.0.5")


def test_each_of_twenty_saves_by_rename_is_seen(services_dir: ServicesDirectory) -> None:
    async def story(watch: Watching) -> None:
        for number in range(20):
            services_dir.save("a.yaml", named(number))
            await watch.see(f"s{number}")

    watched(services_dir, story)


def test_writes_in_place_new_files_and_deletions_are_seen(services_dir: ServicesDirectory) -> None:
    async def story(watch: Watching) -> None:
        services_dir.write("a.yaml", GOOD)
        await watch.see("dns")
        with (services_dir.directory / "a.yaml").open("r+") as file:
            file.truncate()
            file.flush()
            await asyncio.sleep(0.1)
            file.write(OTHER)
        await watch.see("web")
        services_dir.save("b.yaml", GOOD)
        await watch.see("web", "dns")
        (services_dir.directory / "a.yaml").rename(services_dir.root / "away.yaml")
        await watch.see("dns")
        (services_dir.directory / "b.yaml").unlink()
        await watch.see("web", "dns")  # all files together are gone within ten seconds
        assert len(services_dir.source.accept_removal()) == 2
        await watch.see()

    watched(services_dir, story)


def test_a_swapped_link_inside_the_directory_is_seen(services_dir: ServicesDirectory) -> None:
    link_swap(services_dir, "v1", GOOD)
    (services_dir.directory / "a.yaml").symlink_to("..data/a.yaml")

    async def story(watch: Watching) -> None:
        await watch.see("dns")
        link_swap(services_dir, "v2", OTHER)
        await watch.see("web")
        link_swap(services_dir, "v3", named(3))
        await watch.see("s3")

    watched(services_dir, story)


def test_a_directory_made_after_the_start_is_seen_with_every_later_save(
    services_dir: ServicesDirectory,
) -> None:
    services_dir.directory.rmdir()
    services_dir.source = FileSource(services_dir.directory / "deeper", services_dir.kept)

    async def story(watch: Watching) -> None:
        services_dir.directory.mkdir()
        await asyncio.sleep(0.5)
        services_dir.directory = services_dir.directory / "deeper"
        services_dir.directory.mkdir()
        await asyncio.sleep(0.5)
        services_dir.save("a.yaml", GOOD)
        await watch.see("dns")
        services_dir.save("a.yaml", OTHER)
        await watch.see("web")

    watched(services_dir, story)


def test_a_removed_directory_is_seen_when_it_comes_back(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)

    async def story(watch: Watching) -> None:
        services_dir.directory.rename(services_dir.root / "away")
        async with asyncio.timeout(SEEN_WITHIN_SECONDS):
            while not services_dir.source.faults():  # noqa: ASYNC110 (what is waited for has no event)
                await asyncio.sleep(0.01)
        await watch.see("dns")
        services_dir.directory.mkdir()
        services_dir.save("a.yaml", OTHER)
        await watch.see("web")
        assert services_dir.source.faults() == ()
        services_dir.save("a.yaml", GOOD)
        await watch.see("dns")

    watched(services_dir, story)


def test_a_directory_exchanged_for_another_is_seen(services_dir: ServicesDirectory) -> None:
    services_dir.write("a.yaml", GOOD)

    async def story(watch: Watching) -> None:
        fresh = services_dir.root / "fresh"
        fresh.mkdir()
        (fresh / "a.yaml").write_text(OTHER)
        services_dir.directory.rename(services_dir.root / "old")
        fresh.rename(services_dir.directory)
        await watch.see("web")
        await asyncio.sleep(0.3)
        services_dir.save("a.yaml", named(1))
        await watch.see("s1")

    watched(services_dir, story)


def test_a_services_directory_that_is_a_link_is_followed_when_it_is_swapped(
    services_dir: ServicesDirectory,
) -> None:
    services_dir.directory.rmdir()
    for version, text in (("v1", GOOD), ("v2", OTHER)):
        (services_dir.root / version).mkdir()
        (services_dir.root / version / "a.yaml").write_text(text)
    services_dir.directory.symlink_to("v1")

    async def story(watch: Watching) -> None:
        await watch.see("dns")
        (services_dir.root / "link").symlink_to("v2")
        (services_dir.root / "link").rename(services_dir.directory)
        await watch.see("web")

    watched(services_dir, story)


def test_a_save_between_the_first_scan_and_the_watch_is_seen(services_dir: ServicesDirectory) -> None:
    async def story() -> None:
        services_dir.step()
        services_dir.save("a.yaml", GOOD)
        watch = Watching(services_dir)
        task = asyncio.create_task(Supervisor().run("watching files", watch.follow))
        try:
            await watch.see("dns")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(story())


def test_a_watch_that_breaks_does_not_end_the_watching(
    services_dir: ServicesDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = watchfiles.awatch, []

    def flaky(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise OSError(28, "OS file watch limit reached")
        return real(*args, **kwargs)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(watchfiles, "awatch", flaky)

    async def story(watch: Watching) -> None:
        await asyncio.sleep(1.0)
        services_dir.save("a.yaml", GOOD)
        await watch.see("dns")

    watched(services_dir, story)
