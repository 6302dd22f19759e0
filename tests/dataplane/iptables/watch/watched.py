"""vipd's dataplane in a namespace with its watch beside it, and others at work there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from socket import socket
from time import monotonic
from types import TracebackType

from tests.dataplane.iptables.watch.inside import inside
from tests.dataplane.namespace import Namespace
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.iptables.driver import IptablesDataplane
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.events import open_socket
from vipd.dataplane.iptables.watch.external_change import ExternalChange
from vipd.dataplane.iptables.watch.legacy_tables import LegacyTables
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.dataplane.iptables.watch.stream import WatchOptions
from vipd.dataplane.iptables.watch.watcher import RuleWatch
from vipd.host.host_changes import HostChanges
from vipd.host.process import ProgramResult, run
from vipd.host.settings.settings import Settings
from vipd.model.service import Family, Service

REPORTED_WITHIN = 60.0
"""Seconds. The promise is one; the machine may be busy."""
SILENCE = 0.8
"""Seconds after which nothing is on its way any more: a burst and a poll both take less."""


class Watched:
    """Services in the rules of a namespace, watched. Enter it inside an event loop."""

    def __init__(self, namespace: Namespace, variant: str, state_dir: Path, events: bool = True) -> None:
        self.namespace, self.variant = namespace, variant
        self._settings = Settings(state_dir=state_dir, iptables_variant=variant)
        self._record, self._events = HostChanges(state_dir), events
        self.own = OwnProcesses(monotonic)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Watched:
        self.dataplane = await IptablesDataplane.start(self._settings, self._record, self._run_own)
        open_events = partial(inside, self.namespace, open_socket) if self._events else _refused
        self.watch = await self._stack.enter_async_context(
            RuleWatch(
                self.dataplane.watched(),
                Names("VIPD"),
                WatchOptions(self.own),
                open_events=open_events,
                open_tables=lambda family: inside(self.namespace, partial(LegacyTables, family)),
            )
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def become(self, services: Sequence[Service]) -> None:
        """Declare services (to those declared before), and repair whatever else is amiss."""
        policy = SelectionPolicy({family: self._settings.masquerade_for(family) for family in Family})
        self.dataplane.update({f.key: f for service in services for f in select_backends(service, policy)})
        await self.dataplane.apply(await self.dataplane.plan())

    async def repair(self) -> bool:
        """Read the kernel anew and put right what is wrong; whether anything was."""
        self.dataplane.invalidate_all()
        wrong = bool(p := await self.dataplane.plan())
        print("PLAN", p)
        await self.become([])
        return wrong

    async def do(self, *argv: str, stdin: str = "") -> str:
        """Somebody else runs a program; what it printed. It waits for the lock of legacy tables, which all
        namespaces of the machine share."""
        if argv[0] in ("iptables-legacy", "iptables-legacy-restore"):
            argv = (argv[0], "-w", *argv[1:])
        finished = await self.namespace.run(argv, stdin)
        assert finished.exit_code == 0, f"{argv}: {finished.stderr}"
        return finished.stdout

    async def next(self, within: float = REPORTED_WITHIN) -> ExternalChange:
        """What is reported next; AssertionError when nothing is within so many seconds."""
        try:
            return await asyncio.wait_for(anext(self.watch), within)
        except TimeoutError:
            raise AssertionError(f"nothing was reported within {within} s") from None

    async def silent(self) -> None:
        """Nothing is reported any more."""
        try:
            found = await asyncio.wait_for(anext(self.watch), SILENCE)
        except TimeoutError:
            return
        raise AssertionError(f"reported: {found}")

    async def drain(self) -> None:
        """Forget what was reported so far."""
        while True:
            try:
                await asyncio.wait_for(anext(self.watch), SILENCE)
            except TimeoutError:
                return

    async def _run_own(self, argv: Sequence[str], stdin: str) -> ProgramResult:
        """As vipd runs programs: known by their pids. `ip netns exec` becomes the program it starts."""
        inside_namespace = ["ip", "netns", "exec", self.namespace.name, *argv]
        return await run(inside_namespace, stdin, self.own.running)


def _refused() -> socket:
    raise PermissionError(1, "Operation not permitted")
