"""What is measured in one arrangement, each for about a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.bench.path.arrangements import Arrangement, delivered
from tests.bench.path.programs import MICROSECONDS, PORTS, Outcome, Programs, softirq_seconds, throughput
from tests.lab.topology import CLIENT_SOURCES

CONNECTIONS = "connections per second"
PER_FIRST_PACKET = "CPU per first packet"
PER_CONNECTION = "CPU per connection"
RATE, MICRO, RATIO = "1/s", "µs", "×"

KEPT_FLOWS = 64
KEPT_DATAGRAMS = 160_000
TRY_SECONDS = 0.05
TRIES = 3
"""Short runs of which the fastest counts: a neighbour on the machine only takes away."""


@dataclass(frozen=True, slots=True)
class Length:
    rounds: int
    seconds: float
    """Of the busy connections; the others take parts of it."""
    kept_rounds: int
    new_flows: int
    """Datagrams of one burst, each the first of a flow: less than connection tracking holds."""


class Reading(NamedTuple):
    what: str
    unit: str
    value: float


class Probes:
    def __init__(self, programs: Programs, length: Length) -> None:
        self._programs, self._length = programs, length

    def try_out(self, at: Arrangement, target: str) -> None:
        self._programs.load(at.lab.client, "connect", target, PORTS.closing, TRY_SECONDS, alone=True)
        at.forget_flows()

    def connections(self, at: Arrangement, target: str) -> tuple[float, float]:
        before, outcomes = at.clock.seconds(), []
        for _ in range(TRIES):
            seconds = self._length.seconds / TRIES
            outcomes.append(self._programs.load(at.lab.client, "connect", target, PORTS.closing, seconds))
        cpu = at.clock.seconds() - before + sum(outcome.cpu for outcome in outcomes)
        at.forget_flows()
        done = sum(outcome.done for outcome in outcomes)
        return max(outcome.rate for outcome in outcomes), cpu / done * MICROSECONDS

    def latency(self, at: Arrangement) -> Iterator[Reading]:
        """One connection after the other, on an idle path."""
        seconds = self._length.seconds / 2
        outcome = self._programs.load(at.lab.client, "connect", at.target, PORTS.closing, seconds, alone=True)
        at.forget_flows()
        yield Reading("connect to answer, p50", MICRO, outcome.answer_p50)

    def first_packet(self, at: Arrangement, target: str) -> float:
        """Microseconds of CPU for a datagram through the host when each begins a flow."""
        rate = self._flood(at, target, self._length.new_flows, self._length.new_flows // len(CLIENT_SOURCES))
        at.forget_flows()
        return MICROSECONDS / rate

    def kept(self, at: Arrangement) -> Iterator[Reading]:
        before = at.clock.seconds()
        requests = self._load(at, "request", at.target, PORTS.echo)
        cpu = at.clock.seconds() - before + requests.cpu
        yield Reading("requests per second", RATE, requests.rate)
        yield Reading("CPU per request", MICRO, cpu / requests.done * MICROSECONDS)
        yield Reading(
            "throughput", "Gbit/s", throughput(at.lab.client, at.target, self._length.seconds) / 1e9
        )
        if at.subject.udp:
            yield Reading(
                "UDP answers per second", RATE, self._load(at, "datagram", at.target, PORTS.udp_echo).rate
            )
        if at.subject.by_kernel:
            flows = KEPT_FLOWS // len(CLIENT_SOURCES)
            yield Reading(
                "UDP packets per CPU second", RATE, self._flood(at, at.target, KEPT_DATAGRAMS, flows)
            )
        at.forget_flows()

    def _load(self, at: Arrangement, mode: str, target: str, port: int) -> Outcome:
        return self._programs.load(at.lab.client, mode, target, port, self._length.seconds)

    def _flood(self, at: Arrangement, target: str, datagrams: int, flows: int) -> float:
        """How many arrive for a second of CPU: the sender does all the work, up to the backend's socket."""
        arrived, before = delivered(at), softirq_seconds()
        outcome = self._programs.flood(
            at.lab.client, target, PORTS.udp_sink, datagrams, CLIENT_SOURCES, flows
        )
        cpu = outcome.cpu + softirq_seconds() - before
        return (delivered(at) - arrived) / cpu
