"""From the sources' units to one snapshot of services. Pure.

A unit is what is accepted or refused as a whole: one file, or the store. Its candidate is what it says now;
its accepted version is what it last said without fault. A unit whose candidate has problems, or claims what
another already has, keeps its accepted version: bad input never hurts what runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from vipd.declaration.conflicts import claim_problem
from vipd.declaration.problems import Declaration, Problem
from vipd.model import Frontend, Service

NOTHING = Declaration()

Claim = Frontend | str
"""What only one service can have: a frontend, or a name."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One file, or the store: what it says now and what was last accepted of it."""

    candidate: Declaration
    accepted: Declaration = NOTHING


@dataclass(frozen=True, slots=True)
class Merged:
    """The outcome of a merge."""

    chosen: Mapping[str, Declaration]
    """The version of each unit that serves."""
    services: Mapping[str, Service]
    """The snapshot: every service by name."""
    problems: Mapping[str, tuple[Problem, ...]]
    """What is wrong, by unit; units without problems are left out."""


def merge(units: Mapping[str, Unit], claims: Claims | None = None) -> Merged:
    """Choose a version of every unit so that no two services claim the same name or frontend.

    An incumbent (a claim that is in its unit's accepted version) wins over a newcomer; between two newcomers
    the unit that sorts first wins. Each round takes something away from a unit, so this ends. `claims` of an
    earlier merge saves looking at what has not changed.
    """
    claims = claims or Claims()
    claims.keep(units)
    chosen = {
        name: unit.candidate if unit.candidate.ok else unit.accepted for name, unit in sorted(units.items())
    }
    problems: dict[str, list[Problem]] = {
        name: list(unit.candidate.problems) for name, unit in units.items() if not unit.candidate.ok
    }
    judge = _Judge(units)
    while conflicts := sorted(_conflicts(chosen, claims), key=lambda conflict: str(conflict.claim)):
        losers = [judge.loser(conflict, chosen) for conflict in conflicts]
        lost = [(loser, conflict) for loser, conflict in zip(losers, conflicts, strict=True)]
        # A service without a name of its own is called by its frontend, whose conflict tells it all.
        told = {(loser, str(c.claim)) for loser, c in lost if not isinstance(c.claim, str)}
        for loser, conflict in lost:
            if not (isinstance(conflict.claim, str) and (loser, conflict.claim) in told):
                problems.setdefault(loser, []).append(conflict.problem_of(loser))
        for loser in set(losers):
            mine = [conflict for of, conflict in zip(losers, conflicts, strict=True) if of == loser]
            chosen[loser] = judge.lesser(loser, chosen[loser], mine)
    services = {service.name: service for part in chosen.values() for service in part.services}
    return Merged(chosen, services, {name: tuple(found) for name, found in problems.items()})


@dataclass(frozen=True, slots=True)
class _Conflict:
    claim: Claim
    first: tuple[str, Service]
    second: tuple[str, Service]

    def sides(self) -> tuple[tuple[str, Service], tuple[str, Service]]:
        """The two units, each with its service."""
        return self.first, self.second

    def problem_of(self, loser: str) -> Problem:
        """The conflict as a fault of one of the two units."""
        mine, other = (self.first, self.second) if loser == self.first[0] else (self.second, self.first)
        return claim_problem(mine[1], self.claim, other[1])


class Claims:
    """What versions of units claim, worked out once for each."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[Declaration, dict[Claim, tuple[str, Service]]]]] = {}

    def of(self, unit: str, declaration: Declaration) -> dict[Claim, tuple[str, Service]]:
        """Every name and frontend that a version claims, each with the unit and the service."""
        known = self._known.setdefault(unit, [])
        for version, claims in known:
            if version is declaration:
                return claims
        found: dict[Claim, tuple[str, Service]] = {}
        for service in declaration.services:
            holder = (unit, service)
            found[service.name] = holder
            found.update(dict.fromkeys(service.frontends(), holder))
        # The candidate and the accepted version are all that is ever asked for.
        self._known[unit] = [*known[-1:], (declaration, found)]
        return found

    def keep(self, units: Collection[str]) -> None:
        """Forget units that are no more."""
        for unit in self._known.keys() - units:
            del self._known[unit]


def _conflicts(chosen: Mapping[str, Declaration], claims: Claims) -> Iterator[_Conflict]:
    """Claims made by two units. Within one unit the parser has looked already."""
    seen: dict[Claim, tuple[str, Service]] = {}
    for unit, declaration in chosen.items():
        mine = claims.of(unit, declaration)
        contested = {claim: seen[claim] for claim in mine.keys() & seen.keys()}
        for claim, holder in contested.items():
            yield _Conflict(claim, holder, mine[claim])
        seen.update(mine)
        seen.update(contested)


class _Judge:
    """Says which unit of a conflict must give way, and how far."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self._units = units
        self._claims: dict[str, frozenset[Claim]] = {}

    def loser(self, conflict: _Conflict, chosen: Mapping[str, Declaration]) -> str:
        """The unit that gives way: a newcomer, and of two newcomers the one that sorts later."""
        first, second = conflict.first[0], conflict.second[0]
        for name in (second, first):
            if self._is_new(name, chosen) and conflict.claim not in self._accepted_claims(name):
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
            claims: set[Claim] = {service.name for service in services}
            self._claims[name] = frozenset(claims.union(*(service.frontends() for service in services)))
        return self._claims[name]
