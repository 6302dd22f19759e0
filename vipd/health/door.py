"""Who is fit to serve, for the rest of vipd: say what to follow, look up verdicts, hear when they change."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import random as any_part

from vipd.accounts import CheckUsers
from vipd.descriptors import make_room
from vipd.durations import CHECK_BOUNDS, Durations
from vipd.health.faults import log_once
from vipd.health.lag import LoopLag
from vipd.health.memory import Memory, Remembered, SavedVerdicts, place_of
from vipd.health.probes.base import Attempt, CoroutineProber, Done, Prober, unexpected
from vipd.health.probes.dns import ask_dns
from vipd.health.probes.exec import ExecProber
from vipd.health.probes.http import ask_http
from vipd.health.probes.tcp import TcpProber
from vipd.health.probes.udp import ask_udp
from vipd.health.result import Result, SaidWeight
from vipd.health.scheduler import Scheduler
from vipd.health.state import Record, State, begin_anew, observe
from vipd.health.targets import Target
from vipd.health.verdict_log import VerdictLog

SAVE_SECONDS = 5.0
"""Changed verdicts are saved so soon."""

KINDS = ("tcp", "http", "https", "udp", "dns", "exec")
"""Types of checks."""

LATE_SECONDS = 1.0
_MOST_NAMED = 3
_MOST_SERVICES = 100


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a target now."""

    state: State
    fit: bool
    """Whether it counts as healthy: until the first verdict its check says so."""
    reason: str
    """One line: the last answer, and why it is held down or cannot be asked."""
    since: datetime
    """When it got its state, UTC."""
    changes: int
    """How often it became unhealthy or healthy again."""
    weight: SaidWeight | None
    """What its last good answer said; count it only where the service listens."""
    serves_since: float | None
    """By `Health.clock`: begin of a slow start, for `weights.weights`. None: there is none."""


class Health:
    """Follows targets and knows their verdicts; asks while `run` runs.

    `file` keeps the verdicts over a restart of vipd. `clock` is the event loop's. `wall` gives seconds since
    1970, `random` numbers from 0 up to 1. `users` may run programs of checks.
    """

    def __init__(
        self,
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        random: Callable[[], float] = any_part,
        users: CheckUsers = CheckUsers(),  # noqa: B008 (a value)
    ) -> None:
        self._users_of_checks = users
        self.clock, self._wall, self._random = clock, wall, random
        self._saved = SavedVerdicts(file, clock, wall)
        self._memory = Memory()
        for place, at, record in self._saved.load():
            self._memory.learn(place, at, record)
        self._followed: dict[str, frozenset[Target]] = {}
        self._users: dict[Target, int] = {}
        self._records: dict[Target, Record] = {}
        self._unscheduled: set[Target] = set()
        self._changed: set[Target] = set()
        self._scheduler: Scheduler | None = None
        self._log = VerdictLog(self._services_of)
        self.durations = {kind: Durations(CHECK_BOUNDS) for kind in KINDS}
        """How long checks took, by their type. One that vipd could not make is not among them."""
        self.listeners: list[Callable[[frozenset[Target]], None]] = []
        """Called soon after verdicts or said weights changed, with those targets, many at once."""

    def follow(self, service: str, targets: Collection[Target]) -> None:
        """The targets that a service has from now on; none when it is gone.

        What stays keeps its state. A target that replaces another of this service at the same address keeps
        that one's verdict, but its answers are counted anew. Must be called from the event loop's thread.
        """
        before, wanted = self._followed.pop(service, frozenset()), frozenset(targets)
        if wanted:
            self._followed[service] = wanted
        leaving = before - wanted
        for target in wanted - before:
            self._users[target] = self._users.get(target, 0) + 1
            if target not in self._records:
                self._records[target] = self._first_record(target, leaving)
                self._schedule(target)
        for target in leaving:
            self._users[target] -= 1
            if not self._users[target]:
                self._leave(target)

    def verdict(self, target: Target) -> Verdict:
        """What is known of a target; of one that is not followed, nothing."""
        now = self.clock()
        record = self._records.get(target) or Record(now)
        since = datetime.fromtimestamp(self._wall() - (now - record.since), UTC)
        fit = record.fit(target.timing.start)
        reason = record.reason(now)
        return Verdict(record.state, fit, reason, since, record.changes, record.weight, record.serves_since)

    def verdicts(self) -> Iterator[tuple[Target, Verdict]]:
        """All that are followed."""
        return ((target, self.verdict(target)) for target in tuple(self._records))

    def warnings(self) -> tuple[str, ...]:
        """What keeps vipd from asking; verdicts stay as they are meanwhile."""
        troubled = {t: r.trouble for t, r in self._records.items() if r.trouble}
        told = [f"{target} {trouble}" for target, trouble in list(troubled.items())[:_MOST_NAMED]]
        more = len(troubled) - len(told)
        if more > 0:
            told.append(f"{more} more backends cannot be asked")
        scheduler = self._scheduler
        if scheduler is not None and scheduler.crowded and scheduler.late > LATE_SECONDS:
            what = f"{scheduler.running} checks at once are all there is room for, others run"
            hint = "raise LimitNOFILE of the unit, or use longer intervals"
            told.append(f"{what} {scheduler.late:.0f} s late; hint: {hint}")
        if self._saved.fault:
            told.append(f"verdicts cannot be saved: {self._saved.fault}")
        return tuple(told)

    async def run(self) -> None:
        """Ask, for ever; when this is cancelled all probes end, and the verdicts are saved."""
        loop = asyncio.get_running_loop()
        lag = LoopLag(loop)
        with contextlib.ExitStack() as stack:
            probers = _probers(loop, lag, stack, self._users_of_checks)

            def ask(target: Target, done: Done) -> Attempt:
                return probers[target.kind].start(target, done)

            lag.start()
            stack.callback(lag.stop)
            self._scheduler = Scheduler(loop, ask, self._answered, self._random, make_room().probes)
            stack.callback(self._stop)
            self._schedule_all()
            while True:
                await asyncio.sleep(SAVE_SECONDS)
                self._memory.tidy(self.clock())
                self._log.tell((), self.clock())
                if self._saved.due:
                    await asyncio.to_thread(self._saved.save, self._known())

    def _stop(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()
            self._scheduler = None
        self._unscheduled = set(self._records)
        self._saved.save(self._known())

    def _first_record(self, target: Target, leaving: Collection[Target]) -> Record:
        """What a new target begins with: what another check found there, or what was known before."""
        here = [old for old in leaving if old.address == target.address and old in self._records]
        same_port = [old for old in here if old.port == target.port]
        heir_of = same_port or here
        inherited = self._records[heir_of[0]] if len(heir_of) == 1 else None
        known = inherited or self._memory.recall(target, self.clock())
        if known is None:
            return Record(self.clock())
        return begin_anew(known, f"as before: {known.last.removeprefix('as before: ')}")

    def _leave(self, target: Target) -> None:
        del self._users[target]
        self._memory.remember(target, self._records.pop(target), self.clock())
        self._unscheduled.discard(target)
        self._changed.discard(target)
        if self._scheduler is not None:
            self._scheduler.remove(target)

    def _schedule(self, target: Target) -> None:
        """Many targets that come one by one are spread together."""
        if self._scheduler is not None and not self._unscheduled:
            asyncio.get_running_loop().call_soon(self._schedule_all)
        self._unscheduled.add(target)

    def _schedule_all(self) -> None:
        if self._scheduler is not None:
            new, self._unscheduled = self._unscheduled, set()
            self._scheduler.add(new)

    def _answered(self, target: Target, result: Result) -> None:
        if result.good is not None:
            self.durations[target.kind].add(result.seconds)
        before = self._records[target]
        try:
            after = observe(before, result, target.timing, self.clock())
        except Exception as error:
            trouble = unexpected(target, error).reason
            after = replace(before, trouble=trouble)
        self._records[target] = after
        if (before.state, before.weight) != (after.state, after.weight):
            if not self._changed:
                asyncio.get_running_loop().call_soon(self._tell)
            self._changed.add(target)
            self._saved.stale = True

    def _tell(self) -> None:
        changed, self._changed = frozenset(self._changed), set()
        if not changed:
            return
        now = self.clock()
        try:
            self._log.tell(((target, self._records[target]) for target in changed), now)
        except Exception as error:
            log_once(error, "logging verdicts")
        for listener in self.listeners:
            try:
                listener(changed)
            except Exception as error:
                log_once(error, "telling of verdicts")

    def _services_of(self, target: Target) -> list[str]:
        return [name for name, targets in self._followed.items() if target in targets]

    def _known(self) -> list[Remembered]:
        """All that is worth remembering, as of now."""
        now = self.clock()
        live = {place_of(t): (now, r) for t, r in self._records.items() if r.state is not State.UNKNOWN}
        left = {place: (at, record) for place, at, record in self._memory.known()}
        return [(place, at, record) for place, (at, record) in {**left, **live}.items()]


def _probers(
    loop: asyncio.AbstractEventLoop, lag: LoopLag, stack: contextlib.ExitStack, users: CheckUsers
) -> Mapping[str, Prober]:
    """What asks, by type of check; ended with the stack."""
    http = CoroutineProber(ask_http, lag)
    return {
        "tcp": stack.enter_context(TcpProber(loop, lag)),
        "http": http,
        "https": http,
        "udp": CoroutineProber(ask_udp, lag),
        "dns": CoroutineProber(ask_dns, lag),
        "exec": stack.enter_context(ExecProber(loop, users)),
    }
