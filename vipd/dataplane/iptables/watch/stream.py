"""A stream of external changes from one or several watchers, each in a separate task."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from vipd.dataplane.iptables.watch.external_change import ExternalChange, OwnershipFilter
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.host.supervisor import Backoff, Loop, LoopState, Supervisor, Work

WATCH_BACKOFF = Backoff(maximum=5.0)
MAX_WAITING = 200
"""Disturbances in the queue: three arrive each second, and a repair that fails takes a minute."""
MOST_NAMED = 100
"""Actors that are named of those that were too many."""


def _merge_changes(several: Sequence[ExternalChange]) -> ExternalChange:
    """Several disturbances merged into one."""
    actors = dict.fromkeys(actor for each in several for actor in each.actors)
    return ExternalChange(
        frozenset().union(*(each.families for each in several)),
        frozenset(),
        frozenset().union(*(each.kinds for each in several)),
        tuple(actors)[:MOST_NAMED],
        everything=True,
    )


class Watcher(Protocol):
    """Reports changes until it fails or is cancelled."""

    def close(self) -> None:
        """Release its resources."""

    async def run(self, report: Callable[[ExternalChange], None]) -> None:
        """Ends only by a fault."""


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What a watch is to pass over, to report besides, and how it is run."""

    own: OwnProcesses
    """Their changes are not reported."""
    supervise: Callable[[str, Work], Coroutine[Any, Any, None]] = field(
        default_factory=lambda: Supervisor().run_until_cancelled
    )
    """Runs each watcher that polls, so that its failures end no other one."""
    extend_filter: Callable[[OwnershipFilter], OwnershipFilter] | None = None
    """Adds to what concerns a dataplane what else is to be reported."""
    polls: tuple[tuple[Watcher, str], ...] = ()
    """More watchers that poll, each with its name."""
    on_message: Callable[[bytes], None] | None = None
    """Gets the kernel's notifications as they come, our own changes too."""

    def scope(self, scope: OwnershipFilter) -> OwnershipFilter:
        """What a watch reports of a dataplane that reports this scope by itself."""
        return self.extend_filter(scope) if self.extend_filter else scope


class ExternalChangeStream:
    """Watches from entry to exit: `async with ... as watch: async for disturbance in watch`.

    Disturbances wait in a queue. The iterator also raises the fault of a watcher.
    """

    def __init__(self, options: WatchOptions) -> None:
        self._options = options
        self._found: deque[ExternalChange | BaseException] = deque()
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    def _begin(self) -> None:
        """Start the watchers. May raise OSError."""
        raise AssertionError("each kind of watch has its own")

    def _start(self, watcher: Watcher, name: str) -> None:
        self._run(watcher, watcher.run(self._report), name)

    def _start_poll(self, watcher: Watcher, name: str) -> None:
        """Start a watcher that can be run again when it has failed, and loses nothing by that."""
        work = Loop(lambda: watcher.run(self._report), LoopState(WATCH_BACKOFF))
        self._run(watcher, self._options.supervise(name, work), name)

    def _run(self, watcher: Watcher, work: Coroutine[Any, Any, None], name: str) -> None:
        self._stack.callback(watcher.close)
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A watcher ends only by a fault; the iterator raises it, also if the watcher just stopped."""
        error = None if task.cancelled() else task.exception()
        self._put(error or OSError(f"{task.get_name()}: it has ended"))

    def _report(self, disturbance: ExternalChange) -> None:
        """Queue a disturbance; very many are merged into one."""
        if len(self._found) >= MAX_WAITING:
            waiting = [each for each in self._found if isinstance(each, ExternalChange)]
            faults = [each for each in self._found if not isinstance(each, ExternalChange)]
            self._found = deque([_merge_changes([*waiting, disturbance]), *faults])
        else:
            self._put(disturbance)

    def _put(self, found: ExternalChange | BaseException) -> None:
        self._found.append(found)
        self._something.set()

    async def __aenter__(self) -> Self:
        try:
            self._begin()
            for watcher, name in self._options.polls:
                self._start_poll(watcher, name)
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

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ExternalChange:
        while not self._found:
            self._something.clear()
            await self._something.wait()
        found = self._found.popleft()
        if isinstance(found, BaseException):
            raise found
        return found
