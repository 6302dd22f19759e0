"""Metrics and status page, wired to one daemon's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname

from vipd import __version__
from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import Dataplane
from vipd.host.settings.settings import Settings
from vipd.host.supervisor import Task
from vipd.model.durations import Durations
from vipd.model.formatting import time_text
from vipd.observe.events.recorder import Recorder
from vipd.observe.flow_stats.collector import FlowStats
from vipd.observe.listeners import Listeners, Place
from vipd.observe.metrics.event_counts import MetricCounters
from vipd.observe.metrics.flows import reader
from vipd.observe.metrics.scrape import Metrics
from vipd.observe.page.page_state import Facts, PageState
from vipd.observe.page.server import StatusPage
from vipd.sources.base import Source


@dataclass(frozen=True, slots=True)
class Observed:
    """The objects to observe."""

    settings: Settings
    reconciler: Reconciler
    dataplane: Dataplane
    sources: Sequence[Source]
    numbers: FlowStats
    recorder: Recorder
    checks: Mapping[str, Durations]
    """Durations of health checks, by their type."""
    tasks: Mapping[str, Task]
    """The state of background tasks, by their name."""
    warnings: Callable[[], Sequence[str]] = tuple
    """Warnings besides the reconciler's own."""


class Observers:
    """Metrics and status page of a daemon. The tally's `counting` is to be entered, and `run` to be run."""

    def __init__(self, daemon: Observed) -> None:
        settings, reconciler, sources = daemon.settings, daemon.reconciler, daemon.sources
        read_flows = reader(daemon.numbers)
        self.tally = MetricCounters(reconciler, sources, daemon.checks, daemon.tasks)
        reconciler.observers.add(self.tally)
        self.metrics = Metrics(reconciler, sources, self.tally, daemon.dataplane, read_flows)
        started = time_text(reconciler.clock())
        facts = Facts(
            reconciler,
            daemon.dataplane,
            sources,
            {"host": settings.node_name, "version": __version__, "started": started},
            daemon.warnings,
            daemon.recorder,
            read_flows,
        )
        self._board = PageState(facts)
        self._page = StatusPage(self._board, _place(settings.page_place()))
        names = {settings.node_name.lower(), gethostname().lower()}
        self._scraped = self.metrics.listener(_place(settings.metrics_place()), names)

    @property
    def listeners(self) -> tuple[Listeners, ...]:
        """Their ports, each to be run."""
        return self._scraped, self._page.listener

    async def run(self) -> None:
        """Keep the page's state fresh while it has a viewer, for ever."""
        await self._board.run()


def _place(place: tuple[str, int] | None) -> Place | None:
    return Place(*place) if place else None
