"""Events are read until a packet's trace is over, however slowly."""

from __future__ import annotations

import itertools
import socket
import time
from pathlib import Path

import pytest

from tests.observe.live_trace.recorded import RECORDED, table_of, traces
from vipd.observe.live_trace import watching
from vipd.observe.live_trace.packet_trace import TraceAssembler

SLOW_SECONDS = 1.0
"""Twice what a silence must last for a packet to be gone."""


@pytest.mark.parametrize("name", ["iptables-forwarded", "legacy-forwarded", "nftables-loopback"])
def test_what_waits_to_be_read_is_no_silence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader stands still for a second at every look at the clock; all was sent at once."""
    clock = itertools.count(0.0, SLOW_SECONDS)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    legacy = name.startswith("legacy")
    events, logs = (socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    with events[0], events[1], logs[0], logs[1]:
        for line in _recorded(name):
            kind, _, datagram = line.partition(" ")
            {"trace": events, "log": logs}[kind][0].send(bytes.fromhex(datagram))
        watch = watching.TraceSession([])
        watch._events, watch._sockets = events[1], [events[1], logs[1]]
        watch._journeys = TraceAssembler(table_of(name), legacy=legacy)
        found = next(watch.traces(None))
    (whole,) = traces(name, legacy=legacy)
    assert (found.start, found.end, found.passed) == (whole.start, whole.end, whole.passed)
    assert len(found.events) == len(whole.events)


def _recorded(name: str) -> list[str]:
    return Path(RECORDED / f"{name}.txt").read_text().splitlines()[1:]
