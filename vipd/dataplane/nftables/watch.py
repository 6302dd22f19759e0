"""Detects that another program changes the table: the kernel's events, without those of vipd's own writes.

The iptables dataplane has the common code; this module adds what differs for a table. In an
`ExternalChange` the names of maps and sets replace those of chains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from socket import socket

from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.events import RuleEvents, open_socket
from vipd.dataplane.iptables.watch.external_change import ChangeKind, OwnershipFilter
from vipd.dataplane.iptables.watch.messages import KINDS_WITH_SETS, Change, MessageKind
from vipd.dataplane.iptables.watch.stream import ExternalChangeStream, WatchOptions
from vipd.dataplane.nftables.options import table_name
from vipd.model.service import Family

_CHANGE_KINDS = {kind: ChangeKind[kind.name] for kind in MessageKind}


class TableOwnershipFilter(OwnershipFilter):
    """Everything in the table of a prefix concerns us."""

    def classify(self, change: Change) -> ChangeKind | None:
        """The effect of a change on vipd's table; None if it is in another table."""
        if change.family not in self.families or change.table != table_name(self.names.prefix):
            return None
        return _CHANGE_KINDS[change.kind]


class TableWatch(ExternalChangeStream):
    """Listens from entry to exit. Enter it before the first write, so that no change is missed.

    It belongs to the network namespace of the thread that enters it. Raises OSError on entry if the kernel
    sends no events.
    """

    def __init__(
        self, names: Names, options: WatchOptions, open_events: Callable[[], socket] = open_socket
    ) -> None:
        super().__init__(options)
        self._names, self._open = names, open_events
        self.ways: dict[Family, str] = dict.fromkeys(Family, "events")
        """How each family is watched, for status."""

    def _begin(self) -> None:
        clock = asyncio.get_running_loop().time
        options, scope = (
            self._options,
            self._options.scope(TableOwnershipFilter(self._names, frozenset(Family))),
        )
        events = RuleEvents(self._open(), scope, options.own, clock, options.on_message, KINDS_WITH_SETS)
        self._start(events, "table events")
