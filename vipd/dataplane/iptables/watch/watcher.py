"""The entry point: one stream of external changes, by events where the kernel has them, else by polling.

async with Watch(families, names, WatchOptions(own)) as watch:
    async for disturbance in watch: ...
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from socket import socket

from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.events import RuleEvents, open_socket
from vipd.dataplane.iptables.watch.external_change import OwnershipFilter
from vipd.dataplane.iptables.watch.legacy_tables import LegacyTables
from vipd.dataplane.iptables.watch.poll import POLL_SECONDS, RulePoll, WatchedFamily
from vipd.dataplane.iptables.watch.stream import ExternalChangeStream, WatchOptions
from vipd.model.service import Family

log = logging.getLogger(__name__)


class RuleWatch(ExternalChangeStream):
    """Listens from entry to exit. Enter it before the first write, so that no change is missed.

    It belongs to the network namespace of the thread that enters it. A reported change may prove harmless;
    the reader of the rules decides.
    """

    def __init__(
        self,
        families: Sequence[WatchedFamily],
        names: Names,
        options: WatchOptions,
        interval: float = POLL_SECONDS,
        open_events: Callable[[], socket] = open_socket,
        open_tables: Callable[[Family], LegacyTables] = LegacyTables,
    ) -> None:
        super().__init__(options)
        self._families, self._names, self._interval = tuple(families), names, interval
        self._open_events, self._open_tables = open_events, open_tables
        self.ways: dict[Family, str] = {}
        """How each family is watched, for status: `events`, `poll`, or `poll: ` and why not by events."""

    def _begin(self) -> None:
        self._start_events()
        for watched in self._families:
            if self.ways[watched.family] != "events":
                self._start_poll(self._poll(watched), f"polling rules of IPv{watched.family.value}")

    def _start_events(self) -> None:
        self.ways = {watched.family: "poll" for watched in self._families}
        told = frozenset(watched.family for watched in self._families if not watched.legacy)
        if not told and not self._options.extend_filter:
            return
        try:
            listening = self._open_events()
        except OSError as error:
            log.warning("no events of rule changes (%s); polling instead", error)
            self.ways |= dict.fromkeys(told, f"poll: {error}")
            return
        clock = asyncio.get_running_loop().time
        self.ways |= dict.fromkeys(told, "events")
        scope = self._options.scope(OwnershipFilter(self._names, told))
        events = RuleEvents(listening, scope, self._options.own, clock, self._options.on_message)
        self._start(events, "rule events")

    def _poll(self, watched: WatchedFamily) -> RulePoll:
        tables = None
        if watched.legacy:
            try:
                tables = self._open_tables(watched.family)
            except OSError as error:
                log.warning("legacy tables of %s: %s; only whole readings", watched.family, error)
        return RulePoll(watched, self._names, asyncio.get_running_loop().time, self._interval, tables)
