"""The interface of health checks: follows targets, keeps their health, and reports changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import random as any_part

from vipd.health.lag import LoopLag
from vipd.health.probes.base import Attempt, CoroutineProber, ProbeCallback, Prober, internal_error_result
from vipd.health.probes.dns import probe_dns
from vipd.health.probes.exec import PROGRAMS_AT_ONCE, ExecProber
from vipd.health.probes.http import probe_http
from vipd.health.probes.remote import AT_ONCE, RemoteProber
from vipd.health.probes.tcp import TcpProber
from vipd.health.probes.udp import probe_udp
from vipd.health.record_cache import CHECKED_NOW, RecordCache, SavedRecord
from vipd.health.result import ProbeResult, ReportedWeight
from vipd.health.saved_verdicts import SavedVerdicts
from vipd.health.scheduler import Scheduler
from vipd.health.state import HealthRecord, HealthState, apply_result, reset_streak
from vipd.health.verdict_log import HealthLog
from vipd.host.accounts import CheckUsers
from vipd.host.containment import log_once
from vipd.host.descriptors import raise_limit
from vipd.host.observer import Observer
from vipd.host.worker import Worker
from vipd.model.check_target import CheckTarget
from vipd.model.durations import CHECK_BOUNDS, DurationHistogram
from vipd.model.fair_queue import FairQueue
from vipd.sources.cache import Cache

UPKEEP_SECONDS = 5.0
"""Interval of what is done from time to time."""

KINDS = ("tcp", "http", "https", "udp", "dns", "exec")
"""Types of checks."""

_AS_BEFORE = "as before: "
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Who probes."""

    users: CheckUsers = field(default_factory=CheckUsers)
    """The accounts that may run programs of checks."""
    worker: Worker | None = None
    """The process that reads answers over HTTP, TLS and DNS; None: this one does."""


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """Current state of a target."""

    state: HealthState
    counts_healthy: bool
    """Whether the target counts as healthy; while its state is unknown, `start` of its check says so."""
    reason: str
    """One line: the last result, and why it is held down or cannot be probed."""
    since: datetime
    """When it entered its state, UTC."""
    changes: int
    """How often it became unhealthy or healthy again."""
    weight: ReportedWeight | None
    """The weight that its last good answer reported. It applies only if the service accepts it."""
    serves_since: float | None
    """Start of a slow start by `HealthChecker.clock`, for `weights.weights`; None: no slow start."""


class HealthChecker:
    """Knows the targets and their health. Sends probes while `run` runs.

    The `cache` keeps the states over a restart of vipd. `clock` is the event loop's clock. `wall` returns
    seconds since 1970, `random` returns numbers from 0 up to 1. Soon after states or reported weights have
    changed, the checker calls `health_changed` of `observer`, with many targets at once.
    """

    def __init__(
        self,
        cache: Cache | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        random: Callable[[], float] = any_part,
        options: ProbeOptions = ProbeOptions(),
        observer: Observer | None = None,
    ) -> None:
        self._options, self._observer = options, observer or Observer()
        self.clock, self._wall, self._random = clock, wall, random
        self._saved = SavedVerdicts(cache, clock, wall, self._verdicts)
        self._memory = RecordCache()
        for known in self._saved.load():
            self._memory.add(known)
        self._followed: dict[str, frozenset[CheckTarget]] = {}
        self._users: dict[CheckTarget, set[str]] = {}
        """The services that use each target."""
        self._authors: dict[str, str] = {}
        """The author of each followed service."""
        self._records: dict[CheckTarget, HealthRecord] = {}
        self._unscheduled: set[CheckTarget] = set()
        self._changed: set[CheckTarget] = set()
        self._scheduler: Scheduler | None = None
        self._log = HealthLog(self._services_of)
        self.durations = {kind: DurationHistogram(CHECK_BOUNDS) for kind in KINDS}
        """Durations of probes by type of check, without probes that vipd could not send."""

    def follow(self, service: str, targets: Collection[CheckTarget], author: str = "") -> None:
        """Set the targets of a service, in whose author's share they are checked; none when the service is
        gone.

        A target that stays keeps its state. A target that replaces another of this service at the same
        address inherits the state, but not the count of results in a row. Call this only in the event loop's
        thread.
        """
        before, wanted = self._followed.pop(service, frozenset()), frozenset(targets)
        self._authors.pop(service, None)
        if wanted:
            self._followed[service], self._authors[service] = wanted, author
        leaving, new = before - wanted, wanted - before
        left_at: dict[str, list[CheckTarget]] = {}
        for target in leaving if new else ():
            left_at.setdefault(target.address, []).append(target)
        for target in new:
            self._users.setdefault(target, set()).add(service)
            if target not in self._records:
                replaced = _replaced(target, left_at.get(target.address, ()))
                inherited = self._records.get(replaced) if replaced else None
                known = inherited or self._memory.take(target, service, wanted, self.clock())
                self._begin(target, known)
            else:
                self._save(target)  # which has another service
        for target in leaving:
            self._users[target].discard(service)
            if not self._users[target]:
                self._stop_following(target, service)
            else:
                self._save(target)

    def status(self, target: CheckTarget) -> HealthStatus:
        """The health of a target; unknown for a target of no service."""
        now = self.clock()
        record = self._records.get(target) or HealthRecord(now)
        since = datetime.fromtimestamp(self._wall() - (now - record.since), UTC)
        fit = record.counts_healthy(target.timing.start)
        reason = record.reason(now)
        return HealthStatus(
            record.state, fit, reason, since, record.changes, record.weight, record.serves_since
        )

    def statuses(self) -> Iterator[tuple[CheckTarget, HealthStatus]]:
        """All targets with their health."""
        return ((target, self.status(target)) for target in tuple(self._records))

    def warnings(self) -> tuple[str, ...]:
        """Reasons why vipd cannot probe. As long as there are any, the affected states stay as they are."""
        troubled = {t: r.probe_error for t, r in self._records.items() if r.probe_error}
        told = [f"{target} {trouble}" for target, trouble in list(troubled.items())[:_MAX_NAMED]]
        more = len(troubled) - len(told)
        if more > 0:
            told.append(f"{more} more backends cannot be asked")
        told += self._scheduler.warnings() if self._scheduler else []
        return tuple(told)

    async def run(self) -> None:
        """Probe, for ever; on cancellation all probes end, and the verdicts are saved."""
        loop = asyncio.get_running_loop()
        lag = LoopLag(loop)
        with contextlib.ExitStack() as stack:
            probers = _probers(loop, lag, stack, self._options)

            def ask(target: CheckTarget, done: ProbeCallback) -> Attempt:
                if self._options.worker is None or target.kind not in AT_ONCE:
                    lag.start()
                return probers[target.kind].start(target, done)

            stack.callback(lag.stop)
            self._scheduler = Scheduler(loop, ask, self._on_result, self._random, _slots(), self._authors_of)
            stack.callback(self._stop)
            self._schedule_all()
            while True:
                await asyncio.sleep(UPKEEP_SECONDS)
                if not self._records:
                    lag.stop()  # ten wakeups a second
                self._saved.remove(self._memory.expire(self.clock()))
                self._saved.stamp_if_due()
                self._log.write((), self.clock())
                self._log.log_late(self._scheduler.warnings(), self.clock())

    def _stop(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()
            self._scheduler = None
        self._unscheduled = set(self._records)
        self._saved.put(self._verdicts())

    def _begin(self, target: CheckTarget, known: HealthRecord | None) -> None:
        """Probe a new target, starting from its known state."""
        record = HealthRecord(self.clock())
        if known is not None:
            record = reset_streak(known, f"{_AS_BEFORE}{known.last_reason.removeprefix(_AS_BEFORE)}")
        self._records[target] = record
        # A crash after each start must not let the verdict expire, nor lose its owner.
        self._save(target)
        self._memory.drop(SavedRecord.of(target, (), CHECKED_NOW, record).key)
        self._schedule(target)

    def _stop_following(self, target: CheckTarget, service: str) -> None:
        del self._users[target]
        record = self._records.pop(target)
        if record.state is not HealthState.UNKNOWN:
            known = SavedRecord.of(target, (service,), self.clock(), record)
            self._memory.add(known)
            self._saved.put([known])
        self._unscheduled.discard(target)
        self._changed.discard(target)
        if self._scheduler is not None:
            self._scheduler.remove(target)

    def _schedule(self, target: CheckTarget) -> None:
        """Schedule soon: targets that are added one by one are spread together."""
        if self._scheduler is not None and not self._unscheduled:
            asyncio.get_running_loop().call_soon(self._schedule_all)
        self._unscheduled.add(target)

    def _schedule_all(self) -> None:
        if self._scheduler is not None:
            new, self._unscheduled = self._unscheduled, set()
            self._scheduler.add(new)

    def _on_result(self, target: CheckTarget, result: ProbeResult) -> None:
        if result.good is not None:
            self.durations[target.kind].add(result.seconds)
        before = self._records[target]
        try:
            after = apply_result(before, result, target.timing, self.clock())
        except Exception as error:
            trouble = internal_error_result(target, error).reason
            after = replace(before, probe_error=trouble)
        self._records[target] = after
        if (before.state, before.weight) != (after.state, after.weight):
            self._mark_changed(target)
            self._save(target)

    def _mark_changed(self, target: CheckTarget) -> None:
        """It is reported soon that a target's verdict is another one."""
        if self._scheduler is None:
            return
        if not self._changed:
            asyncio.get_running_loop().call_soon(self._notify)
        self._changed.add(target)

    def _notify(self) -> None:
        changed, self._changed = frozenset(self._changed), set()
        if not changed:
            return
        now = self.clock()
        try:
            self._log.write(((target, self._records[target]) for target in changed), now)
        except Exception as error:
            log_once(error, "logging verdicts")
        self._observer.health_changed(changed)

    def _authors_of(self, target: CheckTarget) -> set[str]:
        return {self._authors[service] for service in self._users.get(target, ())}

    def _services_of(self, target: CheckTarget) -> list[str]:
        return list(self._users.get(target, ()))

    def _save(self, target: CheckTarget) -> None:
        """Keep the verdict on a target, if there is one."""
        record = self._records[target]
        if record.state is not HealthState.UNKNOWN:
            self._saved.put([SavedRecord.of(target, self._users[target], CHECKED_NOW, record)])

    def _verdicts(self) -> list[SavedRecord]:
        """All verdicts."""
        live, users = self._records.copy(), self._users
        return [
            *self._memory.records(),
            *(
                SavedRecord.of(target, tuple(users.get(target, ())), CHECKED_NOW, record)
                for target, record in live.items()
                if record.state is not HealthState.UNKNOWN
            ),
        ]


def _replaced(target: CheckTarget, left: Sequence[CheckTarget]) -> CheckTarget | None:
    """The removed target at the same address, among those of its service, whose verdict a target inherits."""
    heir_of = [old for old in left if old.port == target.port] or left
    return heir_of[0] if len(heir_of) == 1 else None


def _slots() -> Mapping[str, FairQueue]:
    """Programs have places of their own: they take threads and processes, and no network check waits for
    them. So have checks whose answers take memory, which the process that reads them has little of."""
    hint = "give those that hang a shorter timeout, or all of them longer intervals"
    most = raise_limit().probes
    return {
        "": FairQueue("checks", most),
        **{kind: FairQueue(f"{kind} checks", min(limit, most), hint) for kind, limit in AT_ONCE.items()},
        "exec": FairQueue("exec checks", PROGRAMS_AT_ONCE, hint),
    }


def _probers(
    loop: asyncio.AbstractEventLoop, lag: LoopLag, stack: contextlib.ExitStack, options: ProbeOptions
) -> Mapping[str, Prober]:
    """The probers by type of check; the stack closes them."""
    own: dict[str, Prober] = {
        "tcp": stack.enter_context(TcpProber(loop, lag)),
        "udp": CoroutineProber(probe_udp, lag),
        "exec": stack.enter_context(ExecProber(loop, options.users)),
    }
    if options.worker is not None:
        return {**own, **dict.fromkeys(AT_ONCE, RemoteProber(options.worker))}
    http = CoroutineProber(probe_http, lag)
    return {**own, "http": http, "https": http, "dns": CoroutineProber(probe_dns, lag)}
