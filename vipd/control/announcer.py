"""Keeps what this host announces equal to what `announcements.decide` says.

Beside the path of a change: after a step a loop takes the forwardings that ask for one, and another loop
decides and writes. A host without such a service does nothing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple, Protocol, runtime_checkable

from vipd.control.announcements import (
    AnnouncedAddress,
    AnnouncedKey,
    Announcements,
    Damping,
    LanAddress,
    Moment,
    OtherHosts,
    Reason,
    adopted,
    all_served,
    decide,
    describe,
)
from vipd.control.progress import Progress
from vipd.host.announced_routes import RouteEvents
from vipd.host.observer import Observer
from vipd.host.settings.settings import Settings
from vipd.host.systemd.fields import Event, fields
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.maintenance import Maintenance
from vipd.model.service import AnnounceMethod, Family, family_of

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""Longest time until a change by others is undone if the kernel does not report it."""
WATCH_SECONDS = 0.2
"""Least time between two readings because routes have changed; a router's may change at any moment."""
OTHERS_SECONDS = 5.0
"""Time between two readings of what other hosts announce; only while that decides about an address."""
LAST_LOOK_SECONDS = 0.5
"""Before an address is withdrawn, what other hosts announce is read again."""
OTHERS_TIMEOUT_SECONDS = 3.0
FIRST_ANSWER_SECONDS = 1.0
"""How long an address without a backend stays at least, so that what other hosts announce can be known: of
use where `announce_withdraw_after` is shorter. No other decision waits for it."""
MAX_LOGGED = 20
"""Addresses that are logged one by one; more together."""


class AnnounceDriver(Protocol):
    """Announces addresses by one method."""

    async def read(self) -> frozenset[str]:
        """The addresses that an earlier process announces. Raises OSError."""

    async def ensure(self, addresses: frozenset[str]) -> None:
        """Announce these and no others, also after a change by another program. Raises OSError."""


@runtime_checkable
class LanDriver(Protocol):
    """Announces addresses on LANs, one host at a time."""

    def addresses(self) -> Mapping[str, LanAddress]:
        """Who answers for each address."""


class Reconciled(NamedTuple):
    """What the reconciler has written."""

    progress: Progress
    asking: Callable[[], Mapping[ForwardingKey, Forwarding]]
    """Returns the forwardings that ask for an announcement."""


Others = Callable[[], Awaitable[OtherHosts]]


class Announcer(Observer):
    """Decides and writes. `state` is what views show."""

    def __init__(
        self,
        settings: Settings,
        drivers: Mapping[AnnounceMethod, AnnounceDriver],
        reconciled: Reconciled,
        maintenance: Callable[[], Maintenance | None],
        others: Others | None = None,
    ) -> None:
        """`others` reads what other hosts announce; None: nobody knows them."""
        self._drivers, self._maintenance, self._others = drivers, maintenance, others
        self._progress, self._asking = reconciled
        self._keeps_last = settings.announce_last == "keep"
        self._damping = Damping(settings.announce_withdraw_after, settings.announce_return_after)
        self.state = Announcements()
        self.faults: dict[AnnounceMethod, str] = {}
        """Why the addresses of a method are not announced as decided."""
        self.others_fault = ""
        """Why nobody knows what other hosts announce."""
        self._forwardings: dict[ForwardingKey, Forwarding] = {}
        """Those in the kernel that ask for an announcement."""
        self._adopted = False
        self._elsewhere: OtherHosts | None = None
        self._answered = False
        """Etcd has answered since an address came into doubt, or has failed to."""
        self._doubtful, self._settled = asyncio.Event(), asyncio.Event()
        """What other hosts announce decides about an address; or does not. One of them is set."""
        self._settled.set()
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._asked = asyncio.Event()
        """Set once any service has asked for an announcement."""

    @property
    def maintenance(self) -> Maintenance | None:
        """The maintenance of this host."""
        return self._maintenance()

    @property
    def lans(self) -> Mapping[str, LanAddress]:
        """Who answers for the addresses of LANs; empty if no driver knows."""
        driver = self._drivers.get(AnnounceMethod.L2)
        return driver.addresses() if isinstance(driver, LanDriver) else {}

    @property
    def active(self) -> bool:
        """Whether any service asks for an announcement, or anything is announced."""
        return bool(self._forwardings or self.state.addresses)

    async def follow(self, stepped: asyncio.Event) -> None:
        """Take what each step has written, for ever. `stepped`: set after each."""
        while True:
            await stepped.wait()
            stepped.clear()
            self.take()

    def take(self) -> None:
        """The kernel has the forwardings of the last step, but not those of address families for which it
        failed, and none of a service that is quarantined."""
        progress = self._progress
        current = {family for family in Family if progress.is_current(family)}
        if not current:
            return
        found = {
            key: forwarding if key.service not in progress.quarantined else self._forwardings.get(key)
            for key, forwarding in self._asking().items()
            if key.family in current
        }
        found.update((key, f) for key, f in self._forwardings.items() if key.family not in current)
        before, self._forwardings = (
            self._forwardings,
            {key: f for key, f in found.items() if f is not None and self._by(f) in self._drivers},
        )
        if self._forwardings:
            self._asked.set()
        if not self._adopted or before != self._forwardings:
            self._changed.set()

    def maintenance_changed(self) -> None:
        """Decide again."""
        self._changed.set()

    async def watch(self) -> None:
        """Undo what other programs change, as soon as the kernel reports it; for ever. Raises OSError."""
        events = RouteEvents()
        try:
            while True:
                await self._asked.wait()
                await events.wait()
                self._changed.set()
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            events.close()

    async def follow_others(self) -> None:
        """Read what other hosts announce while that decides about an address, for ever. Decisions do not wait
        for it: they take what is known at their time."""
        while True:
            await self._doubtful.wait()
            found = await self._read_others()
            if self._doubtful.is_set():
                self._elsewhere, self._answered = found, True
                self._changed.set()
            # Hosts that fail together still report that they serve: look again just before it decides.
            due = self.state.due or float("inf")
            left = due - asyncio.get_running_loop().time() - LAST_LOOK_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left if 0 < left < OTHERS_SECONDS else OTHERS_SECONDS):
                    await self._settled.wait()

    async def run(self) -> None:
        """Decide and write, for ever. Raises OSError when what is announced cannot be read or changed; what
        can be is right then."""
        while True:
            pause = POLL_SECONDS
            if self.state.due is not None:
                pause = max(0.01, min(pause, self.state.due - asyncio.get_running_loop().time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            self._changed.clear()
            await self.update()

    async def update(self) -> None:
        """Decide and write once. Before the first step has succeeded nothing changes, unless this host is in
        maintenance: what an earlier process announces stays. Raises OSError."""
        async with self._writing:
            if not self._progress.written:
                if self._maintenance() is not None:
                    await self.withdraw()
            elif self._forwardings or self._may_be_announced():
                await self._update()

    async def _update(self) -> None:
        if not self._adopted:
            self.state, self._adopted = adopted(await self._announced_before(), _now()), True
        before, damping = self.state, self._damping
        self._note_doubt()
        if self._doubtful.is_set() and not self._answered:
            damping = replace(damping, withdraw_after=max(damping.withdraw_after, FIRST_ANSWER_SECONDS))
        self.state = decide(
            self._forwardings.values(),
            before,
            _now(),
            damping=damping,
            maintenance=self._maintenance(),
            others=self._elsewhere,
        )
        if self._maintenance() is None and not self._progress.applied:
            # What an earlier process announces stays until its family's rules have been written once.
            unwritten = frozenset(Family) - self._progress.begun
            kept = {k: a for k, a in before.addresses.items() if family_of(k.address) in unwritten}
            self.state = replace(self.state, addresses={**self.state.addresses, **kept})
        log_changes(before.addresses, self.state.addresses, self._maintenance())
        await self._write()

    async def announced_nowhere_else(self, keys: Collection[AnnouncedKey]) -> list[str]:
        """Those of these addresses that no other host announces; none if nobody knows the others."""
        others = await self._read_others() if self._others is not None and keys else None
        if others is None:
            return []
        return [key.address for key in sorted(keys) if key not in others.served and key not in others.kept]

    async def withdraw(self) -> None:
        """Announce nothing any more, as the daemon ends. Raises OSError."""
        for driver in self._drivers.values():
            await driver.ensure(frozenset())

    @staticmethod
    def _by(forwarding: Forwarding) -> AnnounceMethod | None:
        return forwarding.announcement.by if forwarding.announcement else None

    def _may_be_announced(self) -> bool:
        """Whether anything may be announced though no service asks for it now."""
        return not self._adopted or bool(self.state.addresses) or bool(self.faults)

    async def _announced_before(self) -> list[AnnouncedKey]:
        return [
            AnnouncedKey(address, method)
            for method, driver in self._drivers.items()
            for address in sorted(await driver.read())
        ]

    async def _write(self) -> None:
        failed: OSError | None = None
        for method, driver in self._drivers.items():
            try:
                await driver.ensure(self.state.announced(method))
                self.faults.pop(method, None)
            except OSError as error:
                self.faults[method] = str(error.strerror or error)
                failed = error
        if failed is not None:
            raise failed

    def _note_doubt(self) -> None:
        """Whether what other hosts announce decides about an address now."""
        doubtful = (
            self._others is not None
            and self._keeps_last
            and self._maintenance() is None
            and (
                not all_served(self._forwardings.values())
                or any(found.failed for found in self.state.addresses.values())
            )
        )
        if doubtful:
            self._settled.clear()
            self._doubtful.set()
        else:
            self._doubtful.clear()
            self._settled.set()
            self._elsewhere, self._answered, self.others_fault = None, False, ""

    async def _read_others(self) -> OtherHosts | None:
        """None without an answer: this host then withdraws an address as if there were no etcd. To keep it
        would fail a part of the connections for as long as etcd is away."""
        assert self._others is not None  # noqa: S101 (its caller asked)
        try:
            async with asyncio.timeout(OTHERS_TIMEOUT_SECONDS):
                found = await self._others()
        except OSError as error:  # a timeout is one
            why = error.strerror or "no answer"
            self.others_fault = f"what other hosts announce is not known: {why}; no address is kept"
            return None
        self.others_fault = ""
        return found


def _now() -> Moment:
    return Moment(asyncio.get_running_loop().time(), datetime.now(UTC))


Addresses = Mapping[AnnouncedKey, AnnouncedAddress]


def log_changes(before: Addresses, after: Addresses, maintenance: Maintenance | None) -> None:
    """Log what is announced or withdrawn, and what is kept without a backend."""
    changed = [
        (event, found)
        for key in {**before, **after}
        if (told := _event(before.get(key), after.get(key))) is not None
        for event, found in (told,)
    ]
    for event, found in changed[:MAX_LOGGED]:
        gone = found.key not in after
        reason = "no service announces it any more" if gone else describe(found, maintenance)
        level = logging.WARNING if event is Event.ADDRESS_KEPT else logging.INFO
        text = {
            Event.ADDRESS_ANNOUNCED: "announced from now on",
            Event.ADDRESS_WITHDRAWN: "withdrawn",
            Event.ADDRESS_KEPT: "stays announced",
        }[event]
        extra = fields(event, service=found.services, reason=f"{found.key}: {reason}")
        log.log(level, "%s: %s: %s", found.key, text, reason, extra=extra)
    if len(changed) > MAX_LOGGED:
        log.info("%d more addresses are announced or withdrawn", len(changed) - MAX_LOGGED)


def _event(
    before: AnnouncedAddress | None, after: AnnouncedAddress | None
) -> tuple[Event, AnnouncedAddress] | None:
    was = before is not None and before.announced
    found = after or before
    kept = after is not None and after.reason is Reason.LAST_HOST
    if found is not None and found.key.by is AnnounceMethod.L2 and not kept:
        return None  # its driver says when this host takes the address, or hands it over
    if after is None:
        return (Event.ADDRESS_WITHDRAWN, before) if before is not None and was else None
    if after.reason is Reason.LAST_HOST and (before is None or before.reason is not Reason.LAST_HOST):
        return Event.ADDRESS_KEPT, after
    if after.announced and not was:
        return Event.ADDRESS_ANNOUNCED, after
    return (Event.ADDRESS_WITHDRAWN, after) if was and not after.announced else None
