"""Metrics and status page, wired to one daemon's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname

from vipd import __version__
from vipd.control.announcer import Announcer
from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import Dataplane
from vipd.host.settings.settings import Settings
from vipd.host.supervisor import LoopState
from vipd.model.durations import DurationHistogram
from vipd.model.formatting import time_text
from vipd.observe.events.recorder import Recorder
from vipd.observe.flow_stats.collector import FlowStats
from vipd.observe.listeners import ListenAddress, Listeners
from vipd.observe.metrics.event_counts import MetricCounters
from vipd.observe.metrics.flows import flow_reader
from vipd.observe.metrics.scrape import Metrics
from vipd.observe.page.page_state import PageSources, PageState
from vipd.observe.page.server import StatusPage
from vipd.sources.base import Source


@dataclass(frozen=True, slots=True)
class Monitored:
    """The objects to observe."""

    settings: Settings
    reconciler: Reconciler
    dataplane: Dataplane
    sources: Sequence[Source]
    flow_stats: FlowStats
    recorder: Recorder
    checks: Mapping[str, DurationHistogram]
    """Durations of health checks, by their type."""
    tasks: Mapping[str, LoopState]
    """The state of background tasks, by their name."""
    warnings: Callable[[], Sequence[str]] = tuple
    """Warnings besides the reconciler's own."""
    notifications: Callable[[], Mapping[str, int]] | None = None
    """Events that were passed to the program of `notify`, by result; None: there is no such program."""
    announcer: Announcer | None = None


class Monitoring:
    """Metrics and status page of a daemon. The tally's `counting` is to be entered, and `run` to be run."""

    def __init__(self, daemon: Monitored) -> None:
        settings, reconciler, sources = daemon.settings, daemon.reconciler, daemon.sources
        read_flows = flow_reader(daemon.flow_stats)
        self.counters = MetricCounters(reconciler, sources, daemon.checks, daemon.tasks, daemon.notifications)
        self.counters.announcer = daemon.announcer
        reconciler.observers.add(self.counters)
        self.metrics = Metrics(reconciler, sources, self.counters, daemon.dataplane, read_flows)
        started = time_text(reconciler.clock())
        facts = PageSources(
            reconciler,
            daemon.dataplane,
            sources,
            {"host": settings.node_name, "version": __version__, "started": started},
            daemon.warnings,
            daemon.recorder,
            read_flows,
            daemon.announcer,
        )
        self._page_state = PageState(facts)
        names = {settings.node_name.lower(), gethostname().lower()}
        self._page = StatusPage(self._page_state, _place(settings.page_socket_address()), names)
        self._metrics_listener = self.metrics.listener(_place(settings.metrics_socket_address()), names)

    @property
    def listeners(self) -> tuple[Listeners, ...]:
        """Their ports, each to be run."""
        return self._metrics_listener, self._page.listener

    async def run(self) -> None:
        """Keep the page's state fresh while it has a viewer, for ever."""
        await self._page_state.run()


def _place(place: tuple[str, int] | None) -> ListenAddress | None:
    return ListenAddress(*place) if place else None
