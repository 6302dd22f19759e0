"""The state that the API shows and changes, and the wait until the kernel has a change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vipd.api.service_changes import ServicesSnapshot
from vipd.control.address_policy import AddressPolicy
from vipd.control.announcer import Announcer
from vipd.control.reconciler import Reconciler
from vipd.control.snapshot import AskHost
from vipd.dataplane.base import Dataplane
from vipd.declaration.bounded_json import Json
from vipd.model.check import Check
from vipd.model.service import Service
from vipd.observe.announcement_views import views_by_service
from vipd.observe.events.recorder import Recorder
from vipd.observe.flow_stats.collector import FlowStats
from vipd.observe.metrics.scrape import Metrics
from vipd.sources.base import Source
from vipd.sources.overrides import OverrideStore
from vipd.sources.store import StoreSource

if TYPE_CHECKING:
    from vipd.control.fleet_member import FleetMember

APPLY_TIMEOUT_SECONDS = 60.0


def _discard_choice(_: str) -> None:
    """Does nothing, for a daemon that does not store such choices."""


async def _refresh_nothing() -> None:
    """Does nothing."""


async def _no_check_problems(_: Collection[Check]) -> Mapping[Check, tuple[str, ...]]:
    """Returns no problems."""
    return {}


def _no_fast_path() -> None:
    return None


def _no_warnings(_: object) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The state that the API shows and changes."""

    reconciler: Reconciler
    dataplane: Dataplane
    sources: Sequence[Source]
    store: StoreSource
    overrides: OverrideStore
    rescan: Callable[[], Awaitable[None]]
    """Reads every source again."""
    about: Mapping[str, object]
    save_dataplane_choice: Callable[[str], None] = _discard_choice
    """Stores an operator's choice of dataplane over a restart. Raises OSError."""
    address_policy: Callable[[], AddressPolicy] = AddressPolicy
    """The addresses that services may claim."""
    check_problems: AskHost = _no_check_problems
    """The requirements of checks that this host lacks."""
    refresh_address_policy: Callable[[], Awaitable[object]] = _refresh_nothing
    """Polls the host facts on which claims depend."""
    warnings_of: Callable[[Collection[Service]], Sequence[str]] = _no_warnings
    """The warnings about these services' claims, as of the last poll."""
    fast_path: Callable[[], Mapping[str, object] | None] = _no_fast_path
    """The member `fast_path` of the Status; None: the settings do not ask for one."""
    warnings: Callable[[], Sequence[str]] = tuple
    """Current warnings besides the reconciler's."""
    events: Recorder | None = None
    """Stores events."""
    flow_stats: FlowStats | None = None
    """New flows, flows now, traffic."""
    fleet: FleetMember | None = None
    """The fleet that this host belongs to; None: no etcd is configured."""
    metrics: Metrics | None = None
    """The metrics for Prometheus."""
    announcer: Announcer | None = None
    """What this host announces beyond itself."""
    default_store: str = "file"
    """The store for changes that name none: `file` or `etcd`."""

    def services_snapshot(self) -> ServicesSnapshot:
        """Every service as currently declared."""
        fleet = self.fleet.store.services if self.fleet else {}
        return ServicesSnapshot(self.reconciler.services, fleet, self.store.services)

    def held(self) -> Mapping[str, str]:
        """Owners of services that serve on although their source no longer has them, each with the reason."""
        return {owner: why for source in self.sources for owner, why in source.held().items()}

    def announced(self) -> dict[str, list[Json]]:
        """The AnnouncedAddresses of each service that has any."""
        if self.announcer is None:
            return {}
        return views_by_service(self.announcer.state, self.announcer.maintenance, self.announcer.lans)

    async def wait_applied(
        self, services: Collection[str], changed: bool, units: Sequence[str] = ()
    ) -> tuple[bool, str]:
        """Wait until the kernel has these services as declared; returns whether it has, and if not, why.

        `changed`: they were just changed, so a new step is required. `units`: those that must be accepted,
        but for problems of other services of the store.
        """
        reconciler = self.reconciler
        generation = reconciler.request_sync() if changed else reconciler.progress.requested
        if not await reconciler.wait_synced(generation, APPLY_TIMEOUT_SECONDS, services):
            return False, reconciler.progress.why_pending(APPLY_TIMEOUT_SECONDS)
        refused = reconciler.progress.quarantined
        faults = [f"{name} is quarantined: {refused[name]}" for name in services if name in refused]
        problems = (problem for unit in units for problem in reconciler.problems.get(unit, ()))
        others = self.store.services.keys() - frozenset(services)
        faults += [str(problem) for problem in problems if problem.what.partition(": ")[0] not in others]
        return not faults, "; ".join(faults)
