"""Files that hang keep a thread each, and nobody waiting."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.health.servers import PATIENCE, ask_once, target
from vipd.health.probes.http import probe_http
from vipd.host import file_calls as module
from vipd.host.file_calls import FileCalls
from vipd.host.settings.etcd import EtcdSettings
from vipd.model.check import HttpProbe
from vipd.sources.etcd.connection import Connection
from vipd.sources.etcd.errors import AuthFailedError, TLSError
from vipd.sources.etcd.tls_files import MAX_BYTES, password, tls_context


def test_what_a_call_returns_or_raises() -> None:
    calls = FileCalls()

    def fails() -> None:
        raise PermissionError(13, "Permission denied")

    assert asyncio.run(calls.run("a", lambda: 7)) == 7
    with pytest.raises(PermissionError):
        asyncio.run(calls.run("a", fails))


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
        await asyncio.to_thread(lambda: [f.exception(PATIENCE) for f in (*calls._under_way.values(),)])
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


def planted(kind: str, path: Path) -> Path:
    """Something else than a file of a few lines."""
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            return Path("/dev/zero")
        case "huge":
            with path.open("wb") as file:
                file.truncate(20 * 2**30)
        case "large":
            path.write_bytes(b"-----BEGIN x" * (MAX_BYTES // 10))
    return path


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "huge", "large"])
@pytest.mark.parametrize("setting", ["ca", "cert", "key"])
def test_nothing_waits_for_tls_files_of_etcd(kind: str, setting: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("-----BEGIN CERTIFICATE-----\n")
    files = dict.fromkeys(("cert", "key"), plain) | {setting: planted(kind, tmp_path / "odd")}
    settings = replace(EtcdSettings(("https://127.0.0.1:2379",)), **files)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(TLSError, match="cannot be used for TLS"):
        tls_context(settings)
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "huge", "large"])
def test_nothing_waits_for_a_password(kind: str, tmp_path: Path) -> None:
    with pytest.raises(AuthFailedError, match="the password cannot be read"):
        password(planted(kind, tmp_path / "odd"))


def test_a_file_system_that_hangs_stops_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither etcd's files nor a check's: the loop goes on meanwhile, and no backend is blamed."""
    free = threading.Event()

    def hangs(*_: object) -> None:
        free.wait(60)

    monkeypatch.setattr(module, "CALL_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr("vipd.sources.etcd.transport.signatures", hangs)
    monkeypatch.setattr("vipd.sources.etcd.connection.password", hangs)
    monkeypatch.setattr("vipd.health.probes.http.tls_context", hangs)

    async def scene() -> None:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.01)
                turns += 1

        beside = asyncio.create_task(others())
        where = tmp_path / "password"
        settings = EtcdSettings(("https://127.0.0.1:9",), ca=where, user="me", password_file=where)
        connection = Connection(settings, Random(1))
        with pytest.raises(TLSError, match="its file system hangs"):
            await connection.transport._open()
        with pytest.raises(AuthFailedError, match="its file system hangs"):
            await connection._password()
        for timeout in (0.1, 5.0):
            asked = target(9, HttpProbe(tls=True, ca="/nfs/ca.pem"), timeout)
            result = await ask_once(probe_http, asked)
            assert result.good is None
            assert "/nfs/ca.pem: it" in result.reason
        assert turns > 20
        beside.cancel()

    asyncio.run(scene())
    free.set()
