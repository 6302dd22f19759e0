"""A backup that was restored and then written past the revision known here takes nothing away."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.sources.etcd.following import following, key, value
from tests.sources.etcd.members import cluster

NEWER = {"b", "c", "d"}


@pytest.mark.parametrize("written_past", ["/elsewhere", key("a"), key("e")])
def test_a_restored_backup_that_was_written_past_the_old_revision(tmp_path: Path, written_past: str) -> None:
    state = tmp_path / "state"

    async def scene() -> None:
        async with following(etcd.urls, state) as there:
            await there.until(lambda: there.names() == {"a", *NEWER}, "all services")
        member.stop()
        member.wipe()
        shutil.copytree(tmp_path / "backup", member.directory)
        etcd.start_again(member.url)
        for _ in range(20):
            etcd.put(written_past, value(9))
        async with following(etcd.urls, state) as there:
            await there.until(lambda: there.source.connected, "followed")
            assert there.names() >= NEWER
            assert set(there.source.state().held) == {key(name) for name in NEWER}
            assert "an older state of it" in " ".join(there.source.faults())

    with cluster(tmp_path / "etcd") as etcd:
        member = etcd.members[0]
        etcd.put(key("a"), value(1))
        member.stop()
        shutil.copytree(member.directory, tmp_path / "backup")
        etcd.start_again(member.url)
        for number, name in enumerate(sorted(NEWER), 2):
            etcd.put(key(name), value(number))
        asyncio.run(scene())


def test_what_was_deleted_while_away_is_removed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with following(etcd.urls, tmp_path / "state") as there:
            await there.until(lambda: there.names() == {"a", "b"}, "both services")
        etcd.delete(key("b"))
        async with following(etcd.urls, tmp_path / "state") as there:
            await there.until(lambda: there.names() == {"a"}, "the removal")
            assert there.source.state().held == ()

    with cluster(tmp_path / "etcd") as etcd:
        etcd.put(key("a"), value(1))
        etcd.put(key("b"), value(2))
        asyncio.run(scene())
