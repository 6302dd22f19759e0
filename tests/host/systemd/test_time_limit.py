"""A program that hangs is killed with what it has started, and no service is blamed for it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.lab.waiting import wait_until
from vipd.daemon.rule_programs import rule_programs
from vipd.daemon.wiring import wire
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.tools import Tools, find_tools, list_chain, restore, save
from vipd.host.observer import Observer, Observers
from vipd.host.process import ProgramResult, ProgramTimeoutError, run
from vipd.host.settings.settings import Settings
from vipd.model.service import Family

TOOLS = Tools("iptables-restore", "iptables-save", "iptables v1.8.9 (nf_tables)", (1, 8, 9))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone(pid: int) -> bool:
    end = time.monotonic() + 60
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


def written(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


def hanging(path: Path) -> list[str]:
    """A program whose child holds its output open for ever."""
    script = path / "hang"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >{path}/child\nwait\n")
    script.chmod(0o755)
    return [str(script)]


def test_it_is_killed_with_its_children(tmp_path: Path) -> None:
    for limit in (0.5, 2, 8, 32):  # so long that it has come to start its child
        began = time.monotonic()
        with pytest.raises(ProgramTimeoutError, match="did not end within"):
            asyncio.run(run(hanging(tmp_path), timeout=limit))
        assert time.monotonic() - began < limit + 60
        if written(tmp_path / "child"):
            break
    assert gone(int((tmp_path / "child").read_text()))


def test_a_cancelled_call_kills_them_too(tmp_path: Path) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(run(hanging(tmp_path)))
        await asyncio.to_thread(wait_until, lambda: written(tmp_path / "child"), "the child's pid")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 120))
    assert gone(int((tmp_path / "child").read_text()))


def test_a_call_cancelled_while_the_program_starts_kills_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def cancelled() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(*argv: str, **options: Any) -> asyncio.subprocess.Process:
            process = await start(*argv, **options)
            begun.set()
            await go_on.wait()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
        task = asyncio.create_task(run(hanging(tmp_path)))
        await begun.wait()
        await asyncio.to_thread(wait_until, lambda: written(tmp_path / "child"), "the child's pid")
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 120))
    assert gone(int((tmp_path / "child").read_text()))


def test_children_that_outlive_it_and_hold_its_pipes_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "leave"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >{tmp_path}/child\n")
    script.chmod(0o755)
    for limit in (0.5, 2, 8, 32):  # so long that it has come to start its child
        with pytest.raises(ProgramTimeoutError, match="did not end within"):
            asyncio.run(run([str(script)], timeout=limit))
        if written(tmp_path / "child"):
            break
    assert gone(int((tmp_path / "child").read_text()))


def test_what_does_nothing_is_killed_long_before_its_time(tmp_path: Path) -> None:
    with pytest.raises(ProgramTimeoutError, match="did nothing for 2 s and was killed"):
        asyncio.run(run(hanging(tmp_path), timeout=10_000, stall=2))
    assert gone(int((tmp_path / "child").read_text()))
    with pytest.raises(ProgramTimeoutError, match="did nothing for 2 s and was killed"):
        asyncio.run(run(["sh", "-c", "while :; do sleep 1; done"], timeout=10_000, stall=2))


def test_what_works_is_not_taken_for_hanging() -> None:
    count = "i=0; while [ $i -lt 1500000 ]; do i=$((i+1)); done"
    for argv in (["sh", "-c", count], ["sh", "-c", f"sh -c '{count}'; true"]):
        assert asyncio.run(run(argv, stall=1)).exit_code == 0


def test_what_ends_in_time_is_not_touched() -> None:
    finished = asyncio.run(run(["sh", "-c", "cat; exit 3"], "text", timeout=30))
    assert finished == ProgramResult(3, "text", "")


def test_large_inputs_have_more_time_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sign of life comes no less than the limit before the end: the watchdog waits longer."""
    monkeypatch.setattr("vipd.daemon.rule_programs.BYTES_PER_SECOND", 100)

    async def needing(seconds: float, text: str) -> list[float]:
        beats, clock = list[float](), asyncio.get_running_loop().time
        began = clock()

        class Hearing(Observer):
            def heartbeat(self) -> None:
                beats.append(clock() - began)

        observers = Observers(0.1)
        observers.add(Hearing())
        await rule_programs(nullcontext, observers, 1.0)(["sleep", str(seconds)], text)
        return beats

    with pytest.raises(ProgramTimeoutError):
        asyncio.run(needing(300, ""))
    beats = asyncio.run(needing(2, "x" * 6000))
    assert len(beats) > 3, "sixty seconds more, of which it needed one"
    with pytest.raises(ProgramTimeoutError, match=r"within 2 s"):
        asyncio.run(needing(300, "x" * 100))


async def _never(argv: Sequence[str], stdin: str) -> ProgramResult:
    raise ProgramTimeoutError(argv[0], 25)


def test_every_use_of_the_tools_says_what_hangs() -> None:
    for asked in (
        restore(TOOLS, "*nat\nCOMMIT\n", _never),
        save(TOOLS, _never),
        list_chain(TOOLS, ChainId("nat", "VIPD-SERVICES"), _never),
        find_tools(Family.IPV4, "auto", _never),
    ):
        with pytest.raises(ApplyError, match=r"hangs: .* within 25 s and was killed; hint: ") as raised:
            asyncio.run(asked)
        assert not raised.value.rules_at_fault, "no service is to be looked for"


def test_the_daemon_limits_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = hanging(tmp_path)
    for name in ("iptables", "ip6tables"):
        (tmp_path / name).symlink_to(script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = Settings(services_dir=tmp_path / "services.d", state_dir=tmp_path / "state")
    parts = asyncio.run(wire(settings, program_timeout=0.5))
    assert set(parts.dataplane.versions()) == {"ipv4", "ipv6"}
    assert all("hangs" in text for text in parts.dataplane.versions().values())
