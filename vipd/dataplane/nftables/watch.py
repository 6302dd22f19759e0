"""Seeing that somebody else changes the table: the kernel's events, told apart from our own.

The machinery is the iptables dataplane's; here is what it has to know of another kind of table. In a
`Disturbance` the names of maps and sets stand where those of chains do.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from socket import socket
from types import TracebackType

from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.disturbance import Actor, Deed, Disturbance, Scope
from vipd.dataplane.iptables.watch.events import RuleEvents, actor_of, open_socket
from vipd.dataplane.iptables.watch.messages import (
    FAMILIES,
    Change,
    Generation,
    Kind,
    opening,
    read_messages,
)
from vipd.dataplane.iptables.watch.own import OwnProcesses
from vipd.dataplane.nftables.dump import MESSAGE, attributes, text
from vipd.dataplane.nftables.options import table_name
from vipd.model import Family

_KINDS = {9: Kind.CHAIN_ADDED, 11: Kind.CHAIN_DELETED, 12: Kind.RULE_ADDED, 14: Kind.RULE_DELETED}
"""NFT_MSG_NEWSET, DELSET, NEWSETELEM and DELSETELEM: sets count as chains, and elements as rules."""
_NFTABLES = 10
_DEEDS = {kind: Deed[kind.name] for kind in Kind}


class TableScope(Scope):
    """Everything in the table of a prefix concerns us."""

    def touched(self, change: Change) -> Deed | None:
        """What a change does to us; None when it is in another table."""
        if change.family not in self.families or change.table != table_name(self.names.prefix):
            return None
        return _DEEDS[change.kind]


class TableEvents(RuleEvents):
    """Tells of foreign changes of a table as the kernel reports them. Closes the socket that it is given."""

    def _take(self, datagram: bytes) -> None:
        port, ends = opening(datagram)
        if not ends and self._own.known(port):
            self._gathering.skip(port)
            return
        for message in table_messages(datagram):
            if isinstance(message, Generation):
                worth = self._gathering.concerns(message) and not self._own.wrote(message.pid, message.port)
                actor = actor_of(message) if worth else Actor(message.name, message.pid)
                self._gathering.end(message, actor, self._own.wrote, self._clock())
            else:
                self._gathering.change(message)


class TableWatch:
    """Listens from entry to exit: `async with TableWatch(...) as watch: async for disturbance in watch`.

    Enter it before the first write, so that no gap lies between. It belongs to the network namespace of the
    thread that enters it. Raises OSError on entry when the kernel gives no events.
    """

    def __init__(
        self, names: Names, own: OwnProcesses, open_events: Callable[[], socket] = open_socket
    ) -> None:
        self._names, self._own, self._open = names, own, open_events
        self._found: asyncio.Queue[Disturbance | BaseException] = asyncio.Queue()
        self.ways: dict[Family, str] = dict.fromkeys(Family, "events")
        """How each family is watched, for status."""

    async def __aenter__(self) -> TableWatch:
        loop = asyncio.get_running_loop()
        scope = TableScope(self._names, frozenset(Family))
        self._events = TableEvents(self._open(), scope, self._own, loop.time)
        self._task = asyncio.create_task(self._events.run(self._found.put_nowait), name="table events")
        self._task.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._events.close()

    def __aiter__(self) -> TableWatch:
        return self

    async def __anext__(self) -> Disturbance:
        found = await self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Only a fault ends the events; whoever iterates learns of it."""
        if not task.cancelled() and (error := task.exception()):
            self._found.put_nowait(error)


def table_messages(datagram: bytes) -> Iterator[Change | Generation]:
    """The messages of a datagram that can concern a table. Raises ValueError when it is malformed or cut."""
    place, total = 0, len(datagram)
    while place + MESSAGE.size <= total:
        length, kind, flags, _, port, family, _, _ = MESSAGE.unpack_from(datagram, place)
        if length < MESSAGE.size or place + length > total:
            raise ValueError(f"message of {length} bytes at byte {place} of {total}")
        if kind >> 8 == _NFTABLES and kind & 0xFF in _KINDS and family in FAMILIES:
            body = datagram[place + MESSAGE.size : place + length]
            yield _change(_KINDS[kind & 0xFF], FAMILIES[family], flags, body, port)
        else:
            yield from read_messages(datagram[place : place + length])
        place += (length + 3) & ~3


def _change(kind: Kind, family: Family, flags: int, body: bytes, port: int) -> Change:
    try:
        found = attributes(body)
    except struct.error as error:
        raise ValueError(str(error)) from None
    return Change(kind, family, text(found.get(1)), text(found.get(2)), flags, body, port)
