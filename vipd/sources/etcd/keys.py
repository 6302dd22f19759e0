"""The known keys of etcd, and their declarations. Uses no network, disk or clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from vipd.declaration.problems import Declaration, more_problems
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.model import limits
from vipd.model.service import RegisteredBackend
from vipd.sources.etcd.registered_backends import RegisteredBackends
from vipd.sources.etcd.snapshot_file import Record, SnapshotState, StoredKey, accepted_record, change_record
from vipd.sources.etcd.values import Layout, ParsedValue, read_value, unit_name
from vipd.sources.removal_guard import RemovalGuard


@dataclass(frozen=True, slots=True)
class KeyWrite:
    """A key's new value, read."""

    key: str
    value: str
    mod_revision: int
    parsed: ParsedValue
    create_revision: int = 0


@dataclass(frozen=True, slots=True)
class StoreChange:
    """Differences in the store up to a revision."""

    cluster: str
    revision: int
    written: tuple[KeyWrite, ...] = ()
    removed: frozenset[str] = frozenset()
    store_replaced: bool = False
    """The store is not the same: another cluster, or an older state."""


def _internal(declaration: Declaration) -> bool:
    return any(problem.trace for problem in declaration.problems)


class EtcdKeys:
    """Every followed key, the unit of each service, and the registered backends.

    `note` is given a record of each change, to be kept on disk.
    """

    def __init__(self, layout: Layout, guard: RemovalGuard, note: Callable[[Record], None]) -> None:
        self._layout, self._guard, self._note = layout, guard, note
        self._kept: dict[str, StoredKey] = {}
        self._overrides: dict[str, str] = {}
        """Values below `overrides/` by the rest of their key."""
        self._present: Counter[str] = Counter()
        """Number of keys in the store, without held ones, for each followed start."""
        self._services: Counter[str] = Counter()
        """The same for each folder of services."""
        self._changed: set[str] = set()
        """Services whose declaration or registrations changed since they were last taken."""
        self._units: dict[str, Unit] = {}
        self._problems = 0
        """Of all candidates."""
        self._backends = RegisteredBackends()
        self._recently_removed: dict[str, tuple[StoredKey, Unit]] = {}
        self._not_accepted: set[str] = set()
        self.rejected: frozenset[str] = frozenset()
        """Services whose current value does not serve."""
        self.cluster, self.revision = "", 0
        self.last_change = 0
        """Revision of the newest known change; only changes of followed keys affect it."""
        self.store_replaced = False
        """Removals are held because the store is not the same."""

    @property
    def kept(self) -> Mapping[str, StoredKey]:
        """Every key, including the held ones."""
        return MappingProxyType(self._kept)

    @property
    def units(self) -> Mapping[str, Unit]:
        """One unit for each service, and one for each registration that cannot be read."""
        return MappingProxyType(self._units)

    @property
    def held(self) -> frozenset[str]:
        """Keys that are gone from the store and continue to serve."""
        return frozenset(self._guard.held)

    @property
    def registrations(self) -> Mapping[str, tuple[RegisteredBackend, ...]]:
        """As `RegisteredBackends.lists`."""
        return self._backends.by_service

    def overrides(self) -> dict[str, str]:
        """Values below `overrides/` by the rest of their key, unread."""
        return dict(self._overrides)

    def count(self, start: str) -> int:
        """Number of keys in the store that begin with one of the layout's starts."""
        return self._present[start]

    def take_changed(self) -> set[str]:
        """The services whose declaration or registrations changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def state(self) -> SnapshotState:
        """All that must outlive a restart."""
        return SnapshotState(self.cluster, self.revision, self._kept)

    def restore(self, state: SnapshotState) -> None:
        """Start with the state of an earlier run."""
        self.cluster, self.revision = state.cluster, state.revision
        for key, kept in state.keys.items():
            accepted = EMPTY_DECLARATION
            meaning = read_value(self._layout, key, kept.value, accepted=kept.accepted == kept.value)
            if kept.accepted == kept.value and isinstance(meaning, Declaration):
                accepted = _served(meaning)
            elif kept.accepted is not None:
                earlier = read_value(self._layout, key, kept.accepted, accepted=True)
                accepted = _served(earlier) if isinstance(earlier, Declaration) else EMPTY_DECLARATION
                self._backends.set(key, earlier)
            self._keep(key, kept)
            self._set_parsed(key, meaning, accepted)
            self.last_change = max(self.last_change, kept.mod_revision)
            if kept.held:
                self._guard.held.add(key)
                self._hold(key, kept, Unit(accepted, accepted, kept.create_revision))
        self._rebuild_backends()

    def apply(self, change: StoreChange, now: float) -> bool:
        """Apply a change; returns whether any declaration changed. `now`: a monotonic clock."""
        written = [w for w in change.written if not self._same(w)]
        removed = frozenset(change.removed & self._kept.keys())
        for each in change.written:
            self._guard.key_written(each.key)
        gone, held = self._apply_removals(removed, now, change.store_replaced)
        for each in written:
            self._write(each)
        self._rebuild_backends()
        self.cluster, self.revision = change.cluster, change.revision
        if change.written or removed:
            self.last_change = change.revision
        self.store_replaced = bool(self._guard.held) and (self.store_replaced or change.store_replaced)
        if change.written or removed or change.store_replaced:
            put = [(key, self._kept[key]) for key in (*(w.key for w in change.written), *held)]
            self._note(change_record(self.cluster, self.revision, put, gone))
        return bool(written or gone or held)

    def accept(self, chosen: Mapping[str, Declaration]) -> None:
        """These versions of units serve from now on."""
        taken = []
        for key in self._not_accepted:
            place = unit_name(key)
            unit = self._units[place]
            if chosen.get(place) is unit.candidate:
                self._units[place] = replace(unit, accepted=unit.candidate)
                self._keep(key, replace(self._kept[key], accepted=self._kept[key].value))
                taken.append(key)
        self._not_accepted.difference_update(taken)
        self.rejected = frozenset(self._not_accepted)
        if taken:
            self._note(accepted_record(taken))

    def retry_failed_reads(self) -> bool:
        """Parse again the values whose parsing ended in an unexpected exception; returns whether any
        succeeded."""
        broken = {place for place, unit in self._units.items() if _internal(unit.candidate)}
        keys = [key for key in self._kept if unit_name(key) in broken] if broken else []
        changed = False
        for key in keys:
            kept, unit = self._kept[key], self._units[unit_name(key)]
            meaning = read_value(self._layout, key, kept.value)
            if isinstance(meaning, Declaration) and _internal(meaning):
                continue
            if isinstance(meaning, tuple):
                self._keep(key, replace(kept, accepted=kept.value))
                self._note(accepted_record([key]))
            self._set_parsed(key, meaning, unit.accepted)
            changed = True
        self._rebuild_backends()
        return changed

    def accept_removal(self) -> int:
        """Remove every held key; returns their number."""
        held = self._guard.accept()
        for key in held:
            self._drop(key)
        self._rebuild_backends()
        self.store_replaced = False
        if held:
            self._note(change_record(self.cluster, self.revision, (), held))
        return len(held)

    def _same(self, written: KeyWrite) -> bool:
        """Whether a key is written with an unchanged value: only its revision is recorded."""
        kept = self._kept.get(written.key)
        if kept is None or kept.held or kept.value != written.value:
            return False
        if kept.create_revision != written.create_revision:
            return False
        self._keep(written.key, replace(kept, mod_revision=written.mod_revision))
        return True

    def _apply_removals(
        self, removed: frozenset[str], now: float, foreign: bool
    ) -> tuple[list[str], list[str]]:
        """Decide which keys are removed and which are held; returns both. Leases expire by themselves: unless
        the store is another one, backends and overrides are always removed."""
        services = {key for key in removed if key.startswith(self._layout.services)}
        verdict = self._guard.decide(removed if foreign else services, self._services, now, foreign)
        gone = [*verdict.allowed, *(() if foreign else removed - services)]
        held = [key for key in verdict.held if self._serves(key)]
        lost = [key for key in verdict.held if not self._serves(key)]
        for key in held:
            self._hold(key, self._kept[key], self._units.get(unit_name(key), Unit(EMPTY_DECLARATION)))
        held += self._restore_removed(verdict.restore)
        self._keep_recently_removed(gone)
        for key in (*gone, *lost):
            self._drop(key)
        self._guard.held.difference_update(lost)
        return [*gone, *lost], held

    def _serves(self, key: str) -> bool:
        """Whether holding a key keeps a service: one that was never accepted serves no client."""
        return not key.startswith(self._layout.services) or self._kept[key].accepted is not None

    def _hold(self, key: str, kept: StoredKey, unit: Unit) -> None:
        self._keep(key, replace(kept, held=True))
        self._not_accepted.discard(key)
        if key.startswith(self._layout.services):
            self._set_unit(unit_name(key), replace(unit, candidate=unit.accepted))

    def _keep_recently_removed(self, gone: Iterable[str]) -> None:
        """Keep what a later verdict may restore, and no more."""
        lately = {k: v for k, v in self._recently_removed.items() if self._guard.may_restore(k)}
        for key in gone:
            if self._guard.may_restore(key) and self._serves(key):
                lately[key] = (self._kept[key], self._units[unit_name(key)])
        self._recently_removed = lately

    def _restore_removed(self, keys: Iterable[str]) -> list[str]:
        found = [key for key in keys if key in self._recently_removed]
        for key in found:
            self._hold(key, *self._recently_removed.pop(key))
        self._guard.held.difference_update(set(keys) - set(found))
        return found

    def _write(self, written: KeyWrite) -> None:
        key, before = written.key, self._kept.get(written.key)
        unit = self._units.get(unit_name(key))
        accepted, text = unit.accepted if unit else EMPTY_DECLARATION, before.accepted if before else None
        if not written.key.startswith(self._layout.services):
            text = written.value if isinstance(written.parsed, tuple) else text
        meaning = accepted if text == written.value and accepted is not EMPTY_DECLARATION else written.parsed
        revision = written.create_revision
        self._keep(key, StoredKey(written.value, written.mod_revision, text, create_revision=revision))
        self._set_parsed(key, meaning, accepted)

    def _set_parsed(self, key: str, meaning: ParsedValue, accepted: Declaration) -> None:
        place = unit_name(key)
        self._not_accepted.discard(key)
        meaning = self._with_fewer_problems(place, meaning)
        if key.startswith(self._layout.services) and isinstance(meaning, Declaration):
            self._set_unit(place, Unit(meaning, accepted, self._kept[key].create_revision))
            if meaning is not accepted:
                self._not_accepted.add(key)
        elif isinstance(meaning, Declaration):
            self._set_unit(place, Unit(meaning))
        else:
            self._set_unit(place, None)
            self._backends.set(key, meaning)

    def _keep(self, key: str, stored: StoredKey | None) -> None:
        """Set what is known of a key; None: it is gone."""
        before, layout = self._kept.get(key), self._layout
        start = next(
            (s for s in (layout.services, layout.backends, layout.overrides) if key.startswith(s)), ""
        )
        change = bool(stored and not stored.held) - bool(before and not before.held)
        self._present[start] += change
        if stored is None:
            self._kept.pop(key, None)
        else:
            self._kept[key] = stored
        if start == layout.services and change:
            folder = layout.folder(key)
            self._services[folder] += change
            if not self._services[folder]:
                del self._services[folder]
        if start == layout.overrides:
            name = key.removeprefix(start)
            if stored is None:
                self._overrides.pop(name, None)
            else:
                self._overrides[name] = stored.value

    def _set_unit(self, place: str, unit: Unit | None) -> None:
        """Replace the unit of a key, or remove it."""
        if before := self._units.get(place):
            self._problems -= len(before.candidate.problems)
        if (before and before.candidate) is not (unit and unit.candidate):
            for each in filter(None, (before, unit)):
                self._changed.update(service.name for service in each.candidate.services)
        if unit is None:
            self._units.pop(place, None)
        else:
            self._units[place] = unit
            self._problems += len(unit.candidate.problems)

    def _with_fewer_problems(self, place: str, meaning: ParsedValue) -> ParsedValue:
        """For one of very many faulty keys, the first problem alone."""
        if not isinstance(meaning, Declaration) or len(meaning.problems) < 2:
            return meaning
        before = self._units.get(place)
        others = self._problems - (len(before.candidate.problems) if before else 0)
        number = len(meaning.problems)
        if others + number <= limits.ALL_PROBLEMS:
            return meaning
        first = meaning.problems[0]
        return replace(meaning, problems=(first, more_problems(first.file, first.line, number - 1)))

    def _drop(self, key: str) -> None:
        """Remove a key and its declaration."""
        self._keep(key, None)
        self._set_unit(unit_name(key), None)
        self._not_accepted.discard(key)
        self._backends.remove(key)

    def _rebuild_backends(self) -> None:
        self._changed.update(self._backends.rebuild(self._kept))


def _served(accepted: Declaration) -> Declaration:
    """What an earlier run accepted, if this version understands all of it."""
    return accepted if accepted.ok else EMPTY_DECLARATION
