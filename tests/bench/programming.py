"""Programming the kernel: all services at once, and one changed backend, by vipd and by others, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from tests.bench.comparators import KUBE_PROXY_NFT, RESTORES
from tests.bench.extent import Extent
from tests.bench.progress import say
from tests.bench.record import Measurement
from tests.bench.trials.namespace import TrialError, run_trial
from tests.bench.trials.subjects import VIPD
from tests.bench.trials.trial import Outcome, Trial
from tests.bench.trials.usage import Usage
from tests.bench.whole_daemon import cold_starts

GROUP = "programming"
LARGE = 10_000
OURS = tuple(VIPD)
OTHERS = (*RESTORES, KUBE_PROXY_NFT)

FULL_LOAD, ONE_CHANGE = "full load", "one change"
PARTS: tuple[tuple[str, str, Callable[[Usage], float]], ...] = (
    ("", "s", lambda usage: usage.seconds),
    (", processor time", "s", lambda usage: usage.cpu),
    (", bytes given to the tool", "bytes", lambda usage: float(usage.sent)),
    (", programs run", "", lambda usage: float(usage.programs)),
)
MEMORY = ("full load, memory of the tool", "MiB")


def measure(extent: Extent) -> Iterator[Measurement]:
    """Every size; a row comes again, longer, after each round."""
    for services in extent.sizes:
        yield from _size(extent, services, (*OURS, *OTHERS))
    for services in extent.nftables_sizes:
        yield from _size(extent, services, ("vipd nftables", KUBE_PROXY_NFT))
    yield from cold_starts(extent)


def _size(extent: Extent, services: int, subjects: Sequence[str]) -> Iterator[Measurement]:
    rounds = extent.large_rounds if services >= LARGE else extent.rounds
    collected = {name: Collected(name, services, extent.limit) for name in subjects}
    for number in range(1, rounds + 1):
        for each in collected.values():
            if each.given_up:
                continue
            trial = Trial(
                each.subject,
                services,
                limit=extent.limit,
                count=number == 1 and services <= extent.counted_up_to,
            )
            each.take(outcome_of(trial))
            say(f"programming {services}, round {number} of {rounds}: {each.last_round_text()}")
            yield from each.measurements()


def outcome_of(trial: Trial) -> Outcome:
    """What came of a trial, by whichever worker has its subject; a failure is its problem."""
    try:
        return run_trial(
            trial, "tests.bench.trials.worker" if trial.subject in VIPD else "tests.bench.comparators"
        )
    except TrialError as error:
        return Outcome(problem=str(error))


class Collected:
    def __init__(self, subject: str, services: int, limit: float) -> None:
        self.subject, self._services, self._limit = subject, services, limit
        self._loads: list[Usage] = []
        self._changes: list[tuple[Usage, ...]] = []
        self._counts: dict[str, int] = {}
        self._why = {FULL_LOAD: "", ONE_CHANGE: ""}

    @property
    def given_up(self) -> bool:
        """Whether another round would be as much too long."""
        return any(self._why.values())

    def take(self, outcome: Outcome) -> None:
        too_long = f"more than {self._limit:.0f} s"
        self._loads += outcome.loads
        self._counts = dict(outcome.counts) or self._counts
        if outcome.changes:
            self._changes.append(outcome.changes)
        if not outcome.loads:
            self._why = {FULL_LOAD: outcome.problem or too_long, ONE_CHANGE: "not loaded"}
        elif not outcome.changes:
            self._why[ONE_CHANGE] = outcome.problem or too_long

    def last_round_text(self) -> str:
        done = f"{self._loads[-1].seconds:.3f} s" if self._loads else self._why[FULL_LOAD]
        return f"{self.subject}: {done}"

    def measurements(self) -> Iterator[Measurement]:
        for suffix, unit, part in PARTS:
            loads = [part(usage) for usage in self._loads]
            yield self._row(FULL_LOAD + suffix, unit, loads, self._why[FULL_LOAD])
            scale = 1000 if unit == "s" else 1
            changes = [scale * median(map(part, usages)) for usages in self._changes]
            yield self._row(
                ONE_CHANGE + suffix, "ms" if unit == "s" else unit, changes, self._why[ONE_CHANGE]
            )
        yield self._row(*MEMORY, [usage.program_mib for usage in self._loads], self._why[FULL_LOAD])
        for name, number in self._counts.items():
            yield self._row(f"{name} in the kernel", "", [float(number)], "")

    def _row(self, what: str, unit: str, values: Sequence[float], note: str) -> Measurement:
        return Measurement(GROUP, what, self.subject, self._services, unit, tuple(values), note)
