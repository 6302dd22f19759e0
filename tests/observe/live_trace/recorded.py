"""Datagrams of the kernel as they came while a packet was traced, kept as text for tests without a kernel.

    ip netns exec HOST python -m tests.observe.live_trace.recorded NAME SOURCE DESTINATION PORT/PROTOCOL

writes recorded/NAME.txt: the table that marked the packet, then a line for each datagram: `trace` or `log`,
and its bytes in hexadecimal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from vipd.model.service import Protocol
from vipd.observe.live_trace import watching
from vipd.observe.live_trace.events import KernelEvent, logged_events, trace_events
from vipd.observe.live_trace.packet_trace import QUIET_SECONDS, PacketTrace, TraceAssembler
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.table_messages import table_name

RECORDED = Path(__file__).parent / "recorded"
READERS = {"trace": trace_events, "log": logged_events}


def table_of(name: str) -> str:
    """The table that marked the packet of a recording."""
    return (RECORDED / f"{name}.txt").read_text().splitlines()[0]


def events(name: str) -> Iterator[KernelEvent]:
    """The events of a recording, in order."""
    for line in (RECORDED / f"{name}.txt").read_text().splitlines()[1:]:
        kind, _, datagram = line.partition(" ")
        yield from READERS[kind](bytes.fromhex(datagram))


def traces(name: str, *, legacy: bool = False) -> list[PacketTrace]:
    """The traces of a recording, as if nothing more had come for long."""
    put_together = TraceAssembler(table_of(name), legacy=legacy)
    for event in events(name):
        put_together.take(event, 0.0)
    return put_together.finished(QUIET_SECONDS)


def record(name: str, flow: Flow) -> None:
    """Trace one packet that somebody sends now, and write what came of it."""
    lines: list[str] = []

    def keeping(kind: str) -> Callable[[bytes], Iterator[KernelEvent]]:
        def read(datagram: bytes) -> Iterator[KernelEvent]:
            lines.append(f"{kind} {datagram.hex()}")
            return READERS[kind](datagram)

        return read

    with (
        patch.object(watching, "trace_events", keeping("trace")),
        patch.object(watching, "logged_events", keeping("log")),
        watching.TraceSession([flow]) as watch,
    ):
        lines.append(table_name(os.getpid()))
        print("READY", flush=True)
        next(watch.traces(10.0))
    (RECORDED / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    _, name, source, destination, place = sys.argv
    port, _, protocol = place.partition("/")
    record(name, Flow(destination, int(port), Protocol(protocol), source))
