"""What both dataplanes do alike with the rules of one address family.

What the kernel does not take because of its rules is tried again in ever smaller parts, until the forwarding
at fault is alone. It is quarantined: the kernel keeps what it had for it, and all others are programmed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from vipd.dataplane.base import ApplyError, DataplanePlan
from vipd.dataplane.options import FamilyOptions
from vipd.host.changes import HostRecord
from vipd.host.process import Runner
from vipd.host.settings.settings import Settings
from vipd.host.systemd.fields import Event, fields
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

log = logging.getLogger(__name__)

LARGE = 500
"""Endpoints that changes are about above which a plan is made beside the event loop."""


class Desired(Protocol):
    """What is wanted in the kernel, compiled, and which of it may be other than it was written."""

    @property
    def options(self) -> Any:
        """Everything besides the forwardings that shapes it."""

    @property
    def changes(self) -> int:
        """How many forwardings may be other than they were written last, and how much there is to each."""

    def update(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Take one forwarding's new form, or its end. When compiling it raises, nothing has changed."""

    def work_of(self, key: ForwardingKey, forwarding: Forwarding | None) -> int:
        """How much it is to take that: of the forwarding and of the one in its place, the larger."""

    def compile_ahead(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Compile what the next `update` of this key needs. May run in a thread."""


D = TypeVar("D", bound=Desired)
P = TypeVar("P", bound=DataplanePlan)
S = TypeVar("S")


class FamilyProgrammer(ABC, Generic[D, P]):
    """Programs one family. Without tools it fails only when something is wanted of it."""

    desired: D

    def __init__(self, family: Family, settings: Settings, record: HostRecord, run: Runner) -> None:
        self._family, self._settings, self._record, self._run = family, settings, record, run
        self._invalid = False
        """Nothing that is known about the kernel is to be trusted, as of the next plan."""
        self._recorded = False
        """The state directory says that there are rules of vipd's."""
        self._quarantine: dict[ForwardingKey, tuple[Forwarding | None, str]] = {}
        """What the kernel does not take, and what it said."""

    @abstractmethod
    async def plan(self) -> P:
        """What has to be written now. Raises ApplyError."""

    @abstractmethod
    async def apply(self, plan: P) -> None:
        """Write a plan. Raises ApplyError when no single forwarding is to blame."""

    @abstractmethod
    async def survey(self) -> Any:
        """What the kernel holds now, nothing that is known of it being touched. None: no tools, and nothing
        wanted. Raises ApplyError."""

    @abstractmethod
    def difference(self, surveyed: Any) -> P:
        """What would have to be written where the kernel is as surveyed. May run in a thread."""

    @abstractmethod
    async def collect_garbage(self) -> None:
        """Delete what nothing reaches any more and no change waited for. Raises ApplyError."""

    @abstractmethod
    def warnings(self) -> list[str]:
        """What this host lacks and what that means for services."""

    @abstractmethod
    def version(self) -> str:
        """The tools as they name themselves, or why there are none."""

    @abstractmethod
    def _reconfigure(self, options: Any) -> None:
        """Take other options."""

    @abstractmethod
    def _forget_installed(self) -> None:
        """Nothing is known about the kernel: the next plan reads it."""

    def release(self, key: ForwardingKey) -> None:
        """Quarantine a forwarding no more: it is about to have another form, which may be taken."""
        self._quarantine.pop(key, None)

    def host_changed(self, addresses: frozenset[str]) -> None:
        """Node ports may be limited to some of this host's addresses."""
        limited = self._settings.node_addresses(self._family, addresses)
        options: FamilyOptions = self.desired.options
        self._reconfigure(replace(options, node_port_addresses=limited))

    def invalidate_all(self) -> None:
        """Trust nothing about the kernel, and give what is quarantined a new chance; as of the next plan, for
        one may be on its way into the kernel now."""
        self._invalid = True

    def quarantined(self) -> Mapping[ForwardingKey, str]:
        """The forwardings that the kernel does not take, and what it said."""
        return {key: reason for key, (_, reason) in self._quarantine.items()}

    def _start_anew(self) -> None:
        """Do what `invalidate_all` asked for."""
        self._invalid = False
        self._forget_installed()
        for key, (forwarding, _) in list(self._quarantine.items()):
            self.release(key)
            self.desired.update(key, forwarding)

    def _record_rules(self, missing_tables: Collection[str]) -> None:
        """Before the first write: say on disk what will be there. Raises ApplyError."""
        if self._recorded and not missing_tables:
            return
        try:
            self._record.rules(self._settings.chain_prefix, list(missing_tables))
        except OSError as error:
            what = "what is done to this host cannot be recorded"
            why = error.strerror or str(error)
            raise ApplyError(what, why, "mend state_dir; nothing was written") from None
        self._recorded = True

    def _hold(self, key: ForwardingKey, forwarding: Forwarding | None, why: str) -> None:
        """Quarantine a forwarding."""
        extra = fields(Event.SERVICE_QUARANTINED, service=key.service, cause="kernel", reason=why)
        log.error("%s is quarantined: %s", key.service_port, why, extra=extra)
        self._quarantine[key] = (forwarding, why)


async def bisect(
    suspects: Sequence[S], attempt: Callable[[Sequence[S]], Awaitable[None]]
) -> list[tuple[S, str]]:
    """Those of the suspects with which an attempt fails alone, and why; the attempts with all others have
    succeeded. An attempt that fails has no effect. Raises ApplyError that no rules are at fault for."""
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
