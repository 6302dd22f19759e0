"""A catalog in which an exception that nobody expected is the fault of one unit, and of no other. Pure."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from vipd.control.admission import refused
from vipd.control.catalog import Catalog, Merged, merge
from vipd.declaration.unit import NOTHING, Unit

Units = Mapping[str, Unit]


@dataclass(frozen=True, slots=True)
class _Held:
    """A unit that cannot be merged, and what is merged in its place."""

    unit: Unit
    in_place: Unit


class ContainedCatalog:
    """Merges as `Catalog` does. A unit whose merge raises is held: its accepted version serves, and the
    exception is a problem of it, until the unit is another one or `retry` is called."""

    def __init__(self) -> None:
        self._catalog = Catalog()
        self._merged = Merged({}, {}, {})
        self._held: dict[str, _Held] = {}
        self._retry = False

    @property
    def holds(self) -> bool:
        """Whether some unit is held."""
        return bool(self._held)

    def retry(self) -> None:
        """Have the next merge try again what is held."""
        self._retry = True

    def merge(self, units: Units, changed: Collection[str]) -> Merged:
        """What `Catalog.merge` says. Raises only what no unit is to blame for."""
        changed = set(changed)
        for name, held in list(self._held.items()):
            if self._retry or units.get(name) is not held.unit:
                del self._held[name]
                changed.add(name)
        self._retry = False
        try:
            merged = self._catalog.merge(self._view(units), changed)
        except Exception as error:
            merged = self._merge_without(units, sorted(changed & units.keys()), error)
        self._merged = merged
        return merged

    def _view(self, units: Units, instead: Units | None = None) -> Units:
        """The units, those that are held in another version, and so those of `instead`."""
        held = {name: held.in_place for name, held in self._held.items() if name in units}
        return ChainMap({**held, **(instead or {})}, units) if held or instead else units  # type: ignore[arg-type]

    def _merge_without(self, units: Units, changed: Sequence[str], error: Exception) -> Merged:
        """Hold those of the changed units that cannot be merged, and merge the rest."""
        in_place = self._in_place(units, changed, error)
        faulty = self._faulty(units, in_place, changed, set()) if changed else []
        self._held.update({name: _Held(units[name], in_place[name]) for name in faulty})
        # Another catalog: what a merge that failed has left half done is not to be trusted.
        self._catalog, before = Catalog(), self._merged.services
        view = self._view(units)
        merged = self._catalog.merge(view, view.keys())
        return replace(merged, touched=tuple(dict.fromkeys((*before, *merged.services))))

    def _in_place(self, units: Units, names: Sequence[str], error: Exception) -> dict[str, Unit]:
        """What to merge in place of these units: their accepted versions, or nothing of them. Raises the
        error when a merge fails even then."""
        accepted = {name: refused(name, units[name], error, "merging it with all others") for name in names}
        nothing = {name: Unit(unit.candidate, NOTHING) for name, unit in accepted.items()}
        for in_place in (accepted, nothing):
            if _merges(self._view(units, in_place)):
                return in_place
        raise error

    def _faulty(self, units: Units, in_place: Units, suspects: Sequence[str], sound: set[str]) -> list[str]:
        """Which of the suspects cannot be merged beside the `sound` ones, found in halves. Adds the others to
        `sound`."""
        left_out = {name: in_place[name] for name in in_place.keys() - sound - set(suspects)}
        if _merges(self._view(units, left_out)):
            sound.update(suspects)
            return []
        if len(suspects) == 1:
            return list(suspects)
        middle = len(suspects) // 2
        first = self._faulty(units, in_place, suspects[:middle], sound)
        return first + self._faulty(units, in_place, suspects[middle:], sound)


def _merges(units: Units) -> bool:
    try:
        merge(units)
    except Exception:
        return False
    return True
