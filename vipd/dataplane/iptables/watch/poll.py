"""Polls the rules where the kernel sends no events: legacy tables, or no event socket."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from vipd.dataplane.iptables.names import TABLES, Names
from vipd.dataplane.iptables.plan import Installed
from vipd.dataplane.iptables.watch.comparison import differing_chains, digest
from vipd.dataplane.iptables.watch.debouncer import MAX_CHAINS
from vipd.dataplane.iptables.watch.external_change import ChangeKind, ExternalChange
from vipd.dataplane.iptables.watch.legacy_tables import Fingerprint, LegacyTables
from vipd.model.service import Family

POLL_SECONDS = 0.5
"""Minimum pause between two polls."""
MAX_CPU_SHARE = 0.02
"""Readings of a family's rules pause so long that they take no more; 10,000 services take 0.6 s."""


def cpu_seconds() -> float:
    """CPU time of this process and of the programs that it has run."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Expected(NamedTuple):
    """The rules that vipd expects in the kernel."""

    writes: int
    """Grows with every write, so that a poll that overlaps a write is not trusted."""
    installed: Installed


@dataclass(frozen=True, slots=True)
class WatchedFamily:
    """How one family is polled."""

    family: Family
    legacy: bool
    """Its iptables programs write to the legacy tables, for which the kernel sends no events."""
    read: Callable[[], Awaitable[str]]
    """Returns the output of iptables-save. Raises ApplyError."""
    expected: Callable[[], Expected | None]
    """None: a write is in progress, or nothing is known yet."""


class RulePoll:
    """Compares one family's rules with the expected ones, as often as SHARE_OF_A_CPU allows."""

    def __init__(
        self,
        watched: WatchedFamily,
        names: Names,
        clock: Callable[[], float],
        interval: float = POLL_SECONDS,
        tables: LegacyTables | None = None,
        cpu: Callable[[], float] = cpu_seconds,
    ) -> None:
        self._watched, self._names, self._clock = watched, names, clock
        self._interval, self._tables, self._cpu = interval, tables, cpu
        self._next_reading = clock()
        self._seen: tuple[int, bytes] | None = None
        """Writes and digest of the last reading that was as expected, or was reported."""
        self._fingerprint: tuple[tuple[int, tuple[str, ...]], tuple[Fingerprint, ...]] | None = None
        """Writes and tables at the last poll, and the shapes that those had."""
        self._present: tuple[str, ...] = ()
        """Tables known to exist."""
        self.last_cost = 0.0
        """Seconds of CPU that the last reading of all rules took at most."""

    def close(self) -> None:
        """Close the socket of the shape check."""
        if self._tables:
            self._tables.close()

    async def run(self, report: Callable[[ExternalChange], None]) -> None:
        """Report differences, until that fails. The same difference is reported once, also after a
        restart. Raises ApplyError, OSError, ValueError."""
        while True:
            await asyncio.sleep(self._interval)
            if disturbance := await self.poll():
                report(disturbance)

    async def poll(self) -> ExternalChange | None:
        """One poll: a shape check, and a reading of all rules if that shows a change or is due."""
        before = self._watched.expected()
        if before is None or not before.installed.chains:
            return None  # without rules of vipd's nothing can be missing
        hurried = self._fingerprint_changed(before)
        if not hurried and self._clock() < self._next_reading:
            return None
        # Due until it has been read: a detected change is not lost with a reading that fails.
        self._next_reading = began = self._clock()
        cpu = self._cpu()
        saved = await self._watched.read()
        after, disturbance = self._watched.expected(), None
        trusted = after is not None and after.writes == before.writes
        if trusted:
            self._present = tuple(table for table in TABLES if f"*{table}\n" in saved)
            disturbance = await self._compare(saved, before)
        # Each is too much when there is other work on this host, or in this process.
        self.last_cost = min(self._clock() - began, self._cpu() - cpu)
        pause = max(self._interval, self.last_cost / MAX_CPU_SHARE)
        # A detected change of shape without explanation must not wait its turn.
        self._next_reading = began + (pause if trusted or not hurried else self._interval)
        return disturbance

    def _fingerprint_changed(self, expected: Expected) -> bool:
        """Whether another program added or removed rules. A foreign change at the very moment of a write of
        vipd's is not detected here, but by the next reading of all rules."""
        if not self._tables:
            return False
        shape = ((expected.writes, self._present), self._tables.fingerprint(self._present))
        before, self._fingerprint = self._fingerprint, shape
        return before is not None and before[0] == shape[0] and before[1] != shape[1]

    async def _compare(self, saved: str, expected: Expected) -> ExternalChange | None:
        seen = (expected.writes, digest(saved))
        if seen == self._seen:
            return None
        mine = Installed(dict(expected.installed.chains), dict(expected.installed.builtins))
        # 10,000 services take a quarter of a second; meanwhile the API and the health checks continue.
        chains = await asyncio.to_thread(differing_chains, saved, mine, self._names)
        self._seen = seen
        if not chains:
            return None
        family = self._watched.family
        return ExternalChange(
            frozenset({family}),
            frozenset((family, chain) for chain in chains),
            frozenset({ChangeKind.RULES_DIFFER}),
            everything=len(chains) > MAX_CHAINS,
        )
