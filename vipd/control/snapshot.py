"""The current declarations of all sources, and the services that differ from the last merge.

Only changes are read, admitted and merged. The state kept for that is only a cache: `invalidate`
drops it, and the next merge starts from scratch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from vipd.control.address_policy import AddressPolicy
from vipd.control.admission import Admission
from vipd.control.catalog import Catalog, MergeResult
from vipd.control.named_backends import NamedBackends
from vipd.control.registrations import Registrar, Registrations
from vipd.declaration.problems import Problem
from vipd.declaration.unit import Unit
from vipd.host.containment import Containment
from vipd.host.gc_control import gc_paused
from vipd.model.check import Check
from vipd.model.service import Service
from vipd.resolver.resolver import Resolver
from vipd.sources.base import Source

AskHost = Callable[[Collection[Check]], Awaitable[Mapping[Check, tuple[str, ...]]]]
"""Returns what this host lacks for each of some checks."""

ACCEPT_SECONDS = 2.0
"""How long a step waits until copies of accepted files are on disk: each takes some milliseconds."""

IN_THREAD_ABOVE = 200
"""Services above which a merge is done beside the event loop: it takes 10 ms and more then."""


class Snapshot:
    """The services of all sources, as far as they may serve, with the backends that registered themselves."""

    def __init__(
        self,
        sources: Sequence[Source],
        registrations: Callable[[], Registrations],
        containment: Containment,
        resolver: Resolver | None = None,
    ) -> None:
        """`resolver` looks up backends' names; None: they stand for no backend."""
        self._resolver = resolver
        self._sources, self._registrations, self._containment = sources, registrations, containment
        self._units: dict[str, Mapping[str, Unit]] = {}
        """The units of each source when it was last read, by the source's place."""
        self._accepting: dict[str, asyncio.Future[None]] = {}
        """The last writing of each source that writes."""
        self._registered_last: Registrations = {}
        self._admission, self._catalog, self._registrar = Admission(), Catalog(), Registrar()
        self._named = NamedBackends(self._catalog.is_vip, self._catalog.is_frontend)
        self._merged = MergeResult({}, {}, {})
        self._faults: Mapping[str, tuple[str, ...]] | None = None
        """None: there was no merge yet."""

    @property
    def names(self) -> Iterable[str]:
        """All services."""
        return self._merged.services

    def service(self, name: str) -> Service | None:
        """A service, with the backends of its names and its registered ones."""
        declared = self._merged.services.get(name)
        if declared is None:
            return None
        return self._registrar.with_registered(self._named.with_resolved(declared))

    def ignored(self, name: str) -> tuple[Problem, ...]:
        """Why backends that registered themselves for a service, or that its names resolve to, do not take
        part in it."""
        return (*self._registrar.ignored(name), *self._named.ignored(name))

    async def merge(self, policy: AddressPolicy, ask: AskHost) -> MergeResult:
        """Merge the sources' current units, and report to them which versions serve. `ask` returns what
        this host lacks for checks."""
        changed = self._admission.update_units([self._units_of(source) for source in self._sources], policy)
        answers = await ask(self._admission.checks_to_query(changed))
        joining = self._registrar.set_registrations(self._registered(), policy)
        if self._resolver is not None:
            joining |= self._named.set_answers(self._resolver.answers, policy)
            self._resolver.usable = self._named.may_serve
        # Removed units count as well as new ones, and one conflict requires a merge of all services from
        # scratch.
        known = len(self._merged.services) if changed or self._catalog.holds else 0
        if known + self._admission.size(changed) + len(joining) > IN_THREAD_ABOVE:
            with gc_paused():
                merged = await asyncio.to_thread(self._merge, changed, answers, joining)
        else:
            merged = self._merge(changed, answers, joining)
            await asyncio.sleep(0)  # the event loop gets its turn: merging and keeping copies take a while
        self._follow_names(merged.dirty)
        if changed or self._faults is None or any(self._faults.values()):
            for source in self._sources:
                await self._accept(source)
        self._faults = self._faults_of_sources()
        ignored = self._registrar.problems()
        return replace(merged, problems={**ignored, **merged.problems}) if ignored else merged

    @property
    def internal_errors(self) -> bool:
        """Whether an unexpected exception keeps any unit from being merged."""
        return self._catalog.holds

    def faults(self) -> Mapping[str, tuple[str, ...]]:
        """Faults of the sources themselves at the last merge, by their place."""
        return self._faults or {}

    def warnings(self) -> list[str]:
        """Things that are left out, besides those that are refused."""
        return [*self._registrar.warnings(), *self._named.warnings(), *self._catalog.warnings()]

    def backends_at_vips(self, service: Service) -> list[str]:
        """The addresses of a service's backends that other services have as virtual IPs, sorted."""
        return self._catalog.backends_at_vips(service)

    def invalidate(self) -> None:
        """Drop the cached state: the next merge reads, admits and merges everything anew."""
        self._admission, self._catalog, self._registrar = Admission(), Catalog(), Registrar()
        self._named = NamedBackends(self._catalog.is_vip, self._catalog.is_frontend)

    def _follow_names(self, services: Iterable[str]) -> None:
        """Have the names of these services looked up."""
        if self._resolver is None:
            return
        with self._containment.contain("names", "following those of changed services"):
            for name in services:
                self._resolver.follow(name, self._merged.services.get(name))

    def _units_of(self, source: Source) -> Mapping[str, Unit]:
        """A source's units; while it fails unexpectedly, its previous ones."""
        with self._containment.contain(source.location, "reading its units"):
            self._units[source.location] = source.units()
        return self._units.get(source.location, {})

    async def _accept(self, source: Source) -> None:
        """Report to a source which of its versions serve. After a timeout the call continues by itself and is
        reported as a fault."""
        if not source.writes:
            with self._containment.contain(source.location, "keeping what was accepted"):
                source.save_accepted(self._merged.chosen)
            return
        running = self._accepting.get(source.location)
        if running is None or running.done():
            running = asyncio.ensure_future(
                asyncio.to_thread(source.save_accepted, dict(self._merged.chosen))
            )
            self._accepting[source.location] = running
        await asyncio.wait((running,), timeout=ACCEPT_SECONDS)
        with self._containment.contain(source.location, "keeping what was accepted"):
            if not running.done():
                raise TimeoutError(f"the disk takes more than {ACCEPT_SECONDS:.0f} s")
            running.result()

    def _faults_of_sources(self) -> Mapping[str, tuple[str, ...]]:
        found = dict[str, tuple[str, ...]]()
        for source in self._sources:
            with self._containment.contain(source.location, "asking for its faults"):
                found[source.location] = source.faults()
        return found

    def _registered(self) -> Registrations:
        """All registrations; while they cannot be read, the previous ones."""
        with self._containment.contain("registered backends", "reading them"):
            self._registered_last = self._registrations()
        return self._registered_last

    def _merge(
        self, changed: set[str], answers: Mapping[Check, tuple[str, ...]], joining: Collection[str]
    ) -> MergeResult:
        admitted = self._admission.admit(changed, lambda check: answers.get(check, ()))
        self._merged = self._catalog.merge(self._admission.units, admitted)
        judged_again = self._named.recheck() if self._merged.dirty else ()
        dirty = tuple(dict.fromkeys((*self._merged.dirty, *joining, *judged_again)))
        self._registrar.update(dirty, self._named.update(dirty, self._merged.services))
        return replace(self._merged, dirty=dirty)
