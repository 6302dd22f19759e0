"""Hands forwardings to the dataplane and has it write them.

An exception that nobody expected, while one service is selected or programmed, is the fault of that service:
it is quarantined. Where it is not known which service it is, that is found by bisecting. Its last good rules
stay, and all others are written. It is tried again with growing pauses, and at once when it is declared anew.
(What the kernel does not take is quarantined by the dataplane.)
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
"""New forms of forwardings; None: it is gone."""


@dataclass(slots=True)
class _Entry:
    reason: str
    failures: int
    retry_at: float


class ServiceQuarantine:
    """Which services are held, why, and when each is to be tried again. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._held_now: set[str] = set()

    @property
    def reasons(self) -> Mapping[str, str]:
        """Every service that is held, and why."""
        return {name: entry.reason for name, entry in self._entries.items()}

    def due(self) -> frozenset[str]:
        """The services to try again."""
        now = self._clock() if self._entries else 0.0
        return frozenset(name for name, entry in self._entries.items() if entry.retry_at <= now)

    def pause(self) -> float | None:
        """Seconds until the next one is to be tried again; None while none is held."""
        at = min((entry.retry_at for entry in self._entries.values()), default=None)
        return None if at is None else max(at - self._clock(), 0.0)

    def begin(self) -> None:
        """A step begins: `settle` asks which services were held since."""
        self._held_now.clear()

    def hold(self, service: str, doing: str, error: Exception) -> None:
        """Hold a service because of an exception; its traceback is logged once."""
        reason, before = f"{internal_error(error, doing)}; {PLEASE_REPORT}", self._entries.get(service)
        if before is None or before.reason != reason:
            extra = fields(Event.SERVICE_QUARANTINED, service=service, cause="vipd", reason=reason)
            log.error("%s is quarantined: %s", service, reason, extra=extra, exc_info=error)
        failures = before.failures if before else 0
        if service not in self._held_now:  # once a step, however often it fails there
            failures += 1
        self._held_now.add(service)
        # The exponent is bounded: 2.0**1024 is an OverflowError.
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE_SECONDS)
        self._entries[service] = _Entry(reason, failures, self._clock() + pause)

    def settle(self, attempted: Collection[str]) -> None:
        """These were tried in this step: those that did not fail again are held no more."""
        for name in [name for name in self._entries if name in attempted and name not in self._held_now]:
            del self._entries[name]


@dataclass(frozen=True, slots=True)
class _Withheld:
    wanted: Forwarding | None
    before: Forwarding | None
    """What the dataplane has in its place."""


class Programming:
    """Writes through a dataplane. `heartbeat` is called between its long parts."""

    def __init__(
        self, dataplane: Dataplane, quarantine: ServiceQuarantine, heartbeat: Callable[[], None]
    ) -> None:
        self._dataplane, self._quarantine, self._heartbeat = dataplane, quarantine, heartbeat
        self._wanted: dict[ForwardingKey, Forwarding | None] = {}
        """What was handed over since the last good write."""
        self._before: dict[ForwardingKey, Forwarding | None] = {}
        """What the dataplane had in place of that."""
        self._withheld: dict[ForwardingKey, _Withheld] = {}
        """What the dataplane could not do, though it is wanted."""
        self._logged = ""
        """The last exception of which the log says that a service is looked for."""

    def withheld(self, service: str) -> Forwardings:
        """What is wanted of a service and was not programmed: it is to be handed over again."""
        return {key: each.wanted for key, each in self._withheld.items() if key.service == service}

    def note(self, changes: Forwardings, before: Callable[[ForwardingKey], Forwarding | None]) -> None:
        """These are about to be handed over; `before` returns what the dataplane has in place of each."""
        for key, wanted in changes.items():
            withheld = self._withheld.pop(key, None)
            self._before.setdefault(key, withheld.before if withheld else before(key))
            self._wanted[key] = wanted

    def update(self, changes: Forwardings, doing: str = COMPILING) -> None:
        """Hand over what was noted. Those of which one raises an exception are withheld."""
        with contextlib.suppress(Exception):
            if changes:
                self._dataplane.update(changes)
            return
        for key, wanted in changes.items():
            self._update_one(key, wanted, doing)

    async def write(self) -> bool:
        """Make the kernel equal to what was handed over; whether anything was written. Raises ApplyError, and
        any other exception that no service is to blame for."""
        wrote, error = await self._write()
        if error is not None:
            await self._bisect(error)
        self._wanted.clear()
        self._before.clear()
        return wrote

    async def _write(self) -> tuple[bool, Exception | None]:
        """Whether anything was written, and the exception if one came that nobody expected: what is done
        about it is no part of its traceback. Raises ApplyError."""
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
        """Find the services that an exception comes from, and write all others."""
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
            # No service was found, or the search was ended: what is wanted is wanted as before.
            self.update(self._wanted)
            raise

    async def _revert(self, names: Iterable[str], error: Exception) -> None:
        """Write the rules as they were before these services changed. Raises the error when that fails too:
        then no service is to blame."""
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
            self._quarantine.hold(names[0], "programming its rules", again)
            return
        middle = len(names) // 2
        await self._reapply(names[:middle], error)
        await self._reapply(names[middle:], error)

    def _update_one(self, key: ForwardingKey, wanted: Forwarding | None, doing: str) -> None:
        try:
            self._dataplane.update({key: wanted})
        except Exception as error:
            self._withhold((key,))
            self._quarantine.hold(key.service, doing, error)

    def _withhold(self, keys: Iterable[ForwardingKey]) -> None:
        for key in keys:
            self._withheld[key] = _Withheld(self._wanted[key], self._before[key])


def _of(changes: Forwardings, names: Iterable[str]) -> Forwardings:
    wanted = frozenset(names)
    return {key: forwarding for key, forwarding in changes.items() if key.service in wanted}


class FlowResets:
    """Rules that answer clients of removed frontends with a reset, and what the dataplane has of them.

    `ended` returns the TCP frontends that are gone and whose clients get a reset now. The dataplane takes
    each as a forwarding of its own, so that it is written, repaired, compared and cleaned up as all others.
    """

    def __init__(self, ended: Callable[[], Collection[Destination]]) -> None:
        self._ended = ended
        self._given: dict[ForwardingKey, Forwarding] = {}

    def changes(self) -> Forwardings:
        """What the dataplane is to be given now; it counts as given."""
        wanted = {key_of(place): place for place in self._ended()}
        changes: dict[ForwardingKey, Forwarding | None] = {
            key: reset_forwarding(place) for key, place in wanted.items() if key not in self._given
        }
        changes.update(dict.fromkeys(self._given.keys() - wanted.keys()))
        self._given = {key: self._given.get(key) or reset_forwarding(place) for key, place in wanted.items()}
        return changes


def key_of(place: Destination) -> ForwardingKey:
    """The key of a removed frontend. No service can have it: a name has no blank."""
    frontend = Frontend(place.address, place.port, place.protocol)
    return ForwardingKey(f"removed {frontend}", "", place.protocol, place.family)


def reset_forwarding(place: Destination) -> Forwarding:
    """What gives the clients of a removed frontend a reset."""
    return Forwarding(
        key_of(place),
        addresses=(place.address,) if place.address else (),
        port=place.port,
        endpoints=(),
        masquerade=Masquerade.HAIRPIN,
        answers_ping=False,
        served=False,
        node_port=None if place.address else place.port,
        ended=True,
    )
