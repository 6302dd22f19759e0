"""What all sources declare now, and which services may be other than they were when that was last taken up.

What is looked at is what has changed. The memory that this takes is only a saving: with `doubt` all of it is
given up, and everything is looked at again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from vipd.admission import AddressPolicy, Admission
from vipd.catalog import Catalog, Merged
from vipd.collecting import loading
from vipd.model import Service
from vipd.registrations import Registrar, Registrations
from vipd.sources.base import Source

IN_THREAD_ABOVE = 2000
"""Services in changed units above which the work is done beside the event loop: it takes seconds then."""


class Snapshot:
    """The services of all sources, as far as they may serve, with the backends that registered themselves."""

    def __init__(self, sources: Sequence[Source], registrations: Callable[[], Registrations]) -> None:
        self._sources, self._registrations = sources, registrations
        self._admission, self._catalog, self._registrar = Admission(), Catalog(), Registrar()
        self._merged = Merged({}, {}, {})
        self._touched: dict[str, None] = {}
        self._faults: Mapping[str, tuple[str, ...]] | None = None
        """None: nothing has been looked at yet."""

    @property
    def touched(self) -> Mapping[str, None]:
        """Services that are new, other than before, or gone, since they were last taken up, in order."""
        return self._touched

    @property
    def names(self) -> Iterable[str]:
        """All services."""
        return self._merged.services

    def service(self, name: str) -> Service | None:
        """A service, with its registered backends."""
        declared = self._merged.services.get(name)
        return None if declared is None else self._registrar.extended(declared)

    async def look(self, policy: AddressPolicy) -> Merged:
        """See what the sources hold now, and tell them which of their versions serve."""
        changed = self._admission.notice([source.units() for source in self._sources], policy)
        if self._admission.size(changed) > IN_THREAD_ABOVE:
            with loading():
                await asyncio.to_thread(self._merge, changed)
        else:
            self._merge(changed)
        self._touched.update(dict.fromkeys(self._registrar.take(self._registrations())))
        if changed or self._faults is None or any(self._faults.values()):
            for source in self._sources:
                source.accepted(self._merged.chosen)
        self._faults = {source.location: source.faults() for source in self._sources}
        return self._merged

    def faults(self) -> Mapping[str, tuple[str, ...]]:
        """What was wrong with the sources themselves at the last look, by their place."""
        return self._faults or {}

    def taken_up(self) -> None:
        """All that was touched is known now where it has to be."""
        for name in self._touched:
            if name not in self._merged.services:
                self._registrar.forget(name)
        self._touched = {}

    def doubt(self, known: Iterable[str]) -> None:
        """Trust nothing that is remembered: all services are touched, and those `known` elsewhere too."""
        self._admission, self._catalog, self._registrar = Admission(), Catalog(), Registrar()
        self._touched.update(dict.fromkeys(known))

    def _merge(self, changed: set[str]) -> None:
        admitted = self._admission.admit(changed)
        self._merged = self._catalog.merge(self._admission.units, admitted)
        self._touched.update(dict.fromkeys(self._merged.touched))
