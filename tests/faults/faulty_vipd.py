"""vipd with seams that fail on command: `python -m tests.faults.faulty_vipd`.

The file `faults` beside the settings holds a line for each seam that fails now, as `MODE NAME`; modes and
names are those of `seams.py`."""

from __future__ import annotations

import asyncio
import errno
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import vipd
from tests.faults.seams import SEAMS, Seam
from vipd.__main__ import main
from vipd.control import reconciler
from vipd.dataplane.iptables.watch import repair_backoff as peace
from vipd.host.supervisor import Backoff
from vipd.sources.etcd import source as etcd
from vipd.sources.etcd.list_watcher import WatchIntervals

TIMEOUT_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 1.0
"""Between two tries of anything. In earnest they grow to a minute: see the tests in simulated time."""


class UnexpectedError(Exception):
    """What nobody expects."""


class Switch(Protocol):
    """Says which seams fail."""

    def mode(self, seam: Seam) -> str:
        """How a seam fails now; empty when it works."""


class Control:
    """Which seams fail now. Reads by a descriptor of its own, so that no seam of the program is passed."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CREAT, 0o600)

    def mode(self, seam: Seam) -> str:
        """How a seam fails now; empty when it works."""
        for line in os.pread(self._descriptor, 65536, 0).decode().splitlines():
            mode, _, name = line.partition(" ")
            if name == seam.name:
                return mode
        return ""


def fail(mode: str, seam: Seam) -> object:
    """What a failing seam does, but for the waiting."""
    if mode == "oserror":
        raise OSError(errno.EIO, "injected by the test")
    if mode == "timeout":
        raise TimeoutError("injected by the test")
    if mode == "unexpected":
        raise UnexpectedError("injected by the test")
    return seam.garbage() if mode == "garbage" else seam.nothing()


def faulty(seam: Seam, real: Callable[..., Any], control: Switch) -> Callable[..., Any]:
    """The function in whose place a seam is."""

    async def later(*arguments: object, **named: object) -> object:
        mode = control.mode(seam)
        if not mode:
            return await real(*arguments, **named)
        if mode == "timeout":
            await asyncio.sleep(TIMEOUT_SECONDS)
        return fail(mode, seam)

    def at_once(*arguments: object, **named: object) -> object:
        mode = control.mode(seam)
        return fail(mode, seam) if mode else real(*arguments, **named)

    return later if inspect.iscoroutinefunction(real) else at_once


def install(seam: Seam, control: Switch, calm: Callable[..., Any] | None = None) -> None:
    """Put a seam in the place of its target: wherever that is known by name, but of what another module
    defines only there. `calm` is called where it does not fail; None: the target itself."""
    module_name, _, path = seam.target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    real = getattr(owner, name)
    wrapped = faulty(seam, calm or real, control)
    setattr(owner, name, wrapped)
    if not classes and real.__module__ == module_name:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("vipd") and getattr(module, name, None) is real:
                setattr(module, name, wrapped)


def hurry() -> None:
    """Let no pause between two tries be long, so that what fails is found, and is over, soon."""
    real = Backoff.delay
    Backoff.delay = lambda *arguments: min(real(*arguments), LONGEST_PAUSE_SECONDS)  # type: ignore[method-assign]
    reconciler.MAX_RETRY_SECONDS = LONGEST_PAUSE_SECONDS
    peace.MAX_PAUSE_SECONDS = LONGEST_PAUSE_SECONDS
    often = partial(WatchIntervals, probe=LONGEST_PAUSE_SECONDS, grace=LONGEST_PAUSE_SECONDS)
    etcd.WatchIntervals = often  # type: ignore[attr-defined,assignment]


if __name__ == "__main__":
    for found in pkgutil.walk_packages(vipd.__path__, "vipd."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    controlled = Control(Path(sys.argv[sys.argv.index("--config") + 1]).with_name("faults"))
    hurry()
    for one in SEAMS:
        install(one, controlled)
    main()
