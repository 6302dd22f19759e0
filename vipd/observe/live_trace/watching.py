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
from vipd.host.netlink_socket import RECEIVE_BYTES, open_multicast
from vipd.observe.live_trace.events import GROUP_TRACE, KernelEvent, trace_events
from vipd.observe.live_trace.packet_trace import PacketTrace, TraceAssembler
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.table import TraceError, TraceTable

LEGACY_NOTE = "this host has tables of legacy iptables, too: their rules cannot be traced"
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
            self._events = self._opened.enter_context(_listening())
            table = self._opened.enter_context(TraceTable(self._flows))
        except BaseException:
            self._opened.close()
            raise
        self._journeys = TraceAssembler(table.name)
        if any(has_legacy_tables(flow.family) for flow in self._flows):
            self._note(LEGACY_NOTE)
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
            if select.select([self._events], [], [], POLL_SECONDS)[0]:
                for event in self._read():
                    self._journeys.take(event, time.monotonic())
            moment = time.monotonic()
            if not select.select([self._events], [], [], 0)[0]:
                # Only now is it silent: messages that wait to be read may be of any packet.
                heard_until = moment
            yield from self._journeys.finished(heard_until)

    def _read(self) -> Collection[KernelEvent]:
        try:
            return list(trace_events(self._events.recv(RECEIVE_BYTES)))
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
