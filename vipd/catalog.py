"""From the sources' units to one snapshot of services. Pure.

A unit is what is accepted or refused as a whole: one file, or the store. Its candidate is what it says now;
its accepted version is what it last said without fault. A unit whose candidate has problems, or claims what
another already has, keeps its accepted version: bad input never hurts what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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
    """The outcome of a merge."""

    chosen: Mapping[str, Declaration]
    """The version of each unit that serves."""
    services: Mapping[str, Service]
    """The snapshot: every service by name."""
    problems: Mapping[str, tuple[Problem, ...]]
    """What is wrong, by unit; units without problems are left out."""


def merge(units: Mapping[str, Unit]) -> Merged:
    """Choose a version of every unit so that no two services claim the same name or frontend.

    An incumbent (a claim that is in its unit's accepted version) wins over a newcomer; between two newcomers
    the unit that sorts first wins. Accepted versions never conflict with each other, so this ends.
    """
    chosen = {
        name: unit.candidate if unit.candidate.ok else unit.accepted for name, unit in sorted(units.items())
    }
    problems: dict[str, list[Problem]] = {
        name: list(unit.candidate.problems) for name, unit in units.items() if not unit.candidate.ok
    }
    while conflicts := list(_conflicts(chosen)):
        for conflict in conflicts:
            loser = _loser(conflict, units, chosen)
            problems.setdefault(loser, []).append(conflict.problem_of(loser))
        for name in {_loser(conflict, units, chosen) for conflict in conflicts}:
            chosen[name] = units[name].accepted
    services = {service.name: service for part in chosen.values() for service in part.services}
    return Merged(chosen, services, {name: tuple(found) for name, found in problems.items()})


@dataclass(frozen=True, slots=True)
class _Conflict:
    claim: object
    first: tuple[str, Service]
    second: tuple[str, Service]

    def problem_of(self, loser: str) -> Problem:
        """The conflict as a fault of one of the two units."""
        mine, other = (self.first, self.second) if loser == self.first[0] else (self.second, self.first)
        origin, taken = mine[1].origin, other[1]
        if isinstance(self.claim, str):
            what, hint = f"name {self.claim} is taken", "names are unique across all files and the store"
        else:
            what, hint = f"{self.claim} is served by {taken.name} already", "remove one of the two"
        return Problem(origin.path or loser, origin.line, "", f"{what} ({_place(taken)})", hint)


def _place(service: Service) -> str:
    return str(service.origin) if service.origin.path else "added by vipctl"


def _conflicts(chosen: Mapping[str, Declaration]) -> Iterator[_Conflict]:
    """Claims made by two units. Within one unit the parser has looked already."""
    claims: dict[object, tuple[str, Service]] = {}
    for unit, declaration in chosen.items():
        for service in declaration.services:
            for claim in (service.name, *service.frontends()):
                holder = claims.setdefault(claim, (unit, service))
                if holder[0] != unit:
                    yield _Conflict(claim, holder, (unit, service))


def _loser(conflict: _Conflict, units: Mapping[str, Unit], chosen: Mapping[str, Declaration]) -> str:
    """The unit to send back: a newcomer, and of two newcomers the later."""
    first, second = conflict.first[0], conflict.second[0]
    if chosen[second] is not units[second].accepted and not _accepted(units[second], conflict.claim):
        return second
    if chosen[first] is not units[first].accepted and not _accepted(units[first], conflict.claim):
        return first
    return second if chosen[second] is not units[second].accepted else first


def _accepted(unit: Unit, claim: object) -> bool:
    return any(claim == s.name or claim in s.frontends() for s in unit.accepted.services)
