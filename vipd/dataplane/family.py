"""The common part of both dataplanes for the rules of one address family.

A write that the kernel rejects because of its rules is planned once more, from rules that are read again:
another program may have changed them. If that is rejected too, what all services share is tried alone: no
service is to blame for its rejection. Then the write is retried in ever smaller parts, until the forwarding
at fault is alone. It is quarantined: its last rules stay in the kernel, and all others are programmed. Where
another program has deleted its last rules, only those backends come back that it still has.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from vipd.dataplane.base import ApplyError, DataplanePlan
from vipd.dataplane.options import FamilyOptions
from vipd.host.host_changes import HostChanges
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.host.systemd.fields import Event, fields
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import Family

log = logging.getLogger(__name__)

LARGE = 500
"""Endpoints that changes are about above which a plan is made beside the event loop."""


class Desired(Protocol):
    """The rules wanted in the kernel, compiled, and which of them may differ from what was written."""

    @property
    def options(self) -> Any:
        """Everything besides the forwardings that shapes it."""

    @property
    def changes(self) -> int:
        """Number of forwardings that may differ from what was last written, with the work for each."""

    def update(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Take one forwarding's new form, or its end. When compiling it raises, nothing has changed."""

    def work_of(self, key: ForwardingKey, forwarding: Forwarding | None) -> int:
        """The work for this change: of the forwarding or the one in its place, whichever is larger."""

    def compile_ahead(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Compile what the next `update` of this key requires. May run in a thread."""


D = TypeVar("D", bound=Desired)
P = TypeVar("P", bound=DataplanePlan)
S = TypeVar("S")


class FamilyProgrammer(ABC, Generic[D, P]):
    """Programs one family. Without tools it fails only when something is wanted."""

    desired: D

    def __init__(self, family: Family, settings: Settings, record: HostChanges, run: Runner) -> None:
        self._family, self._settings, self._record, self._run = family, settings, record, run
        self._invalid = False
        """The next plan drops the cached state of the kernel."""
        self._doubted = False
        """Another program may have changed rules since the last plan."""
        self._recorded = False
        """The state directory records that rules of vipd's exist."""
        self._quarantine: dict[ForwardingKey, tuple[Forwarding | None, str]] = {}
        """Forwardings that the kernel rejects, with its message."""
        self._logged: dict[ForwardingKey, str] = {}
        """The message for each that the log has, until it has another form."""

    @abstractmethod
    async def plan(self) -> P:
        """The plan of what must be written now. Raises ApplyError."""

    @abstractmethod
    async def apply(self, plan: P) -> None:
        """Write a plan. Raises ApplyError when no single forwarding is to blame."""

    @abstractmethod
    async def survey(self) -> Any:
        """The kernel's current state; the cached state does not change. None: no tools, and nothing
        wanted. Raises ApplyError."""

    @abstractmethod
    def difference(self, surveyed: Any) -> P:
        """The plan for a kernel in the surveyed state. May run in a thread."""

    @abstractmethod
    async def collect_garbage(self) -> None:
        """Delete chains that are no longer reachable, and that no change had to delete. Raises ApplyError."""

    @abstractmethod
    def warnings(self) -> list[str]:
        """What this host lacks and the effects on services."""

    @abstractmethod
    def version(self) -> str:
        """The tools as they name themselves, or why there are none."""

    @abstractmethod
    def _reconfigure(self, options: Any) -> None:
        """Take other options."""

    @abstractmethod
    def _forget_installed(self) -> None:
        """Drop the cached state of the kernel: the next plan reads it."""

    def release(self, key: ForwardingKey) -> None:
        """Quarantine a forwarding no more: it is about to have another form, which may be taken."""
        self._quarantine.pop(key, None)
        self._logged.pop(key, None)

    def retry_quarantined(self, services: Collection[str] | None = None) -> None:
        """Try what the kernel rejects of these services, or of all, once more, with the next plan."""
        for key, (forwarding, _) in list(self._quarantine.items()):
            if services is None or key.service in services:
                del self._quarantine[key]
                self.desired.update(key, forwarding)

    async def host_changed(self, addresses: frozenset[str]) -> None:
        """Node ports may be limited to some of this host's addresses."""
        limited = self._settings.node_addresses(self._family, addresses)
        options: FamilyOptions = self.desired.options
        if options.node_port_addresses != limited:
            # In a thread: all forwardings are compiled again.
            await asyncio.to_thread(self._reconfigure, replace(options, node_port_addresses=limited))

    def invalidate_all(self) -> None:
        """Drop the cached state of the kernel, and retry quarantined forwardings; effective with the next
        plan, since the current one may be in progress."""
        self._invalid = self._doubted = True

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel rejects, with its message."""
        return {key: reason for key, (_, reason) in self._quarantine.items()}

    def retry_if_doubted(self) -> None:
        """Before a plan: if another program may have changed rules, that may be the reason of quarantines."""
        if self._doubted:
            self._doubted = False
            self.retry_quarantined()

    def _reset(self) -> None:
        """Carry out a pending `invalidate_all`."""
        self._invalid = False
        self._forget_installed()

    def _record_rules(self, missing_tables: Collection[str]) -> None:
        """Before the first write: record on disk that rules will exist. Raises ApplyError."""
        if self._recorded and not missing_tables:
            return
        try:
            self._record.record_rules(self._settings.chain_prefix, list(missing_tables))
        except OSError as error:
            what = "what is done to this host cannot be recorded"
            why = error.strerror or str(error)
            raise ApplyError(what, why, "mend state_dir; nothing was written") from None
        self._recorded = True

    def _quarantine_forwarding(self, key: ForwardingKey, forwarding: Forwarding | None, why: str) -> None:
        """Quarantine a forwarding."""
        if self._logged.get(key) != why:
            extra = fields(Event.SERVICE_QUARANTINED, service=key.service, cause="kernel", reason=why)
            log.error("%s is quarantined: %s", key.service_port, why, extra=extra)
        self._logged[key] = why
        self._quarantine[key] = (forwarding, why)

    def _log_search(self, error: ApplyError, suspects: Collection[ForwardingKey]) -> None:
        """Log that the forwarding at fault is searched among these, unless all of them are known."""
        if self._logged.keys() < {*self._logged, *suspects}:
            log.warning("%s; looking for the service at fault among %d", error, len(suspects))


def without_removed(before: Forwarding | None, wanted: Forwarding | None) -> Forwarding | None:
    """An earlier form without the backends that take no new flows in the wanted one."""
    if before is None or wanted is None:
        return None
    kept = {endpoint[:2] for endpoint in (*wanted.reachable(), *wanted.affinity_only)}

    def remaining(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
        return tuple(endpoint for endpoint in endpoints if endpoint[:2] in kept)

    endpoints, local = remaining(before.endpoints), remaining(before.local_endpoints)
    return replace(
        before,
        endpoints=endpoints,
        local_endpoints=local,
        affinity_only=remaining(before.affinity_only),
        has_endpoints=before.has_endpoints and bool(endpoints or local),
    )


def without_former_frontends(before: Forwarding | None, wanted: Forwarding | None) -> Forwarding | None:
    """An earlier form with those of its frontends alone that the wanted one has, too: any other may be
    another service's by now. None: there is none."""
    if before is None or wanted is None:
        return None
    same_port = before.port == wanted.port
    outside = {each.address for each in wanted.external_addresses}
    kept = replace(
        before,
        addresses=tuple(each for each in before.addresses if same_port and each in wanted.addresses),
        external_addresses=tuple(
            each for each in before.external_addresses if same_port and each.address in outside
        ),
        node_port=before.node_port if before.node_port == wanted.node_port else None,
    )
    return kept if kept.addresses or kept.externally_exposed else None


async def bisect(
    suspects: Sequence[S], attempt: Callable[[Sequence[S]], Awaitable[None]]
) -> list[tuple[S, str]]:
    """Those of the suspects with which an attempt fails alone, and why; the attempts with all others have
    succeeded. An attempt that fails has no effect. Raises ApplyError that no rules are at fault for."""
    if not suspects:
        return []
    try:
        await attempt(suspects)
    except ApplyError as error:
        if not error.rules_at_fault:
            raise
        why = error.why
    else:
        return []
    if len(suspects) == 1:
        return [(suspects[0], why)]
    middle = len(suspects) // 2
    first = await bisect(suspects[:middle], attempt)
    return first + await bisect(suspects[middle:], attempt)
