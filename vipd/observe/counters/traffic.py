"""The flows that connection tracking knows, by service and backend; read when somebody asks.

Reading takes CPU in proportion to the whole table, so sums are kept for a while: see `SHARE_OF_A_CPU`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from vipd.dataplane.conntrack.cleaner import Connect
from vipd.dataplane.conntrack.entries import TCP_CLOSE, TCP_TIME_WAIT, Entry, Traffic
from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack, open_socket
from vipd.dataplane.conntrack.stale import Destination, destinations
from vipd.dataplane.counting import Place
from vipd.model import Family, Forwarding, ForwardingKey, Protocol

SHARE_OF_A_CPU = 0.02
LEAST_PAUSE_SECONDS = 2.0
SYSCTLS = Path("/proc/sys/net/netfilter")

_ENDED = frozenset({TCP_TIME_WAIT, TCP_CLOSE})


class Flow(NamedTuple):
    """A tracked flow of a service."""

    place: Place
    entry: Entry


@dataclass(slots=True)
class Sum:
    """Flows that have not ended, and what has passed in them."""

    flows: int = 0
    packets_in: int = 0
    bytes_in: int = 0
    packets_out: int = 0
    bytes_out: int = 0

    def add(self, traffic: Traffic | None) -> None:
        """One flow more."""
        self.flows += 1
        if traffic:
            self.packets_in += traffic.packets_in
            self.bytes_in += traffic.bytes_in
            self.packets_out += traffic.packets_out
            self.bytes_out += traffic.bytes_out


@dataclass(frozen=True, slots=True)
class Sums:
    """One reading."""

    at: datetime
    backends: Mapping[Place, Sum] = field(default_factory=dict)


class Table(NamedTuple):
    """The connection tracking table as a whole; None: the kernel does not say."""

    entries: int | None
    limit: int | None
    accounting: bool
    """New flows have their packets and bytes counted."""


class FlowTable:
    """Reads the table of the network namespace that vipd is in. Methods may raise ConntrackError."""

    def __init__(
        self,
        forwardings: Callable[[], Iterable[Forwarding]],
        host_addresses: Callable[[], Collection[str]],
        connect: Connect = open_socket,
        sysctls: Path = SYSCTLS,
    ) -> None:
        self._forwardings, self._host_addresses = forwardings, host_addresses
        self._connect, self._sysctls = connect, sysctls
        self._one_at_a_time = asyncio.Lock()
        self._sums: Sums | None = None
        self._next = 0.0

    def table(self) -> Table:
        """How full the table is, now."""
        entries, limit, accounting = (
            _number(self._sysctls / f"nf_conntrack_{name}") for name in ("count", "max", "acct")
        )
        return Table(entries, limit, bool(accounting))

    async def sums(self) -> Sums:
        """What each backend has; some seconds old if reading takes long."""
        async with self._one_at_a_time:
            if self._sums and time.monotonic() < self._next:
                return self._sums
            owners = _Owners(self._forwardings(), self._host_addresses())
            sums, seconds = await asyncio.to_thread(self._add_up, owners)
            self._sums = sums
            self._next = time.monotonic() + max(LEAST_PAUSE_SECONDS, seconds / SHARE_OF_A_CPU)
            return sums

    async def flows(self, forwardings: Sequence[Forwarding], wanted: Callable[[Flow], bool]) -> list[Flow]:
        """Every flow through these forwardings that is wanted, also those that have ended, as of now."""
        async with self._one_at_a_time:
            owners = _Owners(forwardings, self._host_addresses())
            return await asyncio.to_thread(lambda: [f for f in self._read(owners) if wanted(f)])

    def _add_up(self, owners: _Owners) -> tuple[Sums, float]:
        began, at, found = time.thread_time(), datetime.now(UTC), dict[Place, Sum]()
        for place, entry in self._read(owners):
            if entry.tcp_state not in _ENDED:
                found.setdefault(place, Sum()).add(entry.traffic)
        return Sums(at, found), time.thread_time() - began

    def _read(self, owners: _Owners) -> Iterator[Flow]:
        for query in owners.queries():
            seen = set[bytes]()  # an entry may come twice
            with Conntrack(self._connect()) as table:
                for entry in (entry for chunk in table.dump(query) for entry in chunk):
                    key = owners.owner(entry)
                    if key is not None and entry.identity not in seen:
                        seen.add(entry.identity)
                        yield Flow(Place(key, *entry.reply_source), entry)


class _Owners:
    """Whose flow an entry is."""

    def __init__(self, forwardings: Iterable[Forwarding], host_addresses: Collection[str]) -> None:
        self._keys = {place: f.key for f in forwardings for place in destinations(f)}
        self._host = frozenset(host_addresses)

    def queries(self) -> list[Query]:
        """The parts of the table that can hold any. The kernel walks through all of it for each."""
        protocols = dict[Family, set[Protocol]]()
        for place in self._keys:
            protocols.setdefault(place.family, set()).add(place.protocol)
        return [Query(f, *(found if len(found) == 1 else ())) for f, found in sorted(protocols.items())]

    def owner(self, entry: Entry) -> ForwardingKey | None:
        """The forwarding that translated it; None when none did."""
        if not entry.translated:
            return None
        address, port = entry.destination
        key = self._keys.get(Destination(entry.family, entry.protocol, address, port))
        if key is None and address in self._host:
            key = self._keys.get(Destination(entry.family, entry.protocol, "", port))
        return key


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
