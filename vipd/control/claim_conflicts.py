"""Finds claims (names, frontends, addresses) that two units make, and decides which unit loses. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vipd.declaration.conflicts import AddressUse, Claim, address_uses, claim_problem
from vipd.declaration.problems import Declaration, Problem
from vipd.model.service import Service

if TYPE_CHECKING:
    from vipd.declaration.unit import Unit


def first_choice(unit: Unit) -> Declaration:
    """The version of a unit that serves unless it loses a conflict."""
    return unit.candidate if unit.candidate.ok else unit.accepted


def claims_of(service: Service) -> tuple[Claim, ...]:
    """The name and the frontends of a service."""
    return (service.name, *service.frontends())


class Claimant(NamedTuple):
    """The holder of a claim: a service in the serving version of a unit. Holders sort by the unit's name."""

    unit: str
    position: int
    """The service's index in that version."""
    service: Service


@dataclass(frozen=True, slots=True)
class Conflict:
    """A claim that two units make, or two claims that exclude each other. `first` is the unit that sorts
    first."""

    claim: Claim
    first: Claimant
    second: Claimant
    opposing_claim: Claim | None = None
    """The claim of the second unit; None if it is the same claim."""

    def claim_of(self, unit: str) -> Claim:
        """The claim of one of the two units."""
        return self.claim if self.opposing_claim is None or unit == self.first.unit else self.opposing_claim

    def holder_of(self, unit: str) -> Claimant:
        """The holder that belongs to this unit."""
        return self.first if unit == self.first.unit else self.second

    def service_of(self, unit: str) -> Service:
        """The service by which a unit makes its claim."""
        return self.holder_of(unit).service

    def problem_of(self, loser: str) -> Problem:
        """The problem to report for the unit that loses."""
        other = self.second if loser == self.first.unit else self.first
        return claim_problem(self.service_of(loser), self.claim_of(loser), other.service)


def conflicts_between(contest: ConflictResolver, suspects: Iterable[Claim]) -> Iterator[Conflict]:
    """The conflicts between two units over the claims in `suspects`. The parser has checked each unit by
    itself.

    If many units make the same claim, each conflicts with the first only; the next round checks the rest. So
    every conflict ends with a loser, and finding all conflicts takes time linear in the number of claims.
    """
    for claim in suspects:
        holders = contest.claimants(claim)
        if isinstance(claim, AddressUse):
            others = contest.claimants(claim.opposite()) if holders else ()
            if others:
                yield from _conflicts_of_roles(contest, claim, holders, others)
        elif len(holders) > 1:
            first = holders[0]
            yield from (Conflict(claim, first, each) for each in holders[1:] if each.unit != first.unit)


def _conflicts_of_roles(
    contest: ConflictResolver, use: AddressUse, users: Sequence[Claimant], vips: Sequence[Claimant]
) -> Iterator[Conflict]:
    """The conflicts of those who newly send to an address, with the first who has it as a virtual IP of old.
    A virtual IP that is as new, or newer, is in nobody's way, and nobody is in its."""
    vip = next((vip for vip in vips if not contest.is_newcomer(vip.unit, use.opposite())), None)
    if vip is None:
        return
    for user in users:
        if user.unit != vip.unit and contest.is_newcomer(user.unit, use):
            if user < vip:
                yield Conflict(use, user, vip, use.opposite())
            else:
                yield Conflict(use.opposite(), vip, user, use)


class ConflictResolver:
    """The serving versions of units, the holders of their claims, and the loser of each conflict."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self._units = units
        self._chosen: dict[str, Declaration] = {}
        self._holders: dict[Claim, list[Claimant]] = {}
        self._lost_services: dict[str, set[int]] = {}
        """By unit: the indexes of services that it lost from its serving version."""
        self._accepted: dict[str, frozenset[Claim]] = {}
        for name, unit in sorted(units.items()):
            self._choose(name, first_choice(unit))

    def claims(self) -> Iterable[Claim]:
        """Claims with several holders, and addresses used as backends, which another unit may use as a
        virtual IP."""
        return [
            claim
            for claim, holders in self._holders.items()
            if (claim.as_backend if isinstance(claim, AddressUse) else len(holders) > 1)
        ]

    def claimants(self, claim: Claim) -> Sequence[Claimant]:
        """The holders of this claim, in order."""
        return self._holders.get(claim, ())

    def remaining(self) -> dict[str, Declaration]:
        """The declaration that each unit may serve: its version without the services that it lost."""
        for name, lost in self._lost_services.items():
            services = self._chosen[name].services
            left = tuple(service for place, service in enumerate(services) if place not in lost)
            self._chosen[name] = Declaration(left)
        return self._chosen

    def loser(self, conflict: Conflict) -> str:
        """The unit that loses: the newcomer. Of two newcomers, or two incumbents, the one with the higher
        rank loses; without ranks, the one that sorts later. Of two newcomers of one file the later one."""
        first, second = conflict.first.unit, conflict.second.unit
        newcomers = [name for name in (second, first) if self.is_newcomer(name, conflict.claim_of(name))]
        ranks = self._units[first].rank, self._units[second].rank
        if len(newcomers) != 1 and all(ranks):
            return first if ranks[0] > ranks[1] else second
        if len(newcomers) == 2 and _later_in_file(conflict.first.service, conflict.second.service):
            return first
        if newcomers:
            return newcomers[0]
        return second if self._is_new(second) or not self._is_new(first) else first

    def withdraw(self, lost: Iterable[tuple[str, Conflict]]) -> Iterable[Claim]:
        """Remove from each loser what it lost; returns the claims that may now have two holders.

        A loser falls back to its accepted version. If it already serves that version, it loses the services
        of the conflicts. Accepted versions conflict only if vipd never merged them before, for example after
        a restart with another directory of declarations.
        """
        suspects, places = dict[Claim, None](), dict[str, set[int]]()
        for name, conflict in lost:
            suspects[conflict.claim] = None
            places.setdefault(name, set()).add(conflict.holder_of(name).position)
        for name, mine in places.items():
            services = self._chosen[name].services
            if self._is_new(name):
                self._remove(name, range(len(services)))
                suspects.update(dict.fromkeys(self._choose(name, self._units[name].accepted)))
            else:
                self._remove(name, mine)
                self._lost_services.setdefault(name, set()).update(mine)
        return _as_backend_role(suspects)

    def _choose(self, name: str, declaration: Declaration) -> Iterable[Claim]:
        """Make a version of a unit serve; returns its claims."""
        self._chosen[name] = declaration
        claimed = list[Claim]()
        for place, service in enumerate(declaration.services):
            holder = Claimant(name, place, service)
            for claim in _all_claims(service):
                holders = self._holders.setdefault(claim, [])
                if not holders or holders[-1] < holder:
                    holders.append(holder)
                else:
                    insort(holders, holder)
                claimed.append(claim)
        return claimed

    def _remove(self, name: str, places: Iterable[int]) -> None:
        services = self._chosen[name].services
        for place in places:
            holder = Claimant(name, place, services[place])
            for claim in _all_claims(holder.service):
                holders = self._holders[claim]
                del holders[bisect_left(holders, holder)]

    def is_newcomer(self, name: str, claim: Claim) -> bool:
        """Whether a unit serves a version that was not accepted yet, and did not make this claim before."""
        return self._is_new(name) and claim not in self._accepted_claims(name)

    def _is_new(self, name: str) -> bool:
        unit = self._units[name]
        return self._chosen[name] is unit.candidate and unit.candidate is not unit.accepted

    def _accepted_claims(self, name: str) -> frozenset[Claim]:
        if name not in self._accepted:
            services = self._units[name].accepted.services
            self._accepted[name] = frozenset(claim for each in services for claim in _all_claims(each))
        return self._accepted[name]


def _later_in_file(service: Service, other: Service) -> bool:
    """Whether both are parts of one file, and the other stands before this one."""
    one, before = service.origin, other.origin
    return bool(one.part) and one.owner == before.owner and one.line > before.line


def _all_claims(service: Service) -> Iterable[Claim]:
    """The claims of a service, each once."""
    return dict.fromkeys((*claims_of(service), *address_uses(service)))


def _as_backend_role(claims: Iterable[Claim]) -> Iterable[Claim]:
    """The same claims, with each address only in its role as a backend."""
    return dict.fromkeys(
        claim.opposite() if isinstance(claim, AddressUse) and not claim.as_backend else claim
        for claim in claims
    )
