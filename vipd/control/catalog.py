"""Merges the sources' units into one snapshot of services. Pure.

A unit, such as a file or the store, is accepted or refused as a whole. Its candidate is its current content;
its accepted version is its last content without problems. A unit whose candidate has problems, or claims what
another unit already has, keeps its accepted version, so bad input never harms running services. An unexpected
exception affects only one unit.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from vipd.control.admission import refused
from vipd.control.claim_conflicts import (
    Conflict,
    ConflictResolver,
    claims_of,
    conflicts_between,
    first_choice,
)
from vipd.declaration.conflicts import (
    MAX_NAMED,
    AddressUse,
    AddressUses,
    Claim,
    Uses,
    backend_addresses,
)
from vipd.declaration.problems import Declaration, Problem
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.model.service import Frontend, Service

Units = Mapping[str, Unit]
"""Units by name."""


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The result of a merge. If a `Catalog` returned it, later merges of that catalog update its mappings."""

    chosen: Mapping[str, Declaration]
    """The serving version of each unit."""
    services: Mapping[str, Service]
    """The snapshot: every service by name."""
    problems: Mapping[str, tuple[Problem, ...]]
    """Problems by unit; units without problems are left out."""
    losers: frozenset[str] = frozenset()
    """Units of which a service lost a conflict: another unit made the same claim, or one that excludes it."""
    dirty: tuple[str, ...] = ()
    """Services that are new, changed since the last merge, or gone."""
    taken: Collection[str] = ()
    """Services with a backend whose address has become a virtual IP of others since, or is none any more."""


class Catalog:
    """Merges incrementally: the cost of a merge depends only on what has changed, unless that conflicts with
    other units, or bears on a conflict.

    Units are compared by identity. The catalog replaces units that differ from the last merge one by one, if
    no other unit has what they newly claim, and none that lost a conflict would have what they claim or no
    longer claim. Otherwise it merges all units from scratch.

    A unit whose merge raises is held: its accepted version serves, and the exception becomes a problem of the
    unit. Each merge tries the held units again.
    """

    def __init__(self) -> None:
        self._merged = MergeResult({}, {}, {})
        self._chosen: dict[str, Declaration] = {}
        self._services: dict[str, Service] = {}
        self._owners: dict[Claim, Service] = {}
        """The owner of each claim in the snapshot."""
        self._uses = AddressUses()
        """How many services use each address in the snapshot."""
        self._contested: frozenset[Claim] = frozenset()
        """The claims and addresses of units that lost a conflict, in all of their versions."""
        self._held: dict[str, Unit] = {}
        """By name of a unit that cannot be merged: what is merged instead of it."""

    @property
    def holds(self) -> bool:
        """Whether any unit is held."""
        return bool(self._held)

    def is_frontend(self, frontend: Frontend) -> bool:
        """Whether a service of the last merge has this frontend."""
        return frontend in self._owners

    def is_vip(self, address: str) -> bool:
        """Whether a service of the last merge has this address in `address`."""
        return AddressUse(address, False) in self._uses

    def backends_at_vips(self, service: Service) -> list[str]:
        """The addresses of a service's backends that other services have taken as virtual IPs, sorted."""
        return sorted(filter(self.is_vip, backend_addresses(service)))

    def warnings(self) -> Iterator[str]:
        """One warning for all such addresses."""
        if taken := self._uses.in_both_roles:
            named = ", ".join(nsmallest(MAX_NAMED, taken))
            more = f" and {len(taken) - MAX_NAMED} more" if len(taken) > MAX_NAMED else ""
            yield (
                f"{named}{more}: both a virtual IP and the address of a backend of another service, which "
                "still gets its packets; but its check asks the service of the virtual IP; hint: choose "
                "another virtual IP, or name another backend: vipctl list shows whose"
            )

    def merge(self, units: Units, changed: Collection[str]) -> MergeResult:
        """The result of `merge` for these units. `changed` names the units that differ from the last call,
        and those that are gone. Raises only exceptions that no single unit causes."""
        changed = {*changed, *self._held}
        self._held.clear()
        try:
            if not changed:
                self._merged = replace(self._merged, dirty=(), taken=())
            elif (replacement := self._find_replacement(units, changed)) is None:
                self._merge_from_scratch(units)
            else:
                self._apply_replacement(units, changed, replacement)
        except Exception as error:
            self._hold(units, sorted(changed & units.keys()), error)
        return self._merged

    def _find_replacement(self, units: Units, changed: Collection[str]) -> _Replacement | None:
        """How the changed units change the snapshot; None if that depends on other units too."""
        if not self._merged.losers.isdisjoint(changed):
            return None
        chosen = {name: first_choice(units[name]) for name in changed if name in units}
        leaving, coming = list[Service](), list[Service]()
        for name in changed:
            old = self._chosen.get(name, EMPTY_DECLARATION).services
            new = chosen.get(name, EMPTY_DECLARATION).services
            if new is old:
                continue
            stays = {id(service) for service in old} & {id(service) for service in new}
            leaving += [service for service in old if id(service) not in stays]
            coming += [service for service in new if id(service) not in stays]
        sought = set[str]().union(*map(backend_addresses, coming))
        newly_sought = sought.difference(*map(backend_addresses, leaving))
        if self._is_contested((*leaving, *coming)) or any(map(self.is_vip, newly_sought)):
            return None
        gone = {id(service) for service in leaving}
        owners = dict[Claim, Service]()
        for service in coming:
            for claim in claims_of(service):
                owner = self._owners.get(claim)
                if claim in owners or not (owner is None or id(owner) in gone):
                    return None
                owners[claim] = service
        return _Replacement(chosen, leaving, coming, owners, self._uses.counts_after(leaving, coming))

    def _is_contested(self, services: Iterable[Service]) -> bool:
        """Whether any of them has to do with what a unit lost."""
        contested = self._contested
        return bool(contested) and not all(map(contested.isdisjoint, map(_interests, services)))

    def _apply_replacement(self, units: Units, changed: Collection[str], replacement: _Replacement) -> None:
        staying = {service.name for service in replacement.coming}
        # This may raise, so it precedes all changes.
        released = [claim for service in replacement.leaving for claim in claims_of(service)]
        for claim in released:
            self._owners.pop(claim, None)
        for service in replacement.leaving:
            if service.name not in staying:
                self._services.pop(service.name, None)
        self._owners.update(replacement.owners)
        taken = self._uses.update(replacement.uses)
        self._services.update((service.name, service) for service in replacement.coming)
        self._chosen.update(replacement.chosen)
        problems = {name: found for name, found in self._merged.problems.items() if name not in changed}
        for name in sorted(changed):
            if name not in units:
                self._chosen.pop(name, None)
            elif units[name].candidate.problems:
                problems[name] = units[name].candidate.problems
        dirty = dict.fromkeys(service.name for service in (*replacement.leaving, *replacement.coming))
        self._merged = MergeResult(
            self._chosen, self._services, problems, self._merged.losers, tuple(dirty), self._users_of(taken)
        )

    def _merge_from_scratch(self, units: Units) -> None:
        before, merged = self._services, merge(units)
        self._chosen, self._services = dict(merged.chosen), dict(merged.services)
        after = self._services
        self._owners = {claim: service for service in after.values() for claim in claims_of(service)}
        taken, self._uses = self._uses.in_both_roles, AddressUses(after.values())
        taken = taken ^ self._uses.in_both_roles
        lost = (units[name] for name in merged.losers)
        parts = (part for unit in lost for part in (unit.candidate, unit.accepted))
        self._contested = frozenset(
            interest for part in parts for service in part.services for interest in _interests(service)
        )
        dirty = [name for name in before if name not in after]
        dirty += [name for name, service in after.items() if before.get(name) is not service]
        self._merged = replace(
            merged, chosen=self._chosen, services=after, dirty=tuple(dirty), taken=self._users_of(taken)
        )

    def _users_of(self, addresses: Collection[str]) -> Collection[str]:
        """The services with a backend at one of these addresses; they are sought, since that is rare."""
        if not addresses:
            return ()
        services = self._services.values()
        return [service.name for service in services if not backend_addresses(service).isdisjoint(addresses)]

    def _view(self, units: Units, instead: Units | None = None) -> Units:
        """The units, with the held ones and those in `instead` replaced."""
        held = {name: held for name, held in self._held.items() if name in units}
        return ChainMap({**held, **(instead or {})}, units) if held or instead else units  # type: ignore[arg-type]

    def _hold(self, units: Units, changed: Sequence[str], error: Exception) -> None:
        """Hold the changed units that cannot be merged, and merge all others."""
        before = self._merged.services
        substitutes = self._substitutes(units, changed, error)
        faulty = self._faulty(units, substitutes, changed, set()) if changed else []
        self._held = {name: substitutes[name] for name in faulty}
        # Merge from scratch and mark all services dirty: a failed merge may have left partial changes.
        self._merge_from_scratch(self._view(units))
        self._merged = replace(self._merged, dirty=tuple(dict.fromkeys((*before, *self._services))))

    def _substitutes(self, units: Units, names: Sequence[str], error: Exception) -> dict[str, Unit]:
        """What to merge instead of these units: their accepted versions, or, if that fails, nothing. Raises
        `error` if the merge fails even then."""
        accepted = {name: refused(name, units[name], error, "merging it with all others") for name in names}
        nothing = {name: Unit(unit.candidate, EMPTY_DECLARATION) for name, unit in accepted.items()}
        for substitutes in (accepted, nothing):
            if _merges(self._view(units, substitutes)):
                return substitutes
        raise error

    def _faulty(
        self,
        units: Units,
        substitutes: Units,
        suspects: Sequence[str],
        known_good: set[str],
    ) -> list[str]:
        """The suspects that cannot be merged together with the `known_good` ones, found by bisection. Adds
        the others to `known_good`."""
        left_out = {name: substitutes[name] for name in substitutes.keys() - known_good - set(suspects)}
        if _merges(self._view(units, left_out)):
            known_good.update(suspects)
            return []
        if len(suspects) == 1:
            return list(suspects)
        middle = len(suspects) // 2
        first = self._faulty(units, substitutes, suspects[:middle], known_good)
        return first + self._faulty(units, substitutes, suspects[middle:], known_good)


@dataclass(frozen=True, slots=True)
class _Replacement:
    """Replaces versions of some units by new ones: the effect on the snapshot."""

    chosen: Mapping[str, Declaration]
    leaving: Sequence[Service]
    coming: Sequence[Service]
    owners: Mapping[Claim, Service]
    """The claims of the new versions."""
    uses: Uses
    """For each of their addresses: how many services use it afterwards."""


def _interests(service: Service) -> Iterator[Claim]:
    """What a service may conflict over: its claims, and the addresses that it has or sends to."""
    yield from claims_of(service)
    yield from service.addresses
    yield from backend_addresses(service)


def merge(units: Units) -> MergeResult:
    """Choose a version of every unit so that no two services claim the same name or frontend, and nobody
    newly names the address of another service as a backend.

    An incumbent (a claim that is in its unit's accepted version) wins over a newcomer. Between two newcomers,
    the unit with the lower rank wins; without ranks, the unit that sorts first. Each round removes something
    from a unit, so the loop ends.
    """
    contest = ConflictResolver(units)
    problems: dict[str, list[Problem]] = {
        name: list(unit.candidate.problems) for name, unit in units.items() if unit.candidate.problems
    }
    losers, suspects = set[str](), contest.claims()
    while conflicts := sorted(conflicts_between(contest, suspects), key=lambda conflict: str(conflict.claim)):
        lost = [(contest.loser(conflict), conflict) for conflict in conflicts]
        for loser, found in _problems(lost).items():
            problems.setdefault(loser, []).extend(found)
        losers.update(loser for loser, _ in lost)
        suspects = contest.withdraw(lost)
    chosen = contest.remaining()
    services = {service.name: service for part in chosen.values() for service in part.services}
    told = {name: tuple(found) for name, found in problems.items()}
    return MergeResult(chosen, services, told, frozenset(losers))


def _problems(lost: Sequence[tuple[str, Conflict]]) -> dict[str, list[Problem]]:
    """The problems of each unit that lost conflicts.

    A service without a declared name is named by its frontend; then only the conflict over the frontend is
    reported, not the one over the name. Of several conflicts of one service over one address in the same
    role, only the first is reported.
    """
    told = {(loser, str(c.claim)) for loser, c in lost if not isinstance(c.claim, str)}
    problems: dict[str, list[Problem]] = {}
    uses: set[tuple[str, Claim, str]] = set()
    for loser, conflict in lost:
        claim, service = conflict.claim_of(loser), conflict.service_of(loser)
        if isinstance(claim, str) and (loser, claim) in told:
            continue
        if isinstance(claim, AddressUse):
            if (loser, claim, service.name) in uses:
                continue
            uses.add((loser, claim, service.name))
        problems.setdefault(loser, []).append(conflict.problem_of(loser))
    return problems


def _merges(units: Units) -> bool:
    try:
        merge(units)
    except Exception:
        return False
    return True
