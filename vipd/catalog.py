"""From the sources' units to one snapshot of services. Pure.

A unit is what is accepted or refused as a whole: one file, or the store. Its candidate is what it says now;
its accepted version is what it last said without fault. A unit whose candidate has problems, or claims what
another already has, keeps its accepted version: bad input never hurts what runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vipd.declaration.conflicts import AddressUse, AddressUses, Claim, address_uses, claim_problem
from vipd.declaration.problems import Declaration, Problem
from vipd.model import Service

NOTHING = Declaration()


@dataclass(frozen=True, slots=True)
class Unit:
    """One file, or the store: what it says now and what was last accepted of it."""

    candidate: Declaration
    accepted: Declaration = NOTHING


@dataclass(frozen=True, slots=True)
class Merged:
    """The outcome of a merge. Of a `Catalog`, the mappings are its own and follow later merges."""

    chosen: Mapping[str, Declaration]
    """The version of each unit that serves."""
    services: Mapping[str, Service]
    """The snapshot: every service by name."""
    problems: Mapping[str, tuple[Problem, ...]]
    """What is wrong, by unit; units without problems are left out."""
    contested: bool = False
    """Two units claimed the same, or one might have."""
    touched: tuple[str, ...] = ()
    """Services that are other than at the catalog's last merge, or gone."""


class Catalog:
    """Merges again and again; a change costs what it changes while no two units claim the same.

    Units are known by identity. Those that differ from the last merge are exchanged one by one, if nothing
    that they newly claim is claimed already. Whatever is not as simple is merged from scratch.
    """

    def __init__(self) -> None:
        self._merged = Merged({}, {}, {})
        self._chosen: dict[str, Declaration] = {}
        self._services: dict[str, Service] = {}
        self._owners: dict[Claim, Service] = {}
        """Who claims what in the snapshot. Empty while it is contested."""
        self._uses = AddressUses()
        """Of its addresses, likewise."""

    def merge(self, units: Mapping[str, Unit], changed: Collection[str]) -> Merged:
        """What `merge` says of these units; `changed` names those that are other than at the last call, and
        those that are gone."""
        if not changed:
            self._merged = replace(self._merged, touched=())
        elif self._merged.contested or (exchange := self._exchange(units, changed)) is None:
            self._start_over(units)
        else:
            self._take(units, changed, exchange)
        return self._merged

    def _exchange(self, units: Mapping[str, Unit], changed: Collection[str]) -> _Exchange | None:
        """What comes and goes with the changed units; None if that is not for them alone to say."""
        chosen = {name: _first_choice(units[name]) for name in changed if name in units}
        leaving, coming = list[Service](), list[Service]()
        for name in changed:
            old = self._chosen.get(name, NOTHING).services
            new = chosen.get(name, NOTHING).services
            if new is old:
                continue
            stays = {id(service) for service in old} & {id(service) for service in new}
            leaving += [service for service in old if id(service) not in stays]
            coming += [service for service in new if id(service) not in stays]
        gone = {id(service) for service in leaving}
        owners = dict[Claim, Service]()
        for service in coming:
            for claim in _claims_of(service):
                owner = self._owners.get(claim)
                if claim in owners or not (owner is None or id(owner) in gone):
                    return None
                owners[claim] = service
        uses = self._uses.changed(leaving, coming)
        return None if uses is None else _Exchange(chosen, leaving, coming, owners, uses)

    def _take(self, units: Mapping[str, Unit], changed: Collection[str], exchange: _Exchange) -> None:
        staying = {service.name for service in exchange.coming}
        for service in exchange.leaving:
            for claim in _claims_of(service):
                if claim not in exchange.owners:
                    self._owners.pop(claim, None)
            if service.name not in staying:
                self._services.pop(service.name, None)
        self._owners.update(exchange.owners)
        self._uses.take(exchange.uses)
        self._services.update((service.name, service) for service in exchange.coming)
        self._chosen.update(exchange.chosen)
        problems = {name: found for name, found in self._merged.problems.items() if name not in changed}
        for name in sorted(changed):
            if name not in units:
                self._chosen.pop(name, None)
            elif not units[name].candidate.ok:
                problems[name] = units[name].candidate.problems
        touched = dict.fromkeys(service.name for service in (*exchange.leaving, *exchange.coming))
        self._merged = Merged(self._chosen, self._services, problems, touched=tuple(touched))

    def _start_over(self, units: Mapping[str, Unit]) -> None:
        before, merged = self._services, merge(units)
        self._chosen, self._services = dict(merged.chosen), dict(merged.services)
        after = self._services
        claimed = () if merged.contested else tuple(after.values())
        self._owners = {claim: service for service in claimed for claim in _claims_of(service)}
        self._uses = AddressUses(claimed)
        touched = [name for name in before if name not in after]
        touched += [name for name, service in after.items() if before.get(name) is not service]
        self._merged = replace(merged, chosen=self._chosen, services=after, touched=tuple(touched))


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Some units' versions in place of others, and what that means for the snapshot."""

    chosen: Mapping[str, Declaration]
    leaving: Sequence[Service]
    coming: Sequence[Service]
    owners: Mapping[Claim, Service]
    """What those that come claim."""
    uses: Mapping[AddressUse, int]
    """How often each of their addresses is used then."""


def merge(units: Mapping[str, Unit]) -> Merged:
    """Choose a version of every unit so that no two services claim the same name or frontend, and none has a
    backend at the address of another.

    An incumbent (a claim that is in its unit's accepted version) wins over a newcomer; between two newcomers
    the unit that sorts first wins. Each round takes something away from a unit, so this ends.
    """
    claims = _Claims()
    contested = False
    chosen = {name: _first_choice(unit) for name, unit in sorted(units.items())}
    problems: dict[str, list[Problem]] = {
        name: list(unit.candidate.problems) for name, unit in units.items() if not unit.candidate.ok
    }
    judge = _Judge(units)
    while conflicts := sorted(_conflicts(chosen, claims), key=lambda conflict: str(conflict.claim)):
        contested = True
        losers = [judge.loser(conflict, chosen) for conflict in conflicts]
        lost = [(loser, conflict) for loser, conflict in zip(losers, conflicts, strict=True)]
        for loser, found in _problems(lost).items():
            problems.setdefault(loser, []).extend(found)
        for loser in set(losers):
            mine = [conflict for of, conflict in zip(losers, conflicts, strict=True) if of == loser]
            chosen[loser] = judge.lesser(loser, chosen[loser], mine)
    services = {service.name: service for part in chosen.values() for service in part.services}
    return Merged(chosen, services, {name: tuple(found) for name, found in problems.items()}, contested)


def _problems(lost: Sequence[tuple[str, _Conflict]]) -> dict[str, list[Problem]]:
    """What is wrong with each unit that lost conflicts.

    A service without a name of its own is called by its frontend, whose conflict tells it all. So does the
    first of many services that have an address in the role that keeps a service from it.
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


def _first_choice(unit: Unit) -> Declaration:
    """The version of a unit that serves unless another unit has a better claim."""
    return unit.candidate if unit.candidate.ok else unit.accepted


def _claims_of(service: Service) -> tuple[Claim, ...]:
    return (service.name, *service.frontends())


@dataclass(frozen=True, slots=True)
class _Conflict:
    claim: Claim
    first: tuple[str, Service]
    second: tuple[str, Service]
    counter: Claim | None = None
    """What the second one claims; None: the same."""

    def claim_of(self, unit: str) -> Claim:
        """What one of the two units claims."""
        return self.claim if self.counter is None or unit == self.first[0] else self.counter

    def service_of(self, unit: str) -> Service:
        """The service with which it does."""
        return self.first[1] if unit == self.first[0] else self.second[1]

    def sides(self) -> tuple[tuple[str, Service], tuple[str, Service]]:
        """The two units, each with its service."""
        return self.first, self.second

    def problem_of(self, loser: str) -> Problem:
        """The conflict as a fault of one of the two units."""
        other = self.second if loser == self.first[0] else self.first
        return claim_problem(self.service_of(loser), self.claim_of(loser), other[1])


Users = dict[AddressUse, list[tuple[str, Service]]]


class _Claims:
    """What versions of units claim, worked out once for each."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], dict[Claim, tuple[str, Service]]] = {}
        self._uses: dict[tuple[str, int], Users] = {}

    def of(self, unit: str, declaration: Declaration) -> dict[Claim, tuple[str, Service]]:
        """Every name and frontend that a version claims, each with the unit and the service."""
        place = (unit, id(declaration))
        if place not in self._known:
            holders = ((service, (unit, service)) for service in declaration.services)
            self._known[place] = {
                claim: holder for service, holder in holders for claim in _claims_of(service)
            }
        return self._known[place]

    def uses(self, unit: str, declaration: Declaration) -> Users:
        """Every address that a version uses, each with the unit and the services."""
        place = (unit, id(declaration))
        if place not in self._uses:
            found: Users = {}
            for service in declaration.services:
                for use in address_uses(service):
                    found.setdefault(use, []).append((unit, service))
            self._uses[place] = found
        return self._uses[place]


def _conflicts(chosen: Mapping[str, Declaration], claims: _Claims) -> Iterator[_Conflict]:
    """Claims made by two units. Within one unit the parser has looked already."""
    seen: dict[Claim, tuple[str, Service]] = {}
    users: Users = {}
    for unit, declaration in chosen.items():
        yield from _conflicts_of_addresses(users, claims.uses(unit, declaration))
        mine = claims.of(unit, declaration)
        contested = {claim: seen[claim] for claim in mine.keys() & seen.keys()}
        for claim, holder in contested.items():
            yield _Conflict(claim, holder, mine[claim])
        seen.update(mine)
        seen.update(contested)


def _conflicts_of_addresses(seen: Users, mine: Users) -> Iterator[_Conflict]:
    """Addresses that a unit uses in one role and those before it in the other; then they are all `seen`.

    Each service on either side is in one of the conflicts, so that one round is enough for all of them.
    """
    for use, here in mine.items():
        there = seen.get(use.opposite())
        if not there:
            continue
        pairs = [(there[0], holder) for holder in here] + [(holder, here[0]) for holder in there[1:]]
        for first, second in pairs:
            yield _Conflict(use.opposite(), first, second, use)
    for use, holders in mine.items():
        seen.setdefault(use, []).extend(holders)


class _Judge:
    """Says which unit of a conflict must give way, and how far."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self._units = units
        self._claims: dict[str, frozenset[Claim]] = {}

    def loser(self, conflict: _Conflict, chosen: Mapping[str, Declaration]) -> str:
        """The unit that gives way: a newcomer, and of two newcomers the one that sorts later."""
        first, second = conflict.first[0], conflict.second[0]
        for name in (second, first):
            if self._is_new(name, chosen) and conflict.claim_of(name) not in self._accepted_claims(name):
                return name
        return second if self._is_new(second, chosen) or not self._is_new(first, chosen) else first

    def lesser(self, name: str, chosen: Declaration, conflicts: Iterable[_Conflict]) -> Declaration:
        """What is left of a unit that gives way: its accepted version.

        If it serves no newer one it loses the services in question. Accepted versions conflict only where
        they never met before, as after a restart with another directory of declarations.
        """
        unit = self._units[name]
        if chosen is unit.candidate and chosen is not unit.accepted:
            return unit.accepted
        lost = {service for conflict in conflicts for of, service in conflict.sides() if of == name}
        return Declaration(tuple(service for service in chosen.services if service not in lost))

    def _is_new(self, name: str, chosen: Mapping[str, Declaration]) -> bool:
        unit = self._units[name]
        return chosen[name] is unit.candidate and unit.candidate is not unit.accepted

    def _accepted_claims(self, name: str) -> frozenset[Claim]:
        if name not in self._claims:
            services = self._units[name].accepted.services
            claims: set[Claim] = {claim for service in services for claim in _claims_of(service)}
            self._claims[name] = frozenset(claims.union(*map(address_uses, services)))
        return self._claims[name]
