"""Whom the reconciler works with, besides sources and the dataplane: host, judges and followers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from vipd.control.admission import AddressPolicy
from vipd.control.selection import SelectionPolicy
from vipd.model.backend_status import BackendStatuses
from vipd.model.check import Check
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Service


class HostProvider(Protocol):
    """This host, besides its rules."""

    async def policy(self) -> SelectionPolicy:
        """What settings and host say now; the host's addresses may have changed. Raises OSError."""

    def claims(self) -> AddressPolicy:
        """Which addresses services may claim."""

    async def check_problems(self, checks: Collection[Check]) -> Mapping[Check, tuple[str, ...]]:
        """What this host lacks for checks. Answers soon, whatever hangs."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Forwardings are new, or gone."""

    async def prepare(self) -> tuple[str, ...]:
        """Make the host fit for all forwardings that there are; a warning for each thing that is amiss."""


class BackendStatusSource(Protocol):
    """What says how backends stand beside their declaration."""

    def follow(self, changes: Mapping[str, Service | None]) -> None:
        """These services are new or other than before, or gone. They may be told of again."""

    def moved(self) -> frozenset[str]:
        """Services whose backends may stand otherwise since `taken_up`."""

    def backend_statuses(self, service: Service) -> BackendStatuses:
        """How the service's backends stand now."""

    def taken_up(self, services: frozenset[str]) -> None:
        """What had moved of these services has been taken up."""


class AllServing:
    """Every backend stands as declared."""

    def follow(self, changes: Mapping[str, Service | None]) -> None:
        """Nothing depends on them."""

    def moved(self) -> frozenset[str]:
        """None, ever."""
        return frozenset()

    def backend_statuses(self, service: Service) -> BackendStatuses:
        """All as declared."""
        return {}

    def taken_up(self, services: frozenset[str]) -> None:
        """Nothing had moved."""


class Follower(Protocol):
    """Told what the dataplane is told, and when the kernel has it."""

    def host_changed(self, addresses: frozenset[str]) -> None:
        """This host's own addresses are these from now on."""

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Forwardings are new, or gone."""

    def applied(self, wrote: bool = True) -> None:
        """The kernel is as told; `wrote`: rules had to be written for that."""
