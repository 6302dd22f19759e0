"""What the API shows and changes, and how it waits until the kernel has a change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vipd.api.service_changes import Known
from vipd.control.address_policy import AddressPolicy
from vipd.control.reconciler import Reconciler
from vipd.control.snapshot import AskHost
from vipd.dataplane.base import Dataplane
from vipd.model.check import Check
from vipd.model.service import Service
from vipd.observe.events.recorder import Recorder
from vipd.observe.flow_stats.collector import FlowStats
from vipd.observe.metrics.scrape import Metrics
from vipd.sources.base import Source
from vipd.sources.override_store import OverrideStore
from vipd.sources.store import StoreSource

if TYPE_CHECKING:
    from vipd.control.fleet_member import Fleet

APPLY_TIMEOUT_SECONDS = 60.0


def _not_kept(_: str) -> None:
    """For a daemon that forgets such choices."""


async def _not_looked() -> None:
    """Where nothing has to be looked at."""


async def _nothing_lacks(_: Collection[Check]) -> Mapping[Check, tuple[str, ...]]:
    """Where every check can work."""
    return {}


def _nothing(_: object) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Served:
    """What the API shows and changes."""

    reconciler: Reconciler
    dataplane: Dataplane
    sources: Sequence[Source]
    store: StoreSource
    overrides: OverrideStore
    rescan: Callable[[], Awaitable[None]]
    """Reads every source anew."""
    about: Mapping[str, object]
    choose: Callable[[str], None] = _not_kept
    """Keeps an operator's choice of dataplane over a restart. Raises OSError."""
    claims: Callable[[], AddressPolicy] = AddressPolicy
    """Which addresses services may claim."""
    check_problems: AskHost = _nothing_lacks
    """What this host lacks for checks."""
    look_at_claims: Callable[[], Awaitable[object]] = _not_looked
    """Looks anew at what decides on that."""
    warnings_of: Callable[[Collection[Service]], Sequence[str]] = _nothing
    """What is to be reported about these services' claims, as of the last look."""
    warnings: Callable[[], Sequence[str]] = tuple
    """What is wrong now besides the reconciler's own warnings."""
    events: Recorder | None = None
    """Keeps what has happened."""
    numbers: FlowStats | None = None
    """New flows, flows now, traffic."""
    fleet: Fleet | None = None
    """The fleet that this host is one of; None: no etcd is configured."""
    metrics: Metrics | None = None
    """What Prometheus asks for."""
    default_store: str = "file"
    """Where changes go that do not say: `file` or `etcd`."""

    def known(self) -> Known:
        """Every service as it is declared now."""
        fleet = self.fleet.store.services if self.fleet else {}
        return Known(self.reconciler.services, fleet, self.store.services)

    async def wait_applied(
        self, services: Collection[str], changed: bool, units: Sequence[str] = ()
    ) -> tuple[bool, str]:
        """Wait until the kernel has these services as they are declared: whether it has, and else why not.

        `changed`: they have changed just now, so that a new step is needed. `units`: what must be accepted.
        """
        reconciler = self.reconciler
        generation = reconciler.request_sync() if changed else reconciler.progress.requested
        if not await reconciler.wait_synced(generation, APPLY_TIMEOUT_SECONDS, services):
            return False, reconciler.progress.why_pending(APPLY_TIMEOUT_SECONDS)
        refused = reconciler.progress.quarantined
        faults = [f"{name} is quarantined: {refused[name]}" for name in services if name in refused]
        faults += [str(problem) for unit in units for problem in reconciler.problems.get(unit, ())]
        return not faults, "; ".join(faults)
