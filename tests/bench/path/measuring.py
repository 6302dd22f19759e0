"""Rounds over all arrangements, each beside the direct path of the same moment."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from tests.bench.path.arrangements import DIRECT, KEPT_AT, Arrangement, arrange, arrangements
from tests.bench.path.probes import (
    CONNECTIONS,
    MICRO,
    PER_CONNECTION,
    PER_FIRST_PACKET,
    RATE,
    RATIO,
    Length,
    Probes,
    Reading,
)
from tests.bench.path.programs import Programs
from tests.bench.progress import say
from tests.bench.record import Measurement

GROUP = "path"
SIZES = {True: (10, 1_000), False: (10, 1_000, 10_000)}
LENGTHS = {
    True: Length(rounds=2, seconds=0.3, kept_rounds=1, new_flows=16_000),
    False: Length(rounds=3, seconds=0.6, kept_rounds=2, new_flows=48_000),
}

NEW_FLOWS = (CONNECTIONS, PER_CONNECTION, PER_FIRST_PACKET)
NEW_FLOWS_UNITS = (RATE, MICRO, MICRO)
"""What `_New` holds, in its order."""


class _Row(NamedTuple):
    what: str
    subject: str
    services: int | None
    unit: str


class _New(NamedTuple):
    """What new flows cost on one path at one moment."""

    connections: float
    cpu: float
    """Microseconds for each connection."""
    first_packet: float | None
    """Microseconds of CPU for each; None where no packet is forwarded."""


class Measuring:
    def __init__(self, direct: Arrangement, others: list[Arrangement], probes: Probes) -> None:
        self._direct, self._others, self._probes = direct, others, probes
        self._values: dict[_Row, list[float]] = defaultdict(list)
        self._failures: dict[tuple[str, int | None], list[str]] = defaultdict(list)

    def warm_up(self) -> None:
        """One connection after the other on every path: neighbours get known, faults are found."""
        for at in (self._direct, *self._others):
            for address in at.targets.values():
                self._probes.try_out(at, address)

    def round(self, with_kept: bool) -> None:
        """Every arrangement once, the direct path before and after each."""
        self._read(self._direct, self._probes.latency)
        before = self._new_flows(self._direct)
        for at in self._others:
            found, after = self._new_flows(at), self._new_flows(self._direct)
            for target, new in found.items():
                self._compare(at, target, new, [*before.values(), *after.values()])
            before = after
            self._read(at, self._probes.latency)
        for at in (self._direct, *self._others) if with_kept else ():
            if at.services in (None, KEPT_AT):
                self._read(at, self._probes.kept)

    def measurements(self) -> Iterator[Measurement]:
        for row, values in self._values.items():
            note = "; ".join(dict.fromkeys(self._failures[row.subject, row.services]))
            yield Measurement(GROUP, row.what, row.subject, row.services, row.unit, tuple(values), note)

    def _new_flows(self, at: Arrangement) -> dict[str, _New]:
        found = {}
        for target, address in at.targets.items():
            with self._noting_failure(at):
                rate, cpu = self._probes.connections(at, address)
                first = self._probes.first_packet(at, address) if at.subject.by_kernel else None
                found[target] = _New(rate, cpu, first)
        for target, new in found.items():
            for what, unit, value in zip(NEW_FLOWS, NEW_FLOWS_UNITS, new, strict=True):
                if value is not None:
                    self._note(at, Reading(what + target, unit, value))
        return found

    def _read(self, at: Arrangement, probe: Callable[[Arrangement], Iterator[Reading]]) -> None:
        with self._noting_failure(at):
            for reading in probe(at):
                self._note(at, reading)

    def _compare(self, at: Arrangement, target: str, new: _New, direct: list[_New]) -> None:
        """Each figure beside the mean of the direct path's just before and after."""
        beside = zip(NEW_FLOWS, new, zip(*direct, strict=True), strict=bool(direct))
        for figure, value, figures in beside:
            if value is not None:
                what = f"{figure.removesuffix(' per second')}{target}, part of direct"
                part = value / mean([each for each in figures if each is not None])
                self._note(at, Reading(what, RATIO, part))

    def _note(self, at: Arrangement, reading: Reading) -> None:
        row = _Row(reading.what, at.subject.name, at.services, reading.unit)
        self._values[row].append(reading.value)

    @contextlib.contextmanager
    def _noting_failure(self, at: Arrangement) -> Iterator[None]:
        """A path that is stuck for once costs its own figures of this round, not everybody's."""
        try:
            yield
        except AssertionError as error:
            self._failures[at.subject.name, at.services].append(f"in some round: {error}")
            say(f"path: {at.subject.name}, {at.services} services: {error}")


def measure(quick: bool) -> Iterator[Measurement]:
    """Every row of the path. Needs root and what `prepare.sh` installs.

    AssertionError when a path does not work.
    """
    length = LENGTHS[quick]
    with contextlib.ExitStack() as stack:
        programs = Programs(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vipd-path-"))))
        direct = arrange(DIRECT, None, programs, stack)
        others = [arrange(subject, size, programs, stack) for subject, size in arrangements(SIZES[quick])]
        measuring = Measuring(direct, others, Probes(programs, length))
        measuring.warm_up()
        for number in range(length.rounds):
            say(f"path: round {number + 1} of {length.rounds}, {len(others)} paths beside the direct one")
            measuring.round(with_kept=number < length.kept_rounds)
        yield from measuring.measurements()
