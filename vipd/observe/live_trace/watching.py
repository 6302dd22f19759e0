"""Traces packets of some flows: writes the trace rule, and reads events until the traces are over."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType

from vipd.dataplane.iptables.tools import has_legacy_tables
from vipd.host.netlink import MalformedMessageError
from vipd.host.netlink_socket import RECEIVE_BYTES, enlarge_buffer, open_multicast
from vipd.observe.live_trace.events import GROUP_TRACE, KernelEvent, logged_events, trace_events
from vipd.observe.live_trace.legacy import LegacyLog
from vipd.observe.live_trace.packet_trace import PacketTrace, TraceAssembler
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.table import TraceError, TraceTable

BUFFER_BYTES = 8 << 20
"""Events beyond this are lost."""
MAX_NOTES = 20
POLL_SECONDS = 0.1
"""How often to check whether a packet without further events is gone."""


class TraceSession:
    """Packets of these flows are traced from entry to exit, and nothing is left in the kernel after.

    Raises TraceError on entry.
    """

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows = flows
        self._opened = contextlib.ExitStack()
        self.notes: list[str] = []
        """Things that cannot be observed, and why."""

    def __enter__(self) -> TraceSession:
        try:
            # First, because it forks: a child that held the table's socket would keep the table alive.
            logs = list(self._legacy_logs())
            self._events = self._opened.enter_context(_listening())
            table = self._opened.enter_context(TraceTable(self._flows))
        except BaseException:
            self._opened.close()
            raise
        self._sockets = [self._events, *(log.socket for log in logs)]
        self._journeys = TraceAssembler(table.name, legacy=bool(logs))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def earlier_packets(self) -> int:
        """Packets of older flows, whose way was decided then."""
        return self._journeys.older

    def traces(self, seconds: float | None) -> Iterator[PacketTrace]:
        """Each trace when it is over, for this many seconds; None: for ever."""
        heard_until = time.monotonic()
        end = None if seconds is None else heard_until + seconds
        while end is None or time.monotonic() < end:
            readable, _, _ = select.select(self._sockets, [], [], POLL_SECONDS)
            for opened in readable:
                for event in self._read(opened):
                    self._journeys.take(event, time.monotonic())
            moment = time.monotonic()
            if not select.select(self._sockets, [], [], 0)[0]:
                # Only now is it silent: messages that wait to be read may be of any packet.
                heard_until = moment
            yield from self._journeys.finished(heard_until)

    def _legacy_logs(self) -> Iterator[LegacyLog]:
        for family in sorted({flow.family for flow in self._flows}):
            if not has_legacy_tables(family):
                continue
            try:
                log = self._opened.enter_context(LegacyLog(family))
                _make_room(log.socket)
                yield log
            except TraceError as error:
                said = f"{error.what}: {error.why}"
                self.notes.append(f"{said}; {error.hint}" if error.hint else said)

    def _read(self, opened: socket.socket) -> Collection[KernelEvent]:
        try:
            datagram = opened.recv(RECEIVE_BYTES)
            return list(trace_events(datagram) if opened is self._events else logged_events(datagram))
        except MalformedMessageError as error:
            self._note(f"an event could not be read: {error}")
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            self._note("events were lost: there were too many at once")
        return ()

    def _note(self, text: str) -> None:
        """Each text once, and only a limited number: a trace of flows may run for days."""
        if text not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(text)


def _listening() -> socket.socket:
    """A socket that gets every trace event of this network namespace. Raises TraceError."""
    try:
        return open_multicast(GROUP_TRACE)
    except OSError as error:
        raise TraceError.of("cannot listen to trace events", error.errno or 0) from None


def _make_room(opened: socket.socket) -> None:
    """Buffer for many events at once; as large as is allowed."""
    with contextlib.suppress(OSError):
        enlarge_buffer(opened, BUFFER_BYTES)
