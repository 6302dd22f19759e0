"""Passes forwardings to the dataplane and makes it write them.

An unexpected exception while one service is selected or programmed is the fault of that service: it is
quarantined. If the service is unknown, bisection finds it. Its last good rules stay, and all others are
written. It is retried with growing pauses, and at once when it is declared anew.
(The dataplane quarantines what the kernel rejects. It is retried in the same way.)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vipd.dataplane.base import ApplyError, Dataplane
from vipd.dataplane.conntrack.stale import Destination
from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.systemd.fields import Event, fields
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Frontend, Masquerade

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0

COMPILING = "compiling its rules"

Forwardings = Mapping[ForwardingKey, Forwarding | None]
"""Changed forwardings; None: gone."""


@dataclass(slots=True)
class _Entry:
    reason: str
    failures: int
    retry_at: float


class ServiceQuarantine:
    """The services that are held, why, and when each is retried. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._refused: dict[str, _Entry] = {}
        """Services of which the dataplane says that the kernel does not take a part."""
        self._failed_in_step: set[str] = set()

    @property
    def reasons(self) -> Mapping[str, str]:
        """Every held service, with the reason."""
        return {name: entry.reason for name, entry in self._entries.items()}

    def due(self) -> frozenset[str]:
        """The services to try again."""
        now = self._clock() if self._entries else 0.0
        return frozenset(name for name, entry in self._entries.items() if entry.retry_at <= now)

    def pause(self) -> float | None:
        """Seconds until the next one is retried; None while none is held."""
        entries = (*self._entries.values(), *self._refused.values())
        at = min((entry.retry_at for entry in entries), default=None)
        return None if at is None else max(at - self._clock(), 0.0)

    def begin(self) -> None:
        """A step begins: `release_recovered` releases only services that were not held since."""
        self._failed_in_step.clear()

    def add(self, service: str, doing: str, error: Exception) -> None:
        """Hold a service because of an exception; logs its traceback once."""
        reason, before = f"{internal_error(error, doing)}; {PLEASE_REPORT}", self._entries.get(service)
        if before is None or before.reason != reason:
            extra = fields(Event.SERVICE_QUARANTINED, service=service, cause="vipd", reason=reason)
            log.error("%s is quarantined: %s", service, reason, extra=extra, exc_info=error)
        failures = before.failures if before else 0
        if service not in self._failed_in_step:  # once for each step, however often it fails there
            failures += 1
        self._failed_in_step.add(service)
        self._entries[service] = self._entry(reason, failures)

    def refused_due(self) -> frozenset[str]:
        """The services to try again of which the kernel did not take a part."""
        now = self._clock() if self._refused else 0.0
        return frozenset(name for name, entry in self._refused.items() if entry.retry_at <= now)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """The kernel does not take a part of exactly these services, and why: each is retried."""
        due = self.refused_due()
        for name in self._refused.keys() - reasons.keys():
            del self._refused[name]
        for name, reason in reasons.items():
            before = self._refused.get(name)
            if before is None or name in due:
                self._refused[name] = self._entry(reason, before.failures + 1 if before else 1)

    def release_recovered(self, attempted: Collection[str]) -> None:
        """These were tried in this step: those that did not fail again are released."""
        for name in [
            name for name in self._entries if name in attempted and name not in self._failed_in_step
        ]:
            del self._entries[name]

    def _entry(self, reason: str, failures: int) -> _Entry:
        # The exponent is bounded: 2.0**1024 is an OverflowError.
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE_SECONDS)
        return _Entry(reason, failures, self._clock() + pause)


@dataclass(frozen=True, slots=True)
class _Withheld:
    wanted: Forwarding | None
    before: Forwarding | None
    """The dataplane's current forwarding in its place."""


class Programming:
    """Writes through a dataplane. `heartbeat` is called between its long parts."""

    def __init__(
        self, dataplane: Dataplane, quarantine: ServiceQuarantine, heartbeat: Callable[[], None]
    ) -> None:
        self._dataplane, self._quarantine, self._heartbeat = dataplane, quarantine, heartbeat
        self._wanted: dict[ForwardingKey, Forwarding | None] = {}
        """Forwardings passed to the dataplane since the last good write."""
        self._before: dict[ForwardingKey, Forwarding | None] = {}
        """The forwardings that the dataplane had before those."""
        self._withheld: dict[ForwardingKey, _Withheld] = {}
        """Wanted forwardings that the dataplane could not program."""
        self._logged = ""
        """The last exception for which the log reports a search for the service."""

    def withheld(self, service: str) -> Forwardings:
        """The wanted forwardings of a service that were not programmed, and must be passed on again."""
        return {key: each.wanted for key, each in self._withheld.items() if key.service == service}

    def record_changes(
        self, changes: Forwardings, before: Callable[[ForwardingKey], Forwarding | None]
    ) -> None:
        """These are about to be passed on; `before` returns what the dataplane has in place of each."""
        for key, wanted in changes.items():
            withheld = self._withheld.pop(key, None)
            self._before.setdefault(key, withheld.before if withheld else before(key))
            self._wanted[key] = wanted

    def update(self, changes: Forwardings, doing: str = COMPILING) -> None:
        """Pass on what was noted. Those of a service that raises an exception are withheld."""
        with contextlib.suppress(Exception):
            if changes:
                self._dataplane.update(changes)
            return
        for key, wanted in changes.items():
            self._update_one(key, wanted, doing)

    async def write(self) -> bool:
        """Make the kernel equal to what was passed on; returns whether anything was written. Raises
        ApplyError, and any other exception that no service causes."""
        self._dataplane.retry_quarantined(self._quarantine.refused_due())
        try:
            wrote, error = await self._write()
        except ApplyError as failed:
            for changes in (self._wanted, self._before):  # the others are written, and never taken back
                for key in [key for key in changes if key.family not in failed.families]:
                    del changes[key]
            raise
        if error is not None:
            await self._bisect(error)
        self._wanted.clear()
        self._before.clear()
        return wrote

    async def _write(self) -> tuple[bool, Exception | None]:
        """Whether anything was written, and an unexpected exception, if any: it is handled outside of
        `except`, to keep its traceback short. Raises ApplyError."""
        try:
            plan = await self._dataplane.plan()
            self._heartbeat()
            if plan:
                await self._dataplane.apply(plan)
        except ApplyError:
            raise
        except Exception as error:
            return True, error
        return bool(plan), None

    async def _bisect(self, error: Exception) -> None:
        """Find the services that cause an exception, and write all others."""
        if not self._wanted:
            raise error
        names = list(dict.fromkeys(key.service for key in self._wanted))
        if str(error) != self._logged:
            self._logged = str(error)
            log.error("rules cannot be written; looking for the service at fault among %d", len(names))
        try:
            await self._revert(names, error)
            await self._reapply(names, error)
        except BaseException:
            # No service was found, or the search was cancelled: all of it is wanted again.
            self.update(self._wanted)
            raise

    async def _revert(self, names: Iterable[str], error: Exception) -> None:
        """Write the rules as they were before these services changed. Raises the error if that fails too:
        then no service causes it."""
        self._dataplane.invalidate_all()
        self.update(_of(self._before, names), "taking back its rules")
        if (await self._write())[1] is not None:
            raise error

    async def _reapply(self, names: Sequence[str], error: Exception) -> None:
        """Write the changes of these services; hold those with which that fails."""
        self.update(_of(self._wanted, names))
        _, again = await self._write()
        if again is None:
            return
        await self._revert(names, error)
        if len(names) == 1:
            self._withhold(_of(self._wanted, names))
            self._quarantine.add(names[0], "programming its rules", again)
            return
        middle = len(names) // 2
        await self._reapply(names[:middle], error)
        await self._reapply(names[middle:], error)

    def _update_one(self, key: ForwardingKey, wanted: Forwarding | None, doing: str) -> None:
        try:
            self._dataplane.update({key: wanted})
        except Exception as error:
            self._withhold((key,))
            self._quarantine.add(key.service, doing, error)

    def _withhold(self, keys: Iterable[ForwardingKey]) -> None:
        for key in keys:
            self._withheld[key] = _Withheld(self._wanted[key], self._before[key])


def _of(changes: Forwardings, names: Iterable[str]) -> Forwardings:
    wanted = frozenset(names)
    return {key: forwarding for key, forwarding in changes.items() if key.service in wanted}


class FlowResets:
    """Rules that answer clients of removed frontends with a reset, and their state in the dataplane.

    `ended` returns the removed TCP frontends whose clients now get a reset. The dataplane handles each as a
    separate forwarding, so that it is written, repaired, compared and cleaned up like all others.
    """

    def __init__(self, ended: Callable[[], Collection[Destination]]) -> None:
        self._ended = ended
        self._given: dict[ForwardingKey, Forwarding] = {}

    def changes(self) -> Forwardings:
        """The changes for the dataplane; from now on they count as passed on."""
        wanted = {reset_key(place): place for place in self._ended()}
        changes: dict[ForwardingKey, Forwarding | None] = {
            key: reset_forwarding(place) for key, place in wanted.items() if key not in self._given
        }
        changes.update(dict.fromkeys(self._given.keys() - wanted.keys()))
        self._given = {key: self._given.get(key) or reset_forwarding(place) for key, place in wanted.items()}
        return changes


def reset_key(place: Destination) -> ForwardingKey:
    """The key of a removed frontend. No service can have it: a name contains no blank."""
    frontend = Frontend(place.address, place.port, place.protocol)
    return ForwardingKey(f"removed {frontend}", "", place.protocol, place.family)


def reset_forwarding(place: Destination) -> Forwarding:
    """The forwarding that sends clients of a removed frontend a reset."""
    return Forwarding(
        reset_key(place),
        addresses=(place.address,) if place.address else (),
        port=place.port,
        endpoints=(),
        masquerade=Masquerade.HAIRPIN,
        answers_ping=False,
        has_endpoints=False,
        node_port=None if place.address else place.port,
        frontend_removed=True,
    )
