"""Computes what a step would write now, concurrently with steps; and the lock for writers."""

from __future__ import annotations

import asyncio
from types import TracebackType

from vipd.control.shared_run import SharedRun
from vipd.dataplane.base import Dataplane

UNDISTURBED_TRIES = 3
"""Number of kernel reads while steps continue. The last one holds the lock."""


class WriteLock:
    """Held by one writer through the dataplane at a time. Use with `async with`."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.holders = 0
        """How often it has been acquired."""

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self.holders += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class Difference:
    """Compares the wanted rules with the kernel's. Changes nothing, and delays no step."""

    def __init__(self, dataplane: Dataplane, lock: WriteLock) -> None:
        self._dataplane, self._lock = dataplane, lock
        self._shared = SharedRun(self._find)

    async def text(self) -> str:
        """The difference of the rules, empty when in sync. Concurrent callers share a run. Raises
        ApplyError."""
        return await self._shared.result()

    async def _find(self) -> str:
        for _ in range(UNDISTURBED_TRIES):
            async with self._lock:  # not in the middle of a step
                holders = self._lock.holders
            surveyed = await self._dataplane.survey()  # seconds, if there are many rules: steps continue
            async with self._lock:
                if self._lock.holders == holders + 1:
                    return await self._text_of(surveyed)
        async with self._lock:
            return await self._text_of(await self._dataplane.survey())

    async def _text_of(self, surveyed: object) -> str:
        return await asyncio.to_thread(str, await self._dataplane.difference(surveyed))
