"""The known keys of etcd, and what they declare. Uses no network, disk or clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vipd.declaration.problems import Declaration, more_problems
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.model import limits
from vipd.model.service import Backend, RegisteredBackend
from vipd.sources.etcd.values import Layout, ParsedValue, read_value, unit_name
from vipd.sources.removal_guard import RemovalGuard

if TYPE_CHECKING:
    from vipd.sources.etcd.client import KeyValue


@dataclass(frozen=True, slots=True)
class StoredKey:
    """One key. Values are text, undecodable bytes as lone surrogates."""

    value: str
    mod_revision: int
    accepted: str | None = None
    """The value that serves, which may be an older one."""
    held: bool = False
    """The key is gone from the store, and its removal is held."""
    create_revision: int = 0
    """0: unknown."""


@dataclass(frozen=True, slots=True)
class StoreChange:
    """Differences in the store up to a revision."""

    cluster: str
    revision: int
    written: Mapping[KeyValue, ParsedValue] = field(default_factory=dict)
    """New values, and what each declares."""
    removed: frozenset[str] = frozenset()
    store_replaced: bool = False
    """The store is not the same: another cluster, or an older state."""


class EtcdKeys:
    """Every followed key, the unit of each service, and the registered backends.

    `note` is given the new state of keys with each change, to be kept on disk; None: a key is gone.
    """

    def __init__(
        self,
        layout: Layout,
        guard: RemovalGuard,
        note: Callable[[Mapping[str, StoredKey | None]], None],
    ) -> None:
        self._layout, self._guard, self._note = layout, guard, note
        self.kept: dict[str, StoredKey] = {}
        """Every key, including the held ones. To be read only, as `units` and `overrides`."""
        self.units: dict[str, Unit] = {}
        """One unit for each service, and one for each registration that cannot be read."""
        self.overrides: dict[str, str] = {}
        """Values below `overrides/` by the rest of their key, unread."""
        self._backends = RegisteredBackends()
        self.registrations = self._backends.by_service
        self._present: Counter[str] = Counter()
        """Number of keys in the store, without held ones, for each followed start."""
        self._services: Counter[str] = Counter()
        """The same for each folder of services."""
        self._changed: set[str] = set()
        """Services whose declaration or registrations changed since they were last taken."""
        self._problems = 0
        """Of all candidates."""
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
    def held(self) -> frozenset[str]:
        """Keys that are gone from the store and continue to serve."""
        return frozenset(self._guard.held)

    def count(self, start: str) -> int:
        """Number of keys in the store that begin with one of the layout's starts."""
        return self._present[start]

    def stored(self, key: str) -> StoredKey | None:
        """What the store has at a key, as far as is known; None: nothing."""
        stored = self.kept.get(key)
        return None if stored is None or stored.held else stored

    def mod_revision(self, key: str) -> int:
        """Revision at which a key was last written, as far as is known; 0: it is not in the store."""
        stored = self.stored(key)
        return stored.mod_revision if stored else 0

    def take_changed(self) -> set[str]:
        """The services whose declaration or registrations changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def restore(self, cluster: str, revision: int, keys: Mapping[str, StoredKey]) -> None:
        """Start with the state of an earlier run."""
        self.cluster, self.revision = cluster, revision
        for key, stored in keys.items():
            same = stored.accepted == stored.value
            parsed = read_value(self._layout, key, stored.value, accepted=same)
            earlier: ParsedValue = parsed if same and isinstance(parsed, Declaration) else None
            if not same and stored.accepted is not None:
                earlier = read_value(self._layout, key, stored.accepted, accepted=True)
                self._backends.set(key, earlier)
            # What an earlier run accepted serves if this version understands all of it.
            accepted = earlier if isinstance(earlier, Declaration) and earlier.ok else EMPTY_DECLARATION
            self._keep(key, stored)
            self._set_parsed(key, parsed, accepted)
            self.last_change = max(self.last_change, stored.mod_revision)
            if stored.held:
                self._guard.held.add(key)
                self._hold(key, stored, Unit(accepted, accepted, stored.create_revision))
        self._rebuild_backends()

    def apply(self, change: StoreChange, now: float) -> bool:
        """Apply a change; returns whether any declaration changed. `now`: a monotonic clock."""
        written = [kv for kv in change.written if not self._same(kv)]
        removed = change.removed & self.kept.keys()
        for kv in change.written:
            self._guard.key_written(kv.key)
        gone, held = self._apply_removals(removed, now, change.store_replaced)
        for kv in written:
            self._write(kv, change.written[kv])
        self._rebuild_backends()
        self.cluster, self.revision = change.cluster, change.revision
        if change.written or removed:
            self.last_change = change.revision
        self.store_replaced = bool(self._guard.held) and (self.store_replaced or change.store_replaced)
        if change.written or removed or change.store_replaced:
            self._note_keys(*(kv.key for kv in change.written), *held, *gone)
        return bool(written or gone or held)

    def accept(self, chosen: Mapping[str, Declaration]) -> None:
        """These versions of units serve from now on."""
        names = {key: unit_name(key) for key in self._not_accepted}
        taken = [key for key, name in names.items() if chosen.get(name) is self.units[name].candidate]
        for key in taken:
            self.units[names[key]] = replace(self.units[names[key]], accepted=chosen[names[key]])
            self._keep(key, replace(self.kept[key], accepted=self.kept[key].value))
        self._not_accepted.difference_update(taken)
        self.rejected = frozenset(self._not_accepted)
        if taken:
            self._note_keys(*taken)

    def accept_removal(self) -> int:
        """Remove every held key; returns their number."""
        held = self._guard.accept()
        for key in held:
            self._drop(key)
        self._rebuild_backends()
        self.store_replaced = False
        if held:
            self._note_keys(*held)
        return len(held)

    def _note_keys(self, *keys: str) -> None:
        self._note({key: self.kept.get(key) for key in keys})

    def _same(self, kv: KeyValue) -> bool:
        """Whether a key is written with an unchanged value: only its revision is recorded."""
        stored = self.stored(kv.key)
        if stored is None or (stored.value, stored.create_revision) != (kv.value, kv.create_revision):
            return False
        self._keep(kv.key, replace(stored, mod_revision=kv.mod_revision))
        return True

    def _apply_removals(
        self, removed: frozenset[str], now: float, replaced: bool
    ) -> tuple[list[str], list[str]]:
        """Decide which keys are removed and which are held; returns both. Leases expire by themselves: unless
        the store is another one, backends and overrides are always removed."""
        services = {key for key in removed if key.startswith(self._layout.services)}
        verdict = self._guard.decide(removed if replaced else services, self._services, now, replaced)
        gone = [*verdict.allowed, *(() if replaced else removed - services)]
        held = [key for key in verdict.held if self._serves(key)]
        lost = verdict.held.difference(held)
        for key in held:
            self._hold(key, self.kept[key], self.units.get(unit_name(key), Unit(EMPTY_DECLARATION)))
        held += self._restore_removed(verdict.restore)
        self._keep_recently_removed(gone)
        for key in (*gone, *lost):
            self._drop(key)
        self._guard.held.difference_update(lost)
        return [*gone, *lost], held

    def _serves(self, key: str) -> bool:
        """Whether holding a key keeps a service: one that was never accepted serves no client."""
        return not key.startswith(self._layout.services) or self.kept[key].accepted is not None

    def _hold(self, key: str, stored: StoredKey, unit: Unit) -> None:
        self._keep(key, replace(stored, held=True))
        self._not_accepted.discard(key)
        if key.startswith(self._layout.services):
            self._set_unit(unit_name(key), replace(unit, candidate=unit.accepted))

    def _keep_recently_removed(self, gone: Iterable[str]) -> None:
        """Keep what a later verdict may restore, and no more."""
        lately = {k: v for k, v in self._recently_removed.items() if self._guard.may_restore(k)}
        for key in gone:
            if self._guard.may_restore(key) and self._serves(key):
                lately[key] = (self.kept[key], self.units[unit_name(key)])
        self._recently_removed = lately

    def _restore_removed(self, keys: Collection[str]) -> list[str]:
        restored = [key for key in keys if key in self._recently_removed]
        for key in restored:
            self._hold(key, *self._recently_removed.pop(key))
        self._guard.held.difference_update(set(keys).difference(restored))
        return restored

    def _write(self, kv: KeyValue, parsed: ParsedValue) -> None:
        key, stored = kv.key, self.kept.get(kv.key)
        unit = self.units.get(unit_name(key), Unit(EMPTY_DECLARATION))
        text = stored.accepted if stored else None
        if isinstance(parsed, tuple):
            text = kv.value
        if text == kv.value and unit.accepted is not EMPTY_DECLARATION:
            parsed = unit.accepted
        self._keep(key, StoredKey(kv.value, kv.mod_revision, text, False, kv.create_revision))
        self._set_parsed(key, parsed, unit.accepted)

    def _set_parsed(self, key: str, parsed: ParsedValue, accepted: Declaration) -> None:
        name = unit_name(key)
        self._not_accepted.discard(key)
        if not isinstance(parsed, Declaration):
            self._set_unit(name, None)
            self._backends.set(key, parsed)
            return
        parsed = self._with_fewer_problems(name, parsed)
        if not key.startswith(self._layout.services):
            self._set_unit(name, Unit(parsed))
            return
        self._set_unit(name, Unit(parsed, accepted, self.kept[key].create_revision))
        if parsed is not accepted:
            self._not_accepted.add(key)

    def _keep(self, key: str, stored: StoredKey | None) -> None:
        """Set what is known of a key; None: it is gone."""
        layout, change = self._layout, bool(stored and not stored.held) - bool(self.stored(key))
        start = next((start for start in layout.followed if key.startswith(start)), "")
        self._present[start] += change
        if start == layout.services and change:
            folder = layout.folder(key)
            self._services[folder] += change
            if not self._services[folder]:
                del self._services[folder]
        if stored is not None:
            self.kept[key] = stored
        else:
            self.kept.pop(key, None)
        if start == layout.overrides and stored is not None:
            self.overrides[key.removeprefix(start)] = stored.value
        else:
            self.overrides.pop(key.removeprefix(start), None)

    def _set_unit(self, name: str, unit: Unit | None) -> None:
        """Replace the unit of a key, or remove it."""
        before = self.units.get(name)
        if unit is not None:
            self.units[name] = unit
        else:
            self.units.pop(name, None)
        same = before is not None and unit is not None and before.candidate is unit.candidate
        for one, sign in ((before, -1), (unit, 1)):
            if one is not None and not same:
                self._problems += sign * len(one.candidate.problems)
                self._changed.update(service.name for service in one.candidate.services)

    def _with_fewer_problems(self, name: str, declared: Declaration) -> Declaration:
        """For one of very many faulty keys, the first problem alone."""
        number, before = len(declared.problems), self.units.get(name)
        others = self._problems - (len(before.candidate.problems) if before else 0)
        if number < 2 or others + number <= limits.ALL_PROBLEMS:
            return declared
        first = declared.problems[0]
        return replace(declared, problems=(first, more_problems(first.file, first.line, number - 1)))

    def _drop(self, key: str) -> None:
        """Remove a key and its declaration."""
        self._keep(key, None)
        self._set_unit(unit_name(key), None)
        self._not_accepted.discard(key)
        self._backends.remove(key)

    def _rebuild_backends(self) -> None:
        self._changed.update(self._backends.rebuild(self.kept))


class RegisteredBackends:
    """The backends that registered themselves, by their keys and by service."""

    def __init__(self) -> None:
        self._by_key: dict[str, tuple[str, Backend]] = {}
        self._keys: dict[str, set[str]] = {}
        """By service."""
        self._changed: set[str] = set()
        """Services whose backends changed since their list was made."""
        self.by_service: dict[str, tuple[RegisteredBackend, ...]] = {}
        """Registered backends by service, in order of their keys; above a service's limit, those that
        were written first. Unchanged lists are the same object."""

    def set(self, key: str, parsed: ParsedValue) -> None:
        """Set the backend of a key; a value that is no backend changes nothing."""
        if isinstance(parsed, tuple):
            service, new = parsed[0], key not in self._by_key
            self._by_key[key] = parsed
            self._keys.setdefault(service, set()).add(key)
            # A key that comes when others fill the list already was written after them.
            if not (new and len(self.by_service.get(service, ())) >= limits.BACKENDS):
                self._changed.add(service)

    def remove(self, key: str) -> None:
        """The key is no more, if it was one of a backend."""
        if registered := self._by_key.pop(key, None):
            self._keys[registered[0]].discard(key)
            self._changed.add(registered[0])

    def rebuild(self, kept: Mapping[str, StoredKey]) -> Collection[str]:
        """Rebuild the changed lists, each once for all keys; returns their services."""
        for service in self._changed:
            keys = sorted(self._keys[service])
            if not keys:
                del self._keys[service]
                self.by_service.pop(service, None)
                continue
            if len(keys) > limits.BACKENDS:
                first = sorted(keys, key=lambda key: kept[key].mod_revision)[: limits.BACKENDS]
                keys = sorted(first)
            self.by_service[service] = tuple(
                RegisteredBackend(unit_name(key), self._by_key[key][1]) for key in keys
            )
        rebuilt, self._changed = self._changed, set()
        return rebuilt
