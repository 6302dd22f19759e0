"""Claims that two units make, and which of the two must give way. Pure."""

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
    """The version of a unit that serves unless another unit has a better claim."""
    return unit.candidate if unit.candidate.ok else unit.accepted


def claims_of(service: Service) -> tuple[Claim, ...]:
    """The name and the frontends of a service."""
    return (service.name, *service.frontends())


class Holder(NamedTuple):
    """Who claims something: a service of the version of a unit that serves. Holders sort as units do."""

    unit: str
    place: int
    """Its index in that version."""
    service: Service


@dataclass(frozen=True, slots=True)
class Conflict:
    """A claim of two units, or two claims of which one shuts the other out. The units are in order."""

    claim: Claim
    first: Holder
    second: Holder
    counter: Claim | None = None
    """What the second one claims; None: the same."""

    def claim_of(self, unit: str) -> Claim:
        """What one of the two units claims."""
        return self.claim if self.counter is None or unit == self.first.unit else self.counter

    def holder_of(self, unit: str) -> Holder:
        """The one of the two that is this unit's."""
        return self.first if unit == self.first.unit else self.second

    def service_of(self, unit: str) -> Service:
        """The service with which a unit claims it."""
        return self.holder_of(unit).service

    def problem_of(self, loser: str) -> Problem:
        """The conflict as a fault of one of the two units."""
        other = self.second if loser == self.first.unit else self.first
        return claim_problem(self.service_of(loser), self.claim_of(loser), other.service)


def conflicts_between(contest: Contest, suspects: Iterable[Claim]) -> Iterator[Conflict]:
    """Claims made by two units, among those that two may make. Within one unit the parser has looked already.

    Of many that claim the same, each is in conflict with the first: whoever is left is looked at in the next
    round. So a conflict ends with somebody who loses something, and all of them take time linear in what is
    claimed.
    """
    for claim in suspects:
        holders = contest.holders(claim)
        if isinstance(claim, AddressUse):
            others = contest.holders(claim.opposite()) if holders else ()
            if others:
                yield from _conflicts_of_roles(contest, claim, holders, others)
        elif len(holders) > 1:
            first = holders[0]
            yield from (Conflict(claim, first, each) for each in holders[1:] if each.unit != first.unit)


def _conflicts_of_roles(
    contest: Contest, use: AddressUse, holders: Sequence[Holder], others: Sequence[Holder]
) -> Iterator[Conflict]:
    """An address that is used in two roles: if the first user of all wins against all in the other role, that
    is all to be said. Else each is in conflict with the first in the other role that is another unit's."""
    if others[0] < holders[0]:
        use, holders, others = use.opposite(), others, holders
    first = holders[0]
    found = [Conflict(use, first, each, use.opposite()) for each in others if each.unit != first.unit]
    if found and all(contest.loser(conflict) != first.unit for conflict in found):
        yield from found
        return
    pairs: dict[tuple[Holder, Holder], AddressUse] = {}
    for role, here, there in ((use, holders, others), (use.opposite(), others, holders)):
        rival = there[0]
        rival_of_its_unit = next((each for each in there if each.unit != rival.unit), None)
        for each in here:
            against = rival if rival.unit != each.unit else rival_of_its_unit
            if against is not None and each < against:
                pairs[each, against] = role
            elif against is not None:
                pairs[against, each] = role.opposite()
    for (one, other), role in pairs.items():
        yield Conflict(role, one, other, role.opposite())


class Contest:
    """The versions of units that serve, who claims what with them, and who must give way in a conflict."""

    def __init__(self, units: Mapping[str, Unit]) -> None:
        self._units = units
        self._chosen: dict[str, Declaration] = {}
        self._holders: dict[Claim, list[Holder]] = {}
        self._lost: dict[str, set[int]] = {}
        """Places of services that units have lost of the version that serves."""
        self._accepted: dict[str, frozenset[Claim]] = {}
        for name, unit in sorted(units.items()):
            self._choose(name, first_choice(unit))

    def claims(self) -> Iterable[Claim]:
        """What two units may claim, or the one a backend and the other a service."""
        return [
            claim
            for claim, holders in self._holders.items()
            if (claim.as_backend if isinstance(claim, AddressUse) else len(holders) > 1)
        ]

    def holders(self, claim: Claim) -> Sequence[Holder]:
        """Who claims this, in order."""
        return self._holders.get(claim, ())

    def left(self) -> dict[str, Declaration]:
        """What serves of each unit."""
        for name, lost in self._lost.items():
            services = self._chosen[name].services
            left = tuple(service for place, service in enumerate(services) if place not in lost)
            self._chosen[name] = Declaration(left)
        return self._chosen

    def loser(self, conflict: Conflict) -> str:
        """The unit that gives way: a newcomer; of two newcomers, or two that both have it, the one with the
        higher rank, else the one that sorts later."""
        first, second = conflict.first.unit, conflict.second.unit
        newcomers = [
            name
            for name in (second, first)
            if self._is_new(name) and conflict.claim_of(name) not in self._accepted_claims(name)
        ]
        ranks = self._units[first].rank, self._units[second].rank
        if len(newcomers) != 1 and all(ranks):
            return first if ranks[0] > ranks[1] else second
        if newcomers:
            return newcomers[0]
        return second if self._is_new(second) or not self._is_new(first) else first

    def give_way(self, lost: Iterable[tuple[str, Conflict]]) -> Iterable[Claim]:
        """Take from each unit that lost conflicts what it cannot have; what may be claimed twice then.

        It keeps its accepted version. If it serves no newer one it loses the services in question. Accepted
        versions conflict only where they never met before, as after a restart with another directory of
        declarations.
        """
        suspects, places = dict[Claim, None](), dict[str, set[int]]()
        for name, conflict in lost:
            suspects[conflict.claim] = None
            places.setdefault(name, set()).add(conflict.holder_of(name).place)
        for name, mine in places.items():
            services = self._chosen[name].services
            if self._is_new(name):
                self._remove(name, range(len(services)))
                suspects.update(dict.fromkeys(self._choose(name, self._units[name].accepted)))
            else:
                self._remove(name, mine)
                self._lost.setdefault(name, set()).update(mine)
        return _one_role(suspects)

    def _choose(self, name: str, declaration: Declaration) -> Iterable[Claim]:
        """Have a version of a unit serve; what it claims."""
        self._chosen[name] = declaration
        claimed = list[Claim]()
        for place, service in enumerate(declaration.services):
            holder = Holder(name, place, service)
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
            holder = Holder(name, place, services[place])
            for claim in _all_claims(holder.service):
                holders = self._holders[claim]
                del holders[bisect_left(holders, holder)]

    def _is_new(self, name: str) -> bool:
        unit = self._units[name]
        return self._chosen[name] is unit.candidate and unit.candidate is not unit.accepted

    def _accepted_claims(self, name: str) -> frozenset[Claim]:
        if name not in self._accepted:
            services = self._units[name].accepted.services
            self._accepted[name] = frozenset(claim for each in services for claim in _all_claims(each))
        return self._accepted[name]


def _all_claims(service: Service) -> Iterable[Claim]:
    """What a service claims, each once."""
    return dict.fromkeys((*claims_of(service), *address_uses(service)))


def _one_role(claims: Iterable[Claim]) -> Iterable[Claim]:
    """The same claims; an address that is used by a service or a backend stands in one of its roles alone."""
    return dict.fromkeys(
        claim.opposite() if isinstance(claim, AddressUse) and not claim.as_backend else claim
        for claim in claims
    )
