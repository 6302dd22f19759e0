"""The state that all viewers of the status page share: updated while there is a viewer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class PageSources:
    """The inputs of the state."""

    reconciler: Reconciler
    dataplane: Dataplane
    sources: Sequence[Source]
    about: Mapping[str, object]
    """Constant values, such as the version."""
    warnings: Callable[[], Sequence[str]]
    recorder: Recorder
    read_flows: ReadFlows
    announcer: Announcer | None = None


@dataclass(slots=True)
class _Entry:
    """A service as last read."""

    service: Service
    forwardings: Sequence[Forwarding]
    quarantine: str | None
    text: str


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
        self._parts: Json = {}
        """The state without services, rates and events."""
        self._entries: dict[str, _Entry] = {}
        self._history = FlowHistory()
        self._recent = RecentEvents()
        self._reviewed = 0
        self._requested_until = 0.0
        self._woken = asyncio.Event()
        self._renewed = asyncio.Condition()
        self._renewed_at = 0.0
        self._answers: dict[bool, asyncio.Task[bytes]] = {}
        """Those of the last update, by whether they are compressed."""

    async def run(self) -> None:
        """Update the state while it is wanted, for ever. Faults of a page are raised, and this may be run
        again: `vipd.host.supervisor` does both."""
        while True:
            self._woken.clear()
            if monotonic() >= self._requested_until:
                self._answers = {}
                return_freed_memory()
                await self._woken.wait()
            with self._facts.recorder.subscribe() as follower:
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

    async def answer(self, *, compressed: bool) -> bytes:
        """The state as JSON on one line. All viewers share the answer, which a thread makes."""
        if (making := self._answers.get(compressed)) is None:
            services = [entry.text for entry in self._entries.values()]
            rates, events = self._history.rates(), self._recent.texts()
            work = asyncio.to_thread(_answer, self._parts, rates, events, services, compressed)
            making = self._answers[compressed] = asyncio.create_task(work, name="page")
        return await asyncio.shield(making)

    async def _while_requested(self, subscription: Subscription) -> None:
        """Ends also if events were missed: then they are read anew."""
        await self._recent.load(self._facts.recorder)
        while monotonic() < self._requested_until:
            began = monotonic()
            await self._update(subscription)
            if subscription.overflowed or subscription.ended:
                break
            await asyncio.sleep(max(TICK_SECONDS - (monotonic() - began), TICK_SECONDS / 4))

    async def _update(self, subscription: Subscription) -> None:
        """Everything that may have changed."""
        began, facts = monotonic(), self._facts
        about = {**facts.about, "announcements": _announcements(facts.announcer)}
        view = daemon_view(facts.reconciler, facts.sources, facts.warnings(), about)
        self._drop_removed()
        await self._update_services()
        self._parts = {"daemon": view, **await self._count_flows()}
        await self._recent.take_new(subscription)
        async with self._renewed:
            self._answers, self._renewed_at = {}, began
            self._renewed.notify_all()

    def _drop_removed(self) -> None:
        for name in self._entries.keys() - self._facts.reconciler.services.keys():
            del self._entries[name]
            self._history.forget(name)

    async def _update_services(self) -> None:
        """Read the services with new rules, and for a limited time those that were not read for longest."""
        reconciler = self._facts.reconciler
        services, quarantined = reconciler.services, reconciler.progress.quarantined
        others = deque[str]()
        async for name in in_slices(tuple(services)):
            service = services[name]
            known = self._entries.get(name)
            if known is not None and self._same(known, service, quarantined.get(name)):
                others.append(name)
                continue
            self._update_entry(service, quarantined.get(name))
        await self._update_some(others)

    async def _update_some(self, names: deque[str]) -> None:
        reconciler = self._facts.reconciler
        names.rotate(-self._next(len(names)))
        until, done = perf_counter() + RECHECK_SECONDS, 0
        for name in names:
            service = reconciler.services.get(name)
            if service is not None:
                self._update_entry(service, reconciler.progress.quarantined.get(name))
            done += 1
            if perf_counter() > until:
                break
        self._reviewed += done
        await asyncio.sleep(0)

    def _next(self, number: int) -> int:
        return self._reviewed % number if number else 0

    def _same(self, known: _Entry, service: Service, quarantine: str | None) -> bool:
        forwardings = self._facts.reconciler.forwardings.get(service.name, ())
        same = known.service is service and known.forwardings is forwardings
        return same and known.quarantine == quarantine

    def _update_entry(self, service: Service, quarantine: str | None) -> None:
        reconciler = self._facts.reconciler
        forwardings = reconciler.forwardings.get(service.name, ())
        view = service_view(
            service,
            forwardings,
            reconciler.backend_statuses(service),
            self._facts.dataplane,
            quarantine,
            reconciler.twofold_addresses(service),
        )
        text = json.dumps(view, separators=(",", ":"))
        self._entries[service.name] = _Entry(service, forwardings, quarantine, text)

    async def _count_flows(self) -> Json:
        reading = await self._facts.read_flows()
        self._history.add_reading(reading, self._facts.reconciler.services)
        flows: Json = {
            "tracked": reading.tracked is not None,
            "traffic": reading.traffic,
            "services": self._history.latest,
            "refused": self._history.refused,
        }
        conntrack = {"entries": reading.table.entries, "max": reading.table.limit}
        return {"flows": flows, "conntrack": conntrack}


def _answer(
    parts: Json,
    rates: Mapping[str, Sequence[float]],
    events: Sequence[str],
    services: Sequence[str],
    compressed: bool,
) -> bytes:
    head = json.dumps(parts, separators=(",", ":"))[1:-1]
    # One by one: a single call would hold Python's lock for long.
    history = ",".join(
        f"{json.dumps(name)}:{json.dumps(of, separators=(',', ':'))}" for name, of in rates.items()
    )
    lists = f'"events":[{",".join(events)}],"services":[{",".join(services)}]'
    body = f'{{{head},"history":{{{history}}},{lists}}}'.encode()
    return zlib.compress(body, 1, 31) if compressed else body
