"""What others did while nothing was watched was not seen: everything is doubted when a watch is opened."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import Any, cast

from vipd.control.background_tasks import watch_rules
from vipd.control.progress import Progress
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.dataplane.iptables.watch.repair_backoff import RepairBackoff
from vipd.dataplane.iptables.watch.stream import ExternalChangeStream, WatchOptions


class Dying(ExternalChangeStream):
    """A watch whose listener dies at once."""

    def _begin(self) -> None:
        self._start(self, "a listener")

    def close(self) -> None:
        """Nothing is open."""

    async def run(self, report: object) -> None:
        """Dies."""
        raise OSError(errno.ENOBUFS, "no buffer space")


class Beside:
    """Counts what is asked of dataplane and reconciler, in its order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.progress = Progress(attempted=1)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.asked.append(name)


def test_a_watch_that_is_opened_again_doubts_everything() -> None:
    beside, opened = Beside(), 0

    def open_watch() -> Any:
        nonlocal opened
        opened += 1
        return Dying(WatchOptions(OwnProcesses(lambda: 0.0)))

    async def watch() -> None:
        for _ in range(3):  # as the supervisor of loops does
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await watch_rules(open_watch, RepairBackoff(), cast(Any, beside), cast(Any, beside))

    asyncio.run(watch())
    assert opened == 3
    assert beside.asked == ["invalidate_all", "request_sync"] * opened
