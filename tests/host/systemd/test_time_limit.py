"""A program that hangs is killed with what it has started; no service is blamed."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.lab.waiting import wait_until
from vipd.daemon.rule_programs import rule_programs
from vipd.host.observer import Observer, Observers
from vipd.host.process import ProgramResult, ProgramTimeoutError, run


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_for_end_of(file: Path) -> None:
    """Of the process whose pid is in a file."""
    wait_until(lambda: not alive(int(file.read_text())), "its end")


def written(path: Path) -> bool:
    return path.exists() and bool(path.read_text())


def hanging(path: Path, then: str = "wait") -> list[str]:
    """A program whose child holds its output open for ever."""
    return ["sh", "-c", f"sleep 1000 & echo $! >{path}/child; {then}"]


@pytest.mark.parametrize("then", ["wait", "exit"])
def test_it_is_killed_with_its_children_also_when_they_outlive_it(tmp_path: Path, then: str) -> None:
    for limit in (0.5, 2, 8, 32):  # so long that it has come to start its child
        began = time.monotonic()
        with pytest.raises(ProgramTimeoutError, match="did not end within"):
            asyncio.run(run(hanging(tmp_path, then), timeout=limit))
        assert time.monotonic() - began < limit + 60
        if written(tmp_path / "child"):
            break
    wait_for_end_of(tmp_path / "child")


def test_a_cancelled_call_kills_them_too(tmp_path: Path) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(run(hanging(tmp_path)))
        await asyncio.to_thread(wait_until, lambda: written(tmp_path / "child"), "the child's pid")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancelled(), 120))
    wait_for_end_of(tmp_path / "child")


def test_what_does_nothing_is_killed_long_before_its_time(tmp_path: Path) -> None:
    with pytest.raises(ProgramTimeoutError, match="did nothing for 2 s and was killed"):
        asyncio.run(run(hanging(tmp_path), timeout=10_000, stall=2))
    wait_for_end_of(tmp_path / "child")
    with pytest.raises(ProgramTimeoutError, match="did nothing for 2 s and was killed"):
        asyncio.run(run(["sh", "-c", "while :; do sleep 1; done"], timeout=10_000, stall=2))


def test_what_works_is_not_taken_for_hanging() -> None:
    count = "i=0; while [ $i -lt 700000 ]; do i=$((i+1)); done"
    for argv in (["sh", "-c", count], ["sh", "-c", f"sh -c '{count}'; true"]):
        assert asyncio.run(run(argv, stall=0.5)).exit_code == 0


def test_what_ends_in_time_is_not_touched() -> None:
    finished = asyncio.run(run(["sh", "-c", "cat; exit 3"], "text", timeout=30))
    assert finished == ProgramResult(3, "text", "")


def test_large_inputs_have_more_time_and_are_told() -> None:
    """A second for 250 KB; the last sign of life comes no less than the limit before the end."""

    async def needing(seconds: float, size: int) -> list[float]:
        beats, clock = list[float](), asyncio.get_running_loop().time
        began = clock()

        class Hearing(Observer):
            def heartbeat(self) -> None:
                beats.append(clock() - began)

        observers = Observers(0.1)
        observers.add(Hearing())
        await rule_programs(nullcontext, observers, 1.0)(["sleep", str(seconds)], "x" * size)
        return beats

    with pytest.raises(ProgramTimeoutError, match=r"within 1 s"):
        asyncio.run(needing(300, 0))
    assert len(asyncio.run(needing(2, 15_000_000))) > 3
    with pytest.raises(ProgramTimeoutError, match=r"within 2 s"):
        asyncio.run(needing(300, 250_000))
