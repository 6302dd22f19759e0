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
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.table_messages import table_name

RECORDED = Path(__file__).parent / "recorded"
READERS = {"trace": trace_events, "log": logged_events}


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
