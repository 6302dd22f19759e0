"""Assembles the kernel's events into one trace for each packet, from its entry to its exit. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from vipd.observe.live_trace.events import EventKind, KernelEvent, TraceVerdict
from vipd.observe.live_trace.packets import Headers
from vipd.observe.live_trace.table_messages import EARLIER, END, STARTS

LOOPBACK = 1
"""The number of `lo`, in every network namespace."""

QUIET_SECONDS = 0.5
"""A packet without events for so long has left. Its whole way takes microseconds."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event, and the packet's addresses at that time."""

    event: KernelEvent
    headers: Headers


@dataclass(frozen=True, slots=True)
class PacketTrace:
    """The events of one packet, in order. Events of the tracing table are left out."""

    start: Headers
    forwarded: bool
    """It arrived by an interface; otherwise a program of this host sent it."""
    inbound: int
    """Number of the incoming interface; 0 for a packet of this host."""
    mark: int
    """Its mark when it was first observed."""
    events: tuple[TraceEvent, ...]
    end: Headers
    """Its addresses when it was last observed."""
    passed: bool
    """No rule refused or dropped it."""
    outbound: int = 0
    """Number of the outgoing interface when it was last observed; 0 for a packet that stays on this host."""
    began: float = 0.0
    """When its first event was read, by the assembler's clock."""

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
    last_event: float
    began: float
    outbound: int = 0
    """Number of the interface that it is on its way out by."""
    events: list[TraceEvent] = field(default_factory=list)
    ends: bool = False
    """No further events follow."""
    passed: bool = False
    older: bool = False
    """It belongs to an older flow."""
    loops: bool = False
    """It left by `lo`, and will arrive again."""


class TraceAssembler:
    """Takes events as they arrive; returns a trace when its packet has left. Times: seconds of one clock."""

    def __init__(self, table: str) -> None:
        """`table` is the one that marks packets."""
        self._table = table
        self._packets: dict[int, _Packet] = {}
        self.older = 0
        """Packets of older flows: their way was decided then."""

    def take(self, event: KernelEvent, now: float) -> None:
        """One event."""
        packet = self._packets.get(event.id) or self._from_loopback(event) or self._new_packet(event, now)
        if packet is None:
            return
        self._packets[event.id] = packet
        packet.last_event = now
        if event.headers is not None:
            # Events with addresses also contain interfaces.
            packet.last, packet.outbound = event.headers, event.outbound
        if event.chain.table == self._table:
            _apply_marking(packet, event)
        else:
            packet.events.append(TraceEvent(event, packet.last))
            packet.ends = packet.ends or event.verdict is TraceVerdict.DROP

    def finished(self, now: float) -> list[PacketTrace]:
        """The traces whose packets have left, oldest first; each is returned once."""
        over: list[_Packet] = []
        for packet in self._packets.values():
            # A packet that went over `lo` has two numbers.
            if _is_over(packet, now) and not any(packet is other for other in over):
                over.append(packet)
        left = {number: p for number, p in self._packets.items() if not any(p is other for other in over)}
        self._packets = left
        self.older += sum(packet.older for packet in over)
        return [_trace(packet) for packet in over if not packet.older]

    def _new_packet(self, event: KernelEvent, now: float) -> _Packet | None:
        """A new packet, if the event is our rule's."""
        begins = event.chain.table == self._table and event.chain.name.startswith(STARTS)
        if not begins or event.kind is not EventKind.RULE or event.headers is None:
            return None
        forwarded = bool(event.inbound)
        return _Packet(event.headers, event.headers, forwarded, event.inbound, event.mark, now, now)

    def _from_loopback(self, event: KernelEvent) -> _Packet | None:
        """The packet that left by `lo` and now arrives there, with a new number."""
        if event.inbound != LOOPBACK or event.headers is None:
            return None
        waiting = (p for p in self._packets.values() if p.loops and p.last == event.headers)
        packet = next(waiting, None)
        if packet is not None:
            packet.loops = False
        return packet


def _is_over(packet: _Packet, now: float) -> bool:
    return packet.older or packet.ends or now - packet.last_event >= QUIET_SECONDS


def _trace(packet: _Packet) -> PacketTrace:
    return PacketTrace(
        packet.start,
        packet.forwarded,
        packet.inbound,
        packet.mark,
        tuple(packet.events),
        packet.last,
        packet.passed,
        packet.outbound,
        packet.began,
    )


def _apply_marking(packet: _Packet, event: KernelEvent) -> None:
    """Apply an event of the tracing table to its packet."""
    if event.jump_target == EARLIER:
        packet.older = True
    if event.chain.name.startswith(END) and event.kind is EventKind.POLICY:
        # A packet that leaves by `lo` arrives again.
        packet.loops = packet.outbound == LOOPBACK
        packet.passed = packet.ends = not packet.loops
