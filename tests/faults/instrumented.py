"""vipd that shows how long its event loop stands still: `python -m tests.faults.instrumented`.

Each callback that takes longer than a limit of processor time is a line in the file `standstills` beside the
settings: seconds, what a fixed piece of work took a moment later, and what it was. It is processor time of
the loop's own thread but for collections of garbage, and the fixed work shows how much a busy machine has
stretched that."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import runpy
import sys
import threading
import time
from asyncio import events
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TOLD_ABOVE_SECONDS = 0.02
STANDSTILL = 20.0
"""No callback may take longer than so many times the yardstick: 50 ms of processor time."""
_YARDSTICK = {"rows": [{f"key {n}": "v" * 10 for n in range(20)} for _ in range(10)]}


def yardstick() -> float:
    """Seconds that a fixed piece of work takes now: some 2.5 ms on a machine that does nothing else."""
    began = time.thread_time()
    for _ in range(40):
        json.loads(json.dumps(_YARDSTICK))
    return time.thread_time() - began


def measure(file: Path) -> None:
    """Note every long callback of any event loop of this process from now on."""
    run, collected = events.Handle._run, [0.0]

    def collecting(phase: str, _: object) -> None:
        """Python collects garbage when it wants, whatever runs then; here it counts in the loop's thread
        alone."""
        if threading.current_thread() is not threading.main_thread():
            return
        collected[0] += time.thread_time() if phase == "stop" else -time.thread_time()

    def measured(handle: Any) -> None:
        began, before = time.thread_time(), collected[0]
        run(handle)
        took = time.thread_time() - began - (collected[0] - before)
        if took > TOLD_ABOVE_SECONDS:
            with file.open("a") as lines:
                lines.write(f"{took:.4f} {yardstick():.5f} {described(handle)}\n")

    gc.callbacks.append(collecting)
    events.Handle._run = measured  # type: ignore[method-assign, assignment]


def too_long(standstills: Iterable[str]) -> list[str]:
    """Those lines of the file that are of callbacks that hold up the event loop for too long."""

    def share(line: str) -> float:
        took, unit, _ = line.split(maxsplit=2)
        return float(took) / float(unit)

    return [line for line in standstills if share(line) > STANDSTILL]


@contextlib.contextmanager
def standstills(client: str) -> Iterator[list[str]]:
    """What holds up the event loops of this process meanwhile, and for how many yardsticks; but a task of
    this name."""
    found, run = list[str](), events.Handle._run

    def measured(handle: Any) -> None:
        began = time.thread_time()
        run(handle)
        took = time.thread_time() - began
        long = took > TOLD_ABOVE_SECONDS and described(handle) != client
        if long and (share := took / yardstick()) > STANDSTILL:
            found.append(f"{share:.0f} {described(handle)}")

    # As the daemon at its start; else a collection that walks through the tests' own objects counts.
    gc.collect()
    gc.freeze()
    events.Handle._run = measured  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        events.Handle._run = run  # type: ignore[method-assign]


def described(handle: Any) -> str:
    task = getattr(handle._callback, "__self__", None)
    what = task.get_name() if isinstance(task, asyncio.Task) else repr(handle._callback)
    return " ".join(what.split())[:200]


if __name__ == "__main__":
    measure(Path(sys.argv[sys.argv.index("--config") + 1]).with_name("standstills"))
    runpy.run_module("vipd", run_name="__main__", alter_sys=True)
