"""Observers of the daemon: the events, and their delivery."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

from vipd.host.containment import Containment
from vipd.model.check_target import CheckTarget
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.override import OverrideTarget
from vipd.model.service import Family


class Observer:
    """Receives events. A subclass overrides the methods that it needs. All are called on the event loop
    and must return at once."""

    def host_changed(self, addresses: frozenset[str]) -> None:
        """This host's own addresses are these from now on."""

    def overrides_changed(self, targets: frozenset[OverrideTarget]) -> None:
        """Overrides of these targets are set, cleared or expired; what was set or cleared is on disk."""

    def maintenance_changed(self) -> None:
        """Maintenance of this host has begun, changed or ended; what was requested is on disk."""

    def health_changed(self, targets: frozenset[CheckTarget]) -> None:
        """Health checks have another verdict, or another weight, for these targets."""

    def names_resolved(self, name: str, services: Collection[str]) -> None:
        """The answer for a DNS name that these services use, `dns:NAME` or `srv:NAME`, is another one."""

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Forwardings are new or changed, or gone (None). The dataplane has them, the kernel does
        not yet."""

    def applied(self, wrote: bool, families: Collection[Family] = tuple(Family)) -> None:
        """The kernel's rules of these address families are as desired: a step succeeded, or failed for
        the other family alone. `wrote`: rules had to be written."""

    def stepped(self) -> None:
        """A step is over, whether it succeeded or failed."""

    def dataplane_switched(self) -> None:
        """Another dataplane is in use, or the one in use writes with other programs."""

    def heartbeat(self) -> None:
        """Work continues: called at each part of a step, and from time to time while there is no work."""


class Observers(Observer):
    """Notifies all observers, in the order in which they were added. An exception of one is contained: it is
    logged once, and is a warning until the same event succeeds."""

    def __init__(self, heartbeat_seconds: float = 60.0) -> None:
        """`heartbeat_seconds`: the longest time without a heartbeat while nothing happens."""
        self.heartbeat_seconds = heartbeat_seconds
        self.containment = Containment()
        """Unexpected exceptions of observers and of other parts that belong to no unit and no
        service."""
        self._observers: list[Observer] = []
        self._with_heartbeat: list[Observer] = []
        """Those that need it: a load has thousands."""

    def add(self, observer: Observer) -> None:
        """Notify this one, too, from now on."""
        self._observers.append(observer)
        if type(observer).heartbeat is not Observer.heartbeat:
            self._with_heartbeat.append(observer)

    def host_changed(self, addresses: frozenset[str]) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "taking this host's addresses"):
                observer.host_changed(addresses)

    def overrides_changed(self, targets: frozenset[OverrideTarget]) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "taking changed overrides"):
                observer.overrides_changed(targets)

    def maintenance_changed(self) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "taking maintenance of this host"):
                observer.maintenance_changed()

    def health_changed(self, targets: frozenset[CheckTarget]) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "taking changed verdicts"):
                observer.health_changed(targets)

    def names_resolved(self, name: str, services: Collection[str]) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "taking resolved names"):
                observer.names_resolved(name, services)

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "taking changed services"):
                observer.services_changed(changes)

    def applied(self, wrote: bool, families: Collection[Family] = tuple(Family)) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "hearing of written rules"):
                observer.applied(wrote, families)

    def stepped(self) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "looking at a step"):
                observer.stepped()

    def dataplane_switched(self) -> None:
        """Notify all observers."""
        for observer in self._observers:
            with self._around(observer, "hearing of another dataplane"):
                observer.dataplane_switched()

    def heartbeat(self) -> None:
        """Notify all observers that need it."""
        for observer in self._with_heartbeat:
            with self._around(observer, "sending a heartbeat"):
                observer.heartbeat()

    def _around(self, observer: Observer, doing: str) -> AbstractContextManager[None]:
        return self.containment.contain(type(observer).__name__, doing)
