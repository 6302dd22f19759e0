"""The state that all viewers of the status page share: updated while there is a viewer, sent as differences.

Each change has a version. A viewer sends its version and gets the changes since: nothing is
queued, and a slow viewer gets the sum of the changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from vipd.control.announcer import Announcer
from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import Dataplane
from vipd.declaration.bounded_json import Json
from vipd.host.batches import in_slices
from vipd.host.gc_control import return_freed_memory
from vipd.model.forwarding import Forwarding
from vipd.model.service import Service
from vipd.observe.announcement_views import summary_view
from vipd.observe.events.recorder import Recorder, Subscription
from vipd.observe.metrics.flows import ReadFlows
from vipd.observe.page.history import FlowHistory, RecentEvents
from vipd.observe.page.views import daemon_view, service_view
from vipd.sources.base import Source

TICK_SECONDS = 1.0
IDLE_TIMEOUT_SECONDS = 15.0
"""How long the state is still updated after the last request."""
RECHECK_SECONDS = 0.02
"""Time in each tick for services whose rules are unchanged: to read the results of their checks."""
WAIT_TIMEOUT_SECONDS = 8.0
MAX_BEHIND = 30
"""A viewer that is further behind gets the whole state."""
MAX_REMOVED = 10_000
"""A viewer that has missed more removals gets the whole state."""


@dataclass(frozen=True, slots=True)
class PageSources:
    """The inputs of the state."""

    reconciler: Reconciler
    dataplane: Dataplane
    sources: Sequence[Source]
    about: Mapping[str, object]
    """Constant values, such as the version."""
    warnings: Callable[[], Sequence[str]] = tuple
    recorder: Recorder | None = None
    read_flows: ReadFlows | None = None
    """None: flows are not counted."""
    announcer: Announcer | None = None


@dataclass(slots=True)
class _Entry:
    """A service as last read."""

    service: Service
    forwardings: Sequence[Forwarding]
    quarantine: str | None
    text: str
    version: int


@dataclass(slots=True)
class _VersionedJson:
    """A part of the state, as JSON, and the version at which it changed."""

    text: str = "null"
    version: int = 0

    def set(self, value: object, version: int) -> bool:
        text = json.dumps(value, separators=(",", ":"))
        if text == self.text:
            return False
        self.text, self.version = text, version
        return True


@dataclass(slots=True)
class _Parts:
    daemon: _VersionedJson = field(default_factory=_VersionedJson)
    flows: _VersionedJson = field(default_factory=_VersionedJson)
    conntrack: _VersionedJson = field(default_factory=_VersionedJson)


def _announcements(announcer: Announcer | None) -> Json | None:
    """What this host announces; None if no service asks for it, and there is no maintenance."""
    if announcer is None or not (announcer.active or announcer.maintenance):
        return None
    faults = {by.value: why for by, why in announcer.faults.items()}
    return summary_view(announcer.state, announcer.maintenance, faults, announcer.lans)


class PageState:
    """The state as of the last update. `run` updates it while a viewer wants it."""

    def __init__(self, facts: PageSources) -> None:
        self._facts = facts
        self._epoch = secrets.token_hex(4)
        self._version = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """In the order of their last change."""
        self._removed: deque[tuple[int, str]] = deque()
        self._oldest = 0
        """A viewer with an older version may have missed a removal that is no longer known."""
        self._parts = _Parts()
        self._history = FlowHistory()
        self._recent = RecentEvents()
        self._reviewed = 0
        self._requested_until = 0.0
        self._woken = asyncio.Event()
        self._renewed = asyncio.Condition()
        self._renewed_at = 0.0
        self._answers: dict[tuple[int | None, bool], asyncio.Task[bytes]] = {}
        """Those of the present version, by the viewer's version (None: everything) and whether they are
        compressed."""
        self.ended = False
        """Nothing is renewed any more: vipd stops."""

    async def run(self) -> None:
        """Update the state while it is wanted, for ever. After a cancellation no caller needs to wait. Faults
        of a page are raised, and this may be run again: `vipd.host.supervisor` does both."""
        try:
            await self._run()
        except asyncio.CancelledError:
            self.ended = True
            async with self._renewed:
                self._renewed.notify_all()
            raise

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            if monotonic() >= self._requested_until:
                self._answers = {}
                return_freed_memory()
                await self._woken.wait()
            with self._subscribed() as follower:
                await self._while_requested(follower)

    def request_updates(self) -> None:
        """A viewer requests the state."""
        self._requested_until = monotonic() + IDLE_TIMEOUT_SECONDS
        self._woken.set()

    async def wait_fresh(self) -> None:
        """Wait until the state is not older than some ticks, or longer if it takes very long."""
        self.request_updates()
        oldest = monotonic() - 3 * TICK_SECONDS
        async with self._renewed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._renewed.wait_for(lambda: self._renewed_at >= oldest), WAIT_TIMEOUT_SECONDS
                )

    async def wait_newer(self, seen: str, seconds: float) -> bool:
        """Wait until the version differs from this one, up to `seconds`; returns whether it does."""
        self.request_updates()
        async with self._renewed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._renewed.wait_for(lambda: self.ended or self.version != seen), seconds
                )
        return self.version != seen

    @property
    def version(self) -> str:
        """The present version, for `since`."""
        return f"{self._epoch}-{self._version}"

    async def changes_since(self, seen: str, *, compressed: bool = False) -> tuple[str, bytes]:
        """The present version, and the changes since another one, as JSON on one line; everything for one
        that is unknown or long past. All viewers share the answer, which a thread makes."""
        after = self._number(seen)
        if (making := self._answers.get((after, compressed))) is None:
            head, services = self._head_since(after), list(self._changed(after or 0))
            work = asyncio.to_thread(_answer, head, services, compressed)
            making = self._answers[after, compressed] = asyncio.create_task(work, name="page")
        version = self.version
        return version, await asyncio.shield(making)

    def _head_since(self, after: int | None) -> str:
        """All of an answer before its services."""
        full = after is None
        after = after or 0
        parts = [f'{{"version":"{self.version}","full":{json.dumps(full)}']
        for name in ("daemon", "flows", "conntrack"):
            part: _VersionedJson = getattr(self._parts, name)
            if full or part.version > after:
                parts.append(f'"{name}":{part.text}')
        if full:
            parts.append(f'"history":{json.dumps(self._history.rates(), separators=(",", ":"))}')
        gone = json.dumps([name for version, name in self._removed if version > after])
        events = ",".join(self._recent.since(0 if full else after).values())
        return ",".join([*parts, f'"gone":{gone},"events":[{events}]'])

    def _number(self, seen: str) -> int | None:
        """The number of a version from which on all changes are known, and for which there is an answer of
        its own: of those there are few, whatever viewers ask for."""
        epoch, _, number = seen.partition("-")
        known = epoch == self._epoch and number.isascii() and number.isdecimal() and len(number) < 16
        oldest = max(self._oldest, self._version - MAX_BEHIND)
        return min(int(number), self._version) if known and int(number) >= oldest else None

    def _changed(self, after: int) -> Iterator[str]:
        for entry in reversed(self._entries.values()):
            if entry.version <= after:
                return
            yield entry.text

    @contextlib.contextmanager
    def _subscribed(self) -> Iterator[Subscription | None]:
        recorder = self._facts.recorder
        if recorder is None:
            yield None
            return
        with recorder.subscribe() as follower:
            yield follower

    async def _while_requested(self, subscription: Subscription | None) -> None:
        """Ends also if events were missed: then they are read anew."""
        if subscription is not None and self._facts.recorder is not None:
            await self._recent.load(self._facts.recorder, self._version + 1)
            self._version += 1
        while monotonic() < self._requested_until:
            began = monotonic()
            await self._update(subscription)
            if subscription is not None and (subscription.overflowed or subscription.ended):
                break
            await asyncio.sleep(max(TICK_SECONDS - (monotonic() - began), TICK_SECONDS / 4))

    async def _update(self, subscription: Subscription | None) -> None:
        """Everything that may have changed. The new version is there for all at once, at the end."""
        began, version = monotonic(), self._version + 1
        facts, parts = self._facts, self._parts
        about = {**facts.about, "announcements": _announcements(facts.announcer)}
        view = daemon_view(facts.reconciler, facts.sources, facts.warnings(), about)
        changed = [parts.daemon.set(view, version), self._drop_removed(version)]
        changed.append(await self._update_services(version))
        changed.append(await self._count_flows(version))
        if subscription is not None:
            changed.append(await self._recent.take_new(subscription, version))
        async with self._renewed:
            if any(changed):
                self._version, self._answers = version, {}
            self._renewed_at = began
            self._renewed.notify_all()

    def _drop_removed(self, version: int) -> bool:
        gone = self._entries.keys() - self._facts.reconciler.services.keys()
        for name in gone:
            del self._entries[name]
            self._removed.append((version, name))
            self._history.forget(name)
        while len(self._removed) > MAX_REMOVED:
            self._oldest = self._removed.popleft()[0]
        return bool(gone)

    async def _update_services(self, version: int) -> bool:
        """Read the services with new rules, and for a limited time those that were not read for longest."""
        reconciler = self._facts.reconciler
        services, quarantined = reconciler.services, reconciler.progress.quarantined
        changed, others = False, deque[str]()
        async for name in in_slices(tuple(services)):
            service = services[name]
            known = self._entries.get(name)
            if known is not None and self._same(known, service, quarantined.get(name)):
                others.append(name)
                continue
            changed |= self._update_entry(service, quarantined.get(name), version)
        return await self._update_some(others, version) or changed

    async def _update_some(self, names: deque[str], version: int) -> bool:
        reconciler, changed = self._facts.reconciler, False
        names.rotate(-self._next(len(names)))
        until, done = perf_counter() + RECHECK_SECONDS, 0
        for name in names:
            service = reconciler.services.get(name)
            if service is not None:
                changed |= self._update_entry(service, reconciler.progress.quarantined.get(name), version)
            done += 1
            if perf_counter() > until:
                break
        self._reviewed += done
        await asyncio.sleep(0)
        return changed

    def _next(self, number: int) -> int:
        return self._reviewed % number if number else 0

    def _same(self, known: _Entry, service: Service, quarantine: str | None) -> bool:
        forwardings = self._facts.reconciler.forwardings.get(service.name, ())
        same = known.service is service and known.forwardings is forwardings
        return same and known.quarantine == quarantine

    def _update_entry(self, service: Service, quarantine: str | None, version: int) -> bool:
        reconciler = self._facts.reconciler
        forwardings = reconciler.forwardings.get(service.name, ())
        backend_statuses = reconciler.backend_statuses(service)
        view = service_view(
            service,
            forwardings,
            backend_statuses,
            self._facts.dataplane,
            quarantine,
            reconciler.twofold_addresses(service),
        )
        text = json.dumps(view, separators=(",", ":"))
        known = self._entries.get(service.name)
        if known is not None and known.text == text:
            known.service, known.forwardings, known.quarantine = service, forwardings, quarantine
            return False
        self._entries[service.name] = _Entry(service, forwardings, quarantine, text, version)
        self._entries.move_to_end(service.name)
        return True

    async def _count_flows(self, version: int) -> bool:
        if self._facts.read_flows is None:
            return False
        reading = await self._facts.read_flows()
        self._history.add_reading(reading, self._facts.reconciler.services)
        tracked = reading.tracked is not None
        flows: Json = {
            "sample": self._history.samples,
            "tracked": tracked,
            "traffic": reading.traffic,
            "services": self._history.latest,
            "refused": self._history.refused,
        }
        conntrack = {"entries": reading.table.entries, "max": reading.table.limit}
        told = self._parts.conntrack.set(conntrack, version)
        return self._parts.flows.set(flows, version) or told


def _answer(head: str, services: Sequence[str], compressed: bool) -> bytes:
    body = f'{head},"services":[{",".join(services)}]}}'.encode()
    return zlib.compress(body, 1, 31) if compressed else body
