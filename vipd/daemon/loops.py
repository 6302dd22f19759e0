"""All that runs in the background of a daemon, by the name that status and metrics have for it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial

from vipd.control.background_tasks import (
    Expiring,
    advance_slow_start,
    clean_flows,
    collect_garbage,
    expire_overrides,
    poll_host,
    save_ended_overrides,
    take_back_unconfirmed,
    watch_files,
    watch_rules,
)
from vipd.control.reconciler import Reconciler
from vipd.daemon.wiring import Parts
from vipd.dataplane.iptables.watch.stream import WatchOptions
from vipd.host.observer import Observer
from vipd.host.supervisor import Backoff, Loop, LoopState, Work, until_first_ends
from vipd.model.check_target import CheckTarget
from vipd.model.override import OverrideTarget
from vipd.observe.events.notify_program import NotifyProgram
from vipd.observe.listeners import Listeners
from vipd.observe.monitoring import Monitoring

POLL_FILES = Backoff(maximum=5.0)
"""Each try reads the times of all files, which is the fallback for a directory that cannot be watched."""


class _Events(Observer):
    """Events for loops to wait for; the reconciler's own is that a verdict changed."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler
        self.switched = asyncio.Event()
        """Another dataplane is in use."""
        self._after_step: list[asyncio.Event] = []
        self._after_overrides: list[asyncio.Event] = []

    def after_step(self) -> asyncio.Event:
        """A new event, set after each step."""
        self._after_step.append(asyncio.Event())
        return self._after_step[-1]

    def after_overrides(self) -> asyncio.Event:
        """An event of its own, set after each change of overrides."""
        self._after_overrides.append(asyncio.Event())
        return self._after_overrides[-1]

    def overrides_changed(self, targets: frozenset[OverrideTarget]) -> None:
        for event in self._after_overrides:
            event.set()

    def maintenance_changed(self) -> None:
        for event in self._after_overrides:
            event.set()

    def health_changed(self, targets: frozenset[CheckTarget]) -> None:
        self._reconciler.request_sync()

    def names_resolved(self, name: str, services: Collection[str]) -> None:
        self._reconciler.causes.note(services, f"answer for {name}")
        self._reconciler.request_sync()

    def stepped(self) -> None:
        for event in self._after_step:
            event.set()

    def dataplane_switched(self) -> None:
        self.switched.set()


def loops(
    parts: Parts, listeners: Sequence[Listeners], monitoring: Monitoring, notify: NotifyProgram | None = None
) -> dict[str, Work]:
    """Every loop of a daemon."""
    reconciler, conntrack, events = parts.reconciler, parts.conntrack, _Events(parts.reconciler)
    collect, cleaned, grown, asked, balanced = (events.after_step() for _ in range(5))
    reconciler.observers.add(events)
    return {
        # Before the first write, so that no foreign change of rules is missed.
        "watching rules": lambda: _watch_rules(parts, events.switched),
        "reconciling": reconciler.run,
        "watching files": Loop(lambda: watch_files(parts.files, reconciler), LoopState(POLL_FILES)),
        "watching addresses": lambda: poll_host(parts.host, reconciler),
        "deleting old rules": lambda: collect_garbage(reconciler, collect),
        "cleaning flows": lambda: clean_flows(conntrack, reconciler, cleaned),
        "watching for replies": Loop(parts.silent_backends.run, LoopState(Backoff(maximum=60.0))),
        "keeping the fast path": Loop(parts.fast_path.poll, LoopState(Backoff(maximum=60.0))),
        "growing shares": lambda: advance_slow_start(parts.status_tracker, reconciler, grown),
        "balancing connections": Loop(lambda: parts.balancer.run(balanced), LoopState(Backoff(maximum=5.0))),
        **_override_loops(parts, events),
        "taking back unconfirmed changes": lambda: take_back_unconfirmed(parts.store, reconciler),
        "following announced services": lambda: parts.announcer.follow(asked),
        "announcing addresses": Loop(parts.announcer.run, LoopState(Backoff(maximum=5.0))),
        "asking what other hosts announce": parts.announcer.follow_others,
        "watching announced routes": parts.announcer.watch,
        "asking backends and name servers": Loop(parts.worker.run, parts.worker.state),
        "checking backends": parts.health.run,
        "resolving names": parts.resolver.run,
        **parts.flow_stats.loops(),
        **{f"answering over TCP ({number})": each.run for number, each in enumerate(listeners, 1)},
        "keeping the status page": monitoring.run,
        **({"passing events on": notify.run} if notify else {}),
        **(parts.fleet.loops(reconciler) if parts.fleet else {}),
        **(parts.lan.loops() if parts.lan else {}),
    }


def _override_loops(parts: Parts, events: _Events) -> dict[str, Work]:
    """Loops that end overrides, and maintenance of this host, when their time has come."""
    expiring: dict[str, Expiring] = {"ending overrides": parts.overrides}
    if parts.fleet:
        expiring["ending overrides of the fleet"] = parts.fleet.overrides
    return {
        **{
            name: partial(expire_overrides, overrides, parts.reconciler, events.after_overrides())
            for name, overrides in expiring.items()
        },
        "saving ended overrides": partial(save_ended_overrides, parts.overrides, events.after_overrides()),
    }


async def _watch_rules(parts: Parts, switched: asyncio.Event) -> None:
    """Detects and repairs foreign changes to the rules of the dataplane in use. `switched`: set after a
    switch to another one."""

    options = WatchOptions(parts.own_processes, parts.supervisor.run_until_cancelled)
    while True:
        switched.clear()
        open_watch = partial(parts.dataplane.watch, options)
        watching = watch_rules(open_watch, parts.repair_backoff, parts.dataplane, parts.reconciler)
        await until_first_ends([asyncio.create_task(watching), asyncio.create_task(switched.wait())])
