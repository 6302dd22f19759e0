"""Selects backends again for dirty services, and returns what differs from the dataplane's input."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from vipd.control.backend_status_tracker import BackendStatusTracker
from vipd.control.programming import Forwardings, ServiceQuarantine
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.control.snapshot import Snapshot
from vipd.declaration.rules import network_count
from vipd.host.batches import in_batches
from vipd.model.backend_status import BackendStatuses
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.limits import declared_size
from vipd.model.service import Service

LARGE = 1000
"""Number of endpoints of one service above which a thread selects its backends."""

ServiceForwardings = tuple[Forwarding, ...]


@dataclass(slots=True)
class Dirty:
    """What may differ from the dataplane's input. The reconciler keeps it until a step has passed all of it
    to the dataplane, so that a failed step loses nothing."""

    declared: dict[str, None] = field(default_factory=dict)
    """Services that are new, changed or gone, in order."""
    statuses: set[str] = field(default_factory=set)
    """Services with backends whose status may have changed."""
    in_doubt: set[ForwardingKey] = field(default_factory=set)
    """Forwardings that a failed step may or may not have passed, and those left for a later step."""


@dataclass(frozen=True, slots=True)
class LastProgrammed:
    """The dataplane's current input, and the policy by which it was selected; None before the first step."""

    services: Mapping[str, Service]
    forwardings: Mapping[str, ServiceForwardings]
    policy: SelectionPolicy | None


@dataclass(slots=True)
class Changes:
    """The differences that one step found. Each part of the step passes them to the next."""

    policy: SelectionPolicy
    services: dict[str, Service | None] = field(default_factory=dict)
    """New or changed services; None for services that are gone."""
    selected: dict[str, ServiceForwardings] = field(default_factory=dict)
    """The forwardings of each service whose backends were selected again."""
    statuses: dict[str, BackendStatuses] = field(default_factory=dict)
    """The status that their backends had then, by service."""
    forwardings: dict[ForwardingKey, Forwarding | None] = field(default_factory=dict)
    """New or changed forwardings; None: deleted."""
    attempted: set[str] = field(default_factory=set)
    """Services whose backends were selected, or that are gone."""

    def replace(self, before: ServiceForwardings, after: ServiceForwardings) -> None:
        """Add the difference between the earlier and the new forwardings of a service."""
        new = {f.key: f for f in after}
        if before:
            old = {f.key: f for f in before}
            self.forwardings.update(dict.fromkeys(old.keys() - new.keys()))
            new = {key: f for key, f in new.items() if old.get(key) != f}
        self.forwardings.update(new)


class Selector:
    """Selects the backends of dirty services. Its only side effect: it sets the targets of health checks."""

    def __init__(
        self,
        snapshot: Snapshot,
        statuses: BackendStatusTracker,
        quarantine: ServiceQuarantine,
        withheld: Callable[[str], Forwardings],
        heartbeat: Callable[[], None],
    ) -> None:
        """`withheld` returns those forwardings of a service that could not be programmed. The selector calls
        `heartbeat` between parts of large work."""
        self._snapshot, self._statuses, self._quarantine = snapshot, statuses, quarantine
        self._withheld, self._heartbeat = withheld, heartbeat

    async def select(self, policy: SelectionPolicy, dirty: Dirty, last_programmed: LastProgrammed) -> Changes:
        """The differences from the dataplane's input."""
        again = self._quarantine.due()
        async for part in in_batches(dict.fromkeys((*dirty.declared, *again))):
            self._follow(part)
            self._heartbeat()
        dirty.statuses |= self._statuses.take_dirty()
        changes = Changes(policy)
        everything = self._snapshot.names if policy != last_programmed.policy else ()
        anew = {*everything, *dirty.statuses, *again}
        names = dict.fromkeys((*dirty.declared, *dirty.statuses, *again, *everything))
        async for part in in_batches(names):
            for name in part:
                selected = await self._select_in_thread(name, changes) if self._is_large(name) else None
                self._select_one(name, changes, last_programmed, selected, anew=name in anew)
            self._heartbeat()
        for key in dirty.in_doubt - changes.forwardings.keys():
            known = changes.selected.get(key.service) or last_programmed.forwardings.get(key.service, ())
            changes.forwardings[key] = next((f for f in known if f.key == key), None)
        return changes

    def _follow(self, names: Iterable[str]) -> None:
        """Set the health check targets of these services to their currently declared backends."""
        for name in names:
            try:
                self._statuses.follow({name: self._snapshot.service(name)})
            except Exception as error:
                self._quarantine.add(name, "following its backends", error)

    def _is_large(self, name: str) -> bool:
        """Whether selecting for a service would take the event loop long. False after an exception, with
        which `_select_one` then deals."""
        try:
            service = self._snapshot.service(name)
        except Exception:
            return False
        if service is None:
            return False
        networks = network_count(service.external_addresses, service.allow_from, len(service.addresses))
        return declared_size(service) + networks > LARGE

    async def _select_in_thread(self, name: str, changes: Changes) -> ServiceForwardings | None:
        """The forwardings of a large service, selected in a thread. None after an exception: `_select_one`
        selects again."""
        with contextlib.suppress(Exception):
            service = self._snapshot.service(name)
            if service is not None:
                statuses = changes.statuses[name] = dict(self._statuses.backend_statuses(service))
                return await asyncio.to_thread(select_backends, service, changes.policy, statuses)
        return None

    def _select_one(
        self,
        name: str,
        changes: Changes,
        last_programmed: LastProgrammed,
        selected: ServiceForwardings | None,
        *,
        anew: bool,
    ) -> None:
        """Select the backends of a service, unless it is unchanged and `anew` is false. An unexpected
        exception affects only this service: its rules stay."""
        changes.attempted.add(name)
        before = last_programmed.forwardings.get(name, ())
        try:
            service, known = self._snapshot.service(name), last_programmed.services.get(name)
            if service is not known:
                changes.services[name] = service
            if service is None:
                changes.replace(before, ())
            elif anew or service != known:  # if equal, only its line in the file has changed
                if selected is None:
                    statuses = changes.statuses[name] = self._statuses.backend_statuses(service)
                    selected = select_backends(service, changes.policy, statuses)
                changes.selected[name] = selected
                changes.replace(before, selected)
            if anew or name in changes.services:
                for key, forwarding in self._withheld(name).items():
                    changes.forwardings.setdefault(key, forwarding)
        except Exception as error:
            changes.selected[name] = before
            self._quarantine.add(name, "selecting its backends", error)
