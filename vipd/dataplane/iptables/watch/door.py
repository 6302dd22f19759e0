"""The way in: one stream of disturbances, by events where the kernel has them and by polling elsewhere.

async with Watch(families, names, own) as watch:
    async for disturbance in watch: ...
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from socket import socket
from types import TracebackType
from typing import Protocol

from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.disturbance import Disturbance, Scope
from vipd.dataplane.iptables.watch.events import RuleEvents, open_socket
from vipd.dataplane.iptables.watch.legacy_tables import LegacyTables
from vipd.dataplane.iptables.watch.own import OwnProcesses
from vipd.dataplane.iptables.watch.poll import POLL_SECONDS, RulePoll, WatchedFamily
from vipd.model import Family

log = logging.getLogger(__name__)


class _Watcher(Protocol):
    def close(self) -> None: ...

    async def run(self, report: Callable[[Disturbance], None]) -> None: ...


class Watch:
    """Listens from entry to exit. Enter it before the first write, so that no gap lies between.

    It belongs to the network namespace of the thread that enters it. What it reports may prove harmless; it
    is for the reader of the rules to say. Disturbances that nobody has taken yet are kept.
    """

    def __init__(
        self,
        families: Sequence[WatchedFamily],
        names: Names,
        own: OwnProcesses,
        interval: float = POLL_SECONDS,
        open_events: Callable[[], socket] = open_socket,
        open_tables: Callable[[Family], LegacyTables] = LegacyTables,
    ) -> None:
        self._families, self._names, self._own, self._interval = tuple(families), names, own, interval
        self._open_events, self._open_tables = open_events, open_tables
        self.hear: Callable[[bytes], None] | None = None
        """Gets the kernel's notifications as they come, our own changes too. Set it before entry."""
        self._found: asyncio.Queue[Disturbance | BaseException] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()
        self.ways: dict[Family, str] = {}
        """How each family is watched, for status: `events`, `poll`, or `poll: ` and why not by events."""

    async def __aenter__(self) -> Watch:
        try:
            self._start_events()
            for watched in self._families:
                if self.ways[watched.family] != "events":
                    self._start(self._poll(watched), f"poll rules of {watched.family}")
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Disturbance:
        found = await self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _start_events(self) -> None:
        self.ways = {watched.family: "poll" for watched in self._families}
        told = frozenset(watched.family for watched in self._families if not watched.legacy)
        if not told:
            return
        try:
            listening = self._open_events()
        except OSError as error:
            log.warning("no events of rule changes (%s); polling instead", error)
            self.ways |= dict.fromkeys(told, f"poll: {error}")
            return
        clock = asyncio.get_running_loop().time
        self.ways |= dict.fromkeys(told, "events")
        scope = Scope(self._names, told)
        self._start(RuleEvents(listening, scope, self._own, clock, self.hear), "rule events")

    def _poll(self, watched: WatchedFamily) -> RulePoll:
        tables = None
        if watched.legacy:
            try:
                tables = self._open_tables(watched.family)
            except OSError as error:
                log.warning("legacy tables of %s: %s; only whole readings", watched.family, error)
        return RulePoll(watched, self._names, asyncio.get_running_loop().time, self._interval, tables)

    def _start(self, watcher: _Watcher, name: str) -> None:
        self._stack.callback(watcher.close)
        task = asyncio.create_task(watcher.run(self._found.put_nowait), name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A watcher ends only by a fault; whoever iterates learns of it."""
        if not task.cancelled() and (error := task.exception()):
            self._found.put_nowait(error)
