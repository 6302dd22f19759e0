"""A short measurement of this host: every dataplane that it has, in turn, until the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vipd.observe.bench.facts import is_installed
from vipd.observe.bench.namespace import TrialError, run_trial
from vipd.observe.bench.trial import Outcome, Trial

ROUNDS = 5
BUDGET_SECONDS = 45.0
"""No round is started that would probably end after this."""
LIMIT_SECONDS = 15.0
CONNECTIONS = 3000

DATAPLANES = ("iptables", "nftables")
_NEEDS = (
    ("vipd iptables-nft", "iptables", "iptables-nft-restore"),
    ("vipd iptables-legacy", "iptables", "iptables-legacy-restore"),
    ("vipd nftables", "nftables", "nft"),
)


@dataclass(slots=True)
class Measurement:
    """Results of one subject in all rounds. Lists of one value for each round."""

    subject: str
    load_seconds: list[float] = field(default_factory=list)
    change_seconds: list[float] = field(default_factory=list)
    """For one changed backend; the median of a round's changes."""
    memory_mib: list[float] = field(default_factory=list)
    """Peaks of the process that loads as the daemon does, and of its largest program, added up."""
    direct: list[float] = field(default_factory=list)
    """Connections a second to a backend's own address, before any rule."""
    vip: list[float] = field(default_factory=list)
    """Connections a second to the last service."""
    problem: str = ""
    """Why there is nothing more."""

    def add_round(self, outcome: Outcome, limit: float) -> None:
        """Add a round."""
        if not outcome.loads or not outcome.changes:
            self.problem = outcome.problem or f"more than {limit:.0f} s"
        self.load_seconds += [usage.seconds for usage in outcome.loads]
        self.memory_mib += [usage.own_mib + usage.program_mib for usage in outcome.loads]
        if outcome.changes:
            self.change_seconds.append(upper_median([usage.seconds for usage in outcome.changes]))
        for name, rates in (("direct", self.direct), ("vip", self.vip)):
            if name in outcome.connections:
                rates.append(outcome.connections[name])


def subjects_here(dataplane: str = "") -> tuple[str, ...]:
    """The subjects that can be measured on this host: of a dataplane, or all."""
    wanted = [(name, program) for name, of, program in _NEEDS if dataplane in ("", of)]
    here = [name for name, program in wanted if is_installed(program)]
    lacks_variants = not any("iptables" in name for name in here)
    if dataplane != "nftables" and lacks_variants and is_installed("iptables-restore"):
        here.insert(0, "vipd iptables")
    return tuple(here)


def measure_host(
    subjects: Sequence[str], services: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[int, Measurement]]:
    """Measure in turn; after each trial yields the round, from 1, and the subject's results so far."""
    measured = {subject: Measurement(subject) for subject in subjects}
    began = clock()
    for number in range(1, ROUNDS + 1):
        round_began = clock()
        for each in measured.values():
            if each.problem:
                continue
            trial = Trial(each.subject, services, connections=CONNECTIONS, limit=LIMIT_SECONDS)
            try:
                each.add_round(run_trial(trial), LIMIT_SECONDS)
            except TrialError as error:
                each.problem = str(error)
            yield number, each
        now = clock()
        if now - began + (now - round_began) > BUDGET_SECONDS:
            return


def upper_median(values: Sequence[float]) -> float:
    """The median; of two values the larger."""
    return sorted(values)[len(values) // 2]
