from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.samples import HEAD, block
from vipd.catalog import merge
from vipd.sources.files import FileSource

SEEN_WITHIN_SECONDS = 2.5
GOOD = HEAD + block("10.96.0.10", "dns", "10.244.0.5")
OTHER = HEAD + block("10.96.0.11", "web", "10.244.0.6")
BAD = HEAD + "  - {address: 10.96.0.300}\n"


class Room:
    """A services.d, the place of accepted copies, and a source on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / "services.d"
        self.kept = root / "state" / "accepted"
        self.directory.mkdir()
        self.source = FileSource(self.directory, self.kept)

    def write(self, name: str, text: str | bytes) -> Path:
        """Write a file in place."""
        path = self.directory / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def save(self, name: str, text: str) -> None:
        """Save as careful editors do: a new file renamed over the old."""
        aside = self.directory / f".{name}.tmp"
        aside.write_text(text)
        aside.rename(self.directory / name)

    def step(self) -> set[str]:
        """Scan and accept as the reconciler does; the names that serve."""
        self.source.scan()
        merged = merge(self.source.units())
        self.source.accepted(merged.chosen)
        return set(merged.services)

    def problems(self) -> str:
        """What is wrong with the candidates."""
        found = merge(self.source.units()).problems.values()
        return "\n".join(str(p) for part in found for p in part)

    def restart(self) -> None:
        """A new source on the same directories."""
        self.source = FileSource(self.directory, self.kept)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """An empty services.d."""
    return Room(tmp_path)


def test_declarations_are_read_by_suffix_and_hidden_names_are_not(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.write("b.yml", OTHER)
    room.write("c.json", '{"apiVersion": "vipd/v1", "services": [{"address": "10.96.0.12", "ports": [1]}]}')
    for ignored in (".a.yaml", "a.yaml~", "a.yaml.bak", "#a.yaml#", "a.txt", ".a.yaml.swp", "4913", "yaml"):
        room.write(ignored, BAD)
    (room.directory / "d.yaml").mkdir()
    assert room.step() == {"dns", "web", "10.96.0.12:1/tcp"}
    assert room.problems() == ""


def test_scan_tells_whether_anything_is_different(room: Room) -> None:
    assert not room.source.scan()
    path = room.write("a.yaml", GOOD)
    assert room.source.scan()
    path.touch()
    assert not room.source.scan()
    path.unlink()
    assert room.source.scan()


def test_a_file_that_is_the_same_is_not_parsed_again(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.write("b.yaml", OTHER)
    room.step()
    before = {name: unit.candidate for name, unit in room.source.units().items()}
    room.write("b.yaml", OTHER.replace("10.244.0.6", "10.244.0.7"))
    room.step()
    after = {name: unit.candidate for name, unit in room.source.units().items()}
    assert [after[name] is before[name] for name in sorted(before)] == [True, False]


@pytest.mark.parametrize("bad", [BAD, "\tnot yaml: [", b"\xff\xfe not text", b"apiVersion: vipd/v1\n\x00"])
def test_a_bad_file_keeps_its_last_good_version_also_over_a_restart(room: Room, bad: str | bytes) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    room.write("a.yaml", bad)
    assert room.step() == {"dns"}
    assert "a.yaml" in room.problems()
    room.restart()
    assert room.step() == {"dns"}
    assert "a.yaml" in room.problems()
    room.write("a.yaml", OTHER)
    assert room.step() == {"web"}
    assert room.problems() == ""


def test_a_file_that_was_never_good_serves_nothing(room: Room) -> None:
    room.write("a.yaml", BAD)
    assert room.step() == set()
    assert "a.yaml:3" in room.problems()


def test_a_file_that_may_not_be_read_keeps_its_last_good_version(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.write("a.yaml", GOOD)
    room.step()

    def forbidden(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")  # modes mean nothing to root, who runs these tests

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", forbidden)
        assert room.step() == {"dns"}
        assert "Permission denied" in room.problems()
    room.step()
    assert room.problems() == ""


def test_a_dangling_link_keeps_the_last_good_version(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    (room.directory / "a.yaml").unlink()
    (room.directory / "a.yaml").symlink_to("nowhere")
    assert room.step() == {"dns"}
    assert "cannot be read" in room.problems()


def test_a_file_that_could_not_be_read_and_is_then_empty_has_no_problem_left(room: Room) -> None:
    room.write("a.yaml", b"\xff")
    room.step()
    assert room.problems()
    room.write("a.yaml", b"")
    room.step()
    assert room.problems() == ""


def test_a_deleted_file_is_gone_now_and_after_a_restart(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.write("b.yaml", OTHER)
    room.step()
    (room.directory / "a.yaml").unlink()
    assert room.step() == {"web"}
    assert len(list(room.kept.iterdir())) == 1
    room.restart()
    assert room.step() == {"web"}


def test_a_file_deleted_while_the_daemon_was_down_is_gone(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    (room.directory / "a.yaml").unlink()
    room.restart()
    assert room.step() == set()
    assert list(room.kept.iterdir()) == []


def test_a_removed_directory_leaves_the_last_good_versions_serving(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    shutil.rmtree(room.directory)
    assert room.step() == {"dns"}
    assert str(room.directory) in room.source.faults()[0]
    room.restart()
    assert room.step() == {"dns"}
    assert "cannot be read" in room.source.faults()[0]
    room.directory.mkdir()
    room.write("a.yaml", OTHER)
    assert room.step() == {"web"}
    assert room.source.faults() == ()


def test_a_directory_that_never_was_is_told_with_a_hint(tmp_path: Path) -> None:
    source = FileSource(tmp_path / "none", tmp_path / "kept")
    assert not source.scan()
    assert "create it" in source.faults()[0]


def test_a_copy_that_cannot_be_kept_is_told_until_it_is(room: Room) -> None:
    room.kept.parent.mkdir()
    room.kept.write_text("in the way")
    room.restart()
    room.write("a.yaml", GOOD)
    assert room.step() == {"dns"}
    assert "cannot keep a copy" in room.source.faults()[0]
    room.step()
    assert room.source.faults(), "a later scan must not hide that there is no copy"


def test_the_incumbent_stays_the_incumbent_over_a_restart(room: Room) -> None:
    room.write("z.yaml", GOOD)
    room.step()
    room.write("a.yaml", GOOD.replace("dns", "thief"))
    assert room.step() == {"dns"}
    room.restart()
    assert room.step() == {"dns"}
    assert "z.yaml:3" in room.problems()


def test_a_damaged_copy_is_of_no_use_and_no_hindrance(room: Room) -> None:
    room.write("a.yaml", GOOD)
    room.step()
    (copy,) = room.kept.iterdir()
    copy.write_bytes(b"\xff")
    (room.kept / ".half.new").write_text("x")
    room.restart()
    assert room.step() == {"dns"}


def link_swap(room: Room, version: str, text: str) -> None:
    """What a ConfigMap volume does: files are links into `..data`, itself a link that is renamed over."""
    target = room.directory / f"..{version}"
    target.mkdir()
    (target / "a.yaml").write_text(text)
    aside = room.directory / "..data_tmp"
    aside.symlink_to(target.name)
    aside.rename(room.directory / "..data")


def test_a_file_behind_a_swapped_link_is_read_anew(room: Room) -> None:
    link_swap(room, "v1", GOOD)
    (room.directory / "a.yaml").symlink_to("..data/a.yaml")
    assert room.step() == {"dns"}
    link_swap(room, "v2", OTHER)
    assert room.step() == {"web"}


# The real watcher.


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
        raise AssertionError(f"{set(names)} not seen; serving {set(merge(self._room.source.units()).services)}")


@contextlib.asynccontextmanager
async def watching(room: Room) -> AsyncIterator[Watching]:
    """The watcher at work; a moment is given to it to begin."""
    watch = Watching(room)
    room.step()
    task = asyncio.create_task(watch.follow())
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
        await asyncio.sleep(0.6)
        await watch.see("dns")
        assert room.source.faults()
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
        task = asyncio.create_task(watch.follow())
        try:
            await watch.see("dns")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(story())


def test_a_watch_that_breaks_does_not_end_the_watching(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    import watchfiles

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
