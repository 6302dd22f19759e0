"""Files that hang keep a thread each, and nobody waiting."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from vipd.host import file_calls as module
from vipd.host.file_calls import FileCalls
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.client import MAX_FILE_BYTES, password, tls_context
from vipd.sources.etcd.errors import EtcdError


def test_one_that_hangs_takes_one_thread_and_delays_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALL_TIMEOUT_SECONDS", 0.1)
    calls, free, running = FileCalls(2), threading.Event(), threading.active_count()

    async def scene() -> None:
        for _ in range(20):
            with pytest.raises(TimeoutError, match="its file system hangs"):
                await calls.run("hangs", lambda: free.wait(60))
            assert await calls.run("well", lambda: 7) == 7
        assert threading.active_count() <= running + 2
        free.set()
        await asyncio.to_thread(lambda: [f.exception(60) for f in (*calls._under_way.values(),)])
        assert await calls.run("hangs", lambda: 8) == 8

    asyncio.run(scene())


def test_many_at_once_share_what_is_about_the_same() -> None:
    calls, made, all_asked = FileCalls(3), list[int](), threading.Event()

    def call(number: int) -> int:
        made.append(number)
        all_asked.wait(60)
        return number

    async def scene() -> list[int]:
        asked = [asyncio.create_task(calls.run(n % 10, lambda n=n: call(n % 10))) for n in range(100)]  # type: ignore[misc]
        await asyncio.sleep(0)
        all_asked.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(scene()) == [n % 10 for n in range(100)]
    assert sorted(made) == list(range(10))


def planted(directory: Path) -> dict[str, Path]:
    """What is something else than a file of a few lines."""
    os.mkfifo(directory / "pipe")
    (directory / "directory").mkdir()
    with (directory / "huge").open("wb") as file:
        file.truncate(20 * 2**30)
    (directory / "large").write_bytes(b"-----BEGIN x" * (MAX_FILE_BYTES // 10))
    return {name: directory / name for name in ("pipe", "directory", "huge", "large")} | {
        "device": Path("/dev/zero")
    }


def test_nothing_waits_for_files_of_etcd(tmp_path: Path) -> None:
    plain = tmp_path.with_name("plain")
    plain.write_text("-----BEGIN CERTIFICATE-----\n")
    for path in planted(tmp_path).values():
        for setting in ("ca", "cert", "key"):
            files = dict.fromkeys(("cert", "key"), plain) | {setting: path}
            settings = replace(EtcdSettings(("https://127.0.0.1:2379",)), **files)  # type: ignore[arg-type]
            with pytest.raises(EtcdError, match="cannot be used for TLS"):
                tls_context(settings)
        with pytest.raises(EtcdError, match="the password cannot be read"):
            password(path)
