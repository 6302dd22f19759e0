"""The status page's view of the last minutes: rates of flows and bytes, and the last events.

Rates come from counts that only grow; their times are those of the readings.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from vipd.dataplane.counting import BackendKey
from vipd.declaration.bounded_json import Json
from vipd.model.flow_limits import Limit
from vipd.model.service import socket_text
from vipd.observe.events.event import EventRecord, encode
from vipd.observe.events.recorder import Recorder, Subscription
from vipd.observe.flow_stats.totals import NO_TRAFFIC, FlowTotals
from vipd.observe.metrics.flows import FlowReading

MAX_RATES = 60
"""Rates that are kept of each service."""
AVERAGED_SECONDS = 6.0
"""Seconds over which bytes are averaged, or the time between readings of open flows if that is longer."""


class _TrafficSample(NamedTuple):
    at: datetime
    bytes_in: int
    bytes_out: int


class FlowHistory:
    """The last rates of new flows of each service, in flows a second."""

    def __init__(self) -> None:
        self._at: datetime | None = None
        self._totals: dict[str, int] = {}
        self._backend_flows: dict[str, dict[BackendKey, int]] = {}
        """New flows of each backend, by service."""
        self._passed: dict[str, deque[_TrafficSample]] = {}
        self._speeds: dict[str, tuple[int, int]] = {}
        """Bytes a second at the last reading of open flows."""
        self._quiet: frozenset[str] = frozenset()
        """Services without traffic at the last reading, as far as it was counted."""
        self._rates: dict[str, deque[float]] = {}
        self.latest: Json = {}
        """By service with any flow or traffic: `[RATE, FLOWS NOW, {"SERVICE PORT/PROTOCOL/ADDR:PORT": RATE},
        BYTES A SECOND FROM CLIENTS, TO CLIENTS]`."""
        self._refusals: Mapping[str, Mapping[Limit, int]] = {}
        self.refused: Json = {}
        """By service that refused any flow over a limit: `{LIMIT: [FLOWS, RATE]}`."""

    def add_reading(self, reading: FlowReading, services: Iterable[str]) -> None:
        """The next reading; the first one gives no rates, nor does one after the clock was set back, and the
        same one again nothing."""
        before, self._at = self._at, reading.at
        if reading.at == before:
            return
        if before is not None and reading.at < before:
            before = None
            self._passed.clear()
        seconds = (reading.at - before).total_seconds() if before else 0.0
        self.latest = {}
        self._note_refusals(reading, seconds)
        names = frozenset(services)
        quiet, self._quiet = self._quiet, names - self._passed.keys() if reading.traffic else frozenset()
        for name in names:
            rate, backends = self._rates_of(name, reading.totals, seconds)
            self._note(name, rate)
            now = reading.by_service.get(name, 0)
            traffic = self._traffic(name, reading, before if name in quiet else None)
            if rate or now or any(traffic):
                self.latest[name] = [rate, now, backends, *traffic]

    def forget(self, name: str) -> None:
        """Remove a service."""
        self._totals.pop(name, None)
        self._rates.pop(name, None)
        self._passed.pop(name, None)
        self._speeds.pop(name, None)
        self._backend_flows.pop(name, None)

    def rates(self) -> Mapping[str, list[float]]:
        """The rates of each service that had any, the oldest first."""
        return {name: list(rates) for name, rates in self._rates.items()}

    def _rates_of(self, name: str, totals: FlowTotals, seconds: float) -> tuple[float, dict[str, float]]:
        """The rates of a service and of its backends. Cheap if there are no new flows."""
        total = totals.flows_of_service(name)
        known = self._totals.get(name)
        if known == total:
            return 0.0, {}
        self._totals[name] = total
        backends = dict[str, float]()
        places = self._backend_flows.setdefault(name, {})
        for place in totals.backends_of(name):
            count = totals.flows_of_backend(place)
            rate = _rate(places.get(place, 0), count, seconds)
            places[place] = count
            if rate:
                key = place.key
                address = socket_text(place.address, place.port)
                backends[f"{key.service_port}/{key.protocol}/{address}"] = rate
        # A service seen for the first time may have counted for long.
        return (_rate(known, total, seconds), backends) if known is not None else (0.0, {})

    def _traffic(self, name: str, reading: FlowReading, before: datetime | None) -> tuple[int, int]:
        """Bytes a second from clients and to them, as of the last reading of open flows, as in `vipctl top`:
        flows that ended since are in the next one. None if it is not counted.
        `before`: when the last reading was, if the service had had none then."""
        if not reading.traffic:
            self._passed.pop(name, None)
            return 0, 0
        total = reading.totals.traffic_of_service(name)
        if total == NO_TRAFFIC:
            return 0, 0
        at = reading.traffic_at or reading.at
        samples = self._passed.setdefault(name, deque())
        if samples and samples[-1].at == at:
            return self._speeds.get(name, (0, 0))
        if samples and samples[-1].at > at:
            samples.clear()  # the clock was set back
        if before is not None and before < at and not samples:
            samples.append(_TrafficSample(before, 0, 0))
        samples.append(_TrafficSample(at, total.bytes_in, total.bytes_out))
        while len(samples) > 2 and (at - samples[1].at).total_seconds() >= AVERAGED_SECONDS:
            samples.popleft()
        self._speeds[name] = _speed(samples[0], samples[-1])
        return self._speeds[name]

    def _note_refusals(self, reading: FlowReading, seconds: float) -> None:
        """The flows over each limit so far, and their rate."""
        before, self._refusals = self._refusals, reading.refused
        self.refused = {
            name: {
                limit.value: [flows, _rate(before.get(name, {}).get(limit, flows), flows, seconds)]
                for limit, flows in counts.items()
                if flows
            }
            for name, counts in reading.refused.items()
            if any(counts.values())
        }

    def _note(self, name: str, rate: float) -> None:
        if rate and name not in self._rates:
            self._rates[name] = deque(maxlen=MAX_RATES)
        rates = self._rates.get(name)
        if rates is not None:
            rates.append(rate)
            if not any(rates):
                del self._rates[name]


def _speed(then: _TrafficSample, now: _TrafficSample) -> tuple[int, int]:
    seconds = (now.at - then.at).total_seconds()
    received = _rate(then.bytes_in, now.bytes_in, seconds)
    return round(received), round(_rate(then.bytes_out, now.bytes_out, seconds))


def _rate(before: int, after: int, seconds: float) -> float:
    return round(max(0, after - before) / seconds, 2) if seconds else 0.0


RECENT_EVENTS = 60


class RecentEvents:
    """Events by the id of their report."""

    def __init__(self) -> None:
        self._kept: dict[int, EventRecord] = {}

    async def load(self, recorder: Recorder) -> None:
        """Start with those on disk."""
        recent = (await asyncio.to_thread(recorder.read))[-RECENT_EVENTS:]
        self._kept = {occurrence.group_id: occurrence for occurrence in recent}

    async def take_new(self, subscription: Subscription) -> None:
        """Add a follower's new events."""
        while not subscription.finished and (occurrence := await subscription.next(0)) is not None:
            self._kept.pop(occurrence.group_id, None)
            self._kept[occurrence.group_id] = occurrence
        while len(self._kept) > RECENT_EVENTS:
            del self._kept[next(iter(self._kept))]

    def texts(self) -> Sequence[str]:
        """All of them as JSON, the oldest first."""
        return [encode(occurrence).decode().rstrip() for occurrence in self._kept.values()]
