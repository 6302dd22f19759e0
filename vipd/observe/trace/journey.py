"""Events put together: the journey of each traced packet, from where it enters to where it leaves. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vipd.observe.trace.events import Event, Kind, Verdict
from vipd.observe.trace.markers import EARLIER, END, STARTS
from vipd.observe.trace.packets import Headers

LOOPBACK = 1
"""The number of `lo`, in every network namespace."""

QUIET_SECONDS = 0.5
"""A packet that nothing more is heard of for so long is gone. Its whole way takes microseconds."""
FORGOTTEN_SECONDS = 10.0
"""What was logged of packets that are not known is kept so long at most."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An event, and the packet's addresses as they were then."""

    event: Event
    headers: Headers


@dataclass(frozen=True, slots=True)
class Journey:
    """What happened to one packet, in order. Events of the tracing table are left out."""

    start: Headers
    forwarded: bool
    """It came in by an interface; else a program of this host sent it."""
    inbound: int
    """Number of the interface that it came in by; 0 for a packet of this host."""
    mark: int
    """Its mark when it was first seen."""
    moments: tuple[Moment, ...]
    end: Headers
    """Its addresses when it was last seen."""
    passed: bool
    """It got past all rules."""

    @property
    def translated(self) -> bool:
        """Its destination was changed."""
        return (self.end.destination, self.end.port) != (self.start.destination, self.start.port)


@dataclass(slots=True)
class _Packet:
    """A packet under way."""

    start: Headers
    last: Headers
    forwarded: bool
    inbound: int
    mark: int
    heard: float
    outbound: int = 0
    """Number of the interface that it is on its way out by."""
    moments: list[tuple[int, Moment]] = field(default_factory=list)
    ends: bool = False
    """Nothing more is to come."""
    passed: bool = False
    older: bool = False
    """It belongs to a flow that began before."""
    loops: bool = False
    """It left by `lo`, and will come in again."""

    def took_same_way(self, headers: Headers) -> bool:
        """Whether headers that were logged without a number are this packet's."""
        return headers[:2] in (self.start[:2], self.last[:2]) and headers.protocol is self.start.protocol


class Journeys:
    """Takes events as they come; gives journeys when they are over. Times are seconds of one clock."""

    def __init__(self, table: str, *, legacy: bool = False) -> None:
        """`table` is the one that marks our packets. `legacy`: events of legacy tables come by another way,
        so that a packet's are waited for after its end."""
        self._table, self._legacy = table, legacy
        self._packets: dict[int, _Packet] = {}
        self._logged: list[tuple[int, float, Event]] = []
        self._order = 0
        self.older = 0
        """Packets of flows that began before: their way was decided then."""

    def take(self, event: Event, now: float) -> None:
        """One event."""
        self._order += 1
        if event.chain.legacy:
            self._logged.append((self._order, now, event))
            return
        packet = self._packets.get(event.id) or self._returning(event) or self._beginning(event, now)
        if packet is None:
            return
        self._packets[event.id] = packet
        packet.heard = now
        if event.headers is not None:
            # Interfaces are said where addresses are.
            packet.last, packet.outbound = event.headers, event.outbound
        if event.chain.table == self._table:
            _pass_marker(packet, event)
        else:
            packet.moments.append((self._order, Moment(event, packet.last)))
            packet.ends = packet.ends or event.verdict is Verdict.DROP

    def finished(self, now: float) -> list[Journey]:
        """The journeys that are over, oldest first; each is given once."""
        over: list[_Packet] = []
        for packet in self._packets.values():
            # A packet that went over `lo` has two numbers.
            if self._is_over(packet, now) and not any(packet is other for other in over):
                over.append(packet)
        left = {number: p for number, p in self._packets.items() if not any(p is other for other in over)}
        self._packets = left
        self.older += sum(packet.older for packet in over)
        found = [self._journey(packet) for packet in over if not packet.older]
        self._logged = [each for each in self._logged if now - each[1] < FORGOTTEN_SECONDS]
        return found

    def _is_over(self, packet: _Packet, now: float) -> bool:
        done = packet.older or (packet.ends and not self._legacy)
        return done or now - packet.heard >= QUIET_SECONDS

    def _beginning(self, event: Event, now: float) -> _Packet | None:
        """A new packet, if the event is our rule's."""
        begins = event.chain.table == self._table and event.chain.name.startswith(STARTS)
        if not begins or event.kind is not Kind.RULE or event.headers is None:
            return None
        forwarded = bool(event.inbound)
        return _Packet(event.headers, event.headers, forwarded, event.inbound, event.mark, now)

    def _returning(self, event: Event) -> _Packet | None:
        """The packet that left by `lo` and now comes in there, under a new number."""
        if event.inbound != LOOPBACK or event.headers is None:
            return None
        waiting = (p for p in self._packets.values() if p.loops and p.last == event.headers)
        packet = next(waiting, None)
        if packet is not None:
            packet.loops = False
        return packet

    def _journey(self, packet: _Packet) -> Journey:
        logged = [each for each in self._logged if each[2].headers and packet.took_same_way(each[2].headers)]
        self._logged = [each for each in self._logged if each not in logged]
        moments = packet.moments + list(_moments(logged))
        moments.sort(key=lambda each: each[0])
        return Journey(
            packet.start,
            packet.forwarded,
            packet.inbound,
            packet.mark,
            tuple(moment for _, moment in moments),
            packet.last,
            packet.passed,
        )


def _pass_marker(packet: _Packet, event: Event) -> None:
    """What an event of our own table says of its packet."""
    if event.leads == EARLIER:
        packet.older = True
    if event.chain.name.startswith(END) and event.kind is Kind.POLICY:
        # What leaves by `lo` comes in again.
        packet.loops = packet.outbound == LOOPBACK
        packet.passed = packet.ends = not packet.loops


def _moments(logged: list[tuple[int, float, Event]]) -> Iterator[tuple[int, Moment]]:
    for order, _, event in logged:
        assert event.headers is not None  # noqa: S101 (only such were chosen)
        yield order, Moment(event, event.headers)
