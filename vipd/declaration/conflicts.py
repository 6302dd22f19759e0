"""Claims that two services cannot share: a frontend, a name, an address in two roles. Pure.

The kernel translates a packet once. A packet for a backend that has the address of a service is not
translated again; so whoever comes second with such a backend is refused. Who takes the address of somebody
else's backend as a virtual IP is not: naming addresses as backends would keep everybody from them. External
addresses do not count: one may be a host's own, whose server is then a valid backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple

from vipd.declaration.problems import Problem
from vipd.model.limits import PROBLEMS
from vipd.model.service import Frontend, Service

MAX_NAMED = 3
"""More backends than these are not suggested."""


class AddressUse(NamedTuple):
    """An address in one of its two roles. Many services may use it in the same one."""

    address: str
    as_backend: bool

    def opposite(self) -> AddressUse:
        """The same address in the other role."""
        return AddressUse(self.address, not self.as_backend)

    def __str__(self) -> str:
        return f"{self.address} as a {'backend' if self.as_backend else 'virtual IP'}"


Claim = Frontend | str | AddressUse
"""An exclusive claim: a frontend, a name, a role of an address."""


def backend_addresses(service: Service) -> set[str]:
    """The addresses that a service sends packets to. Its own are not among them: the parser judges these."""
    return {b.address for b in (*service.backends, *service.fallback)}.difference(service.addresses)


def address_uses(service: Service) -> Iterator[AddressUse]:
    """Each address of a service, or of a backend of it, in its role."""
    yield from (AddressUse(address, False) for address in service.addresses)
    yield from (AddressUse(address, True) for address in backend_addresses(service))


Uses = Mapping[bool, Mapping[str, int]]
"""Number of services that use each address: of virtual IPs (False), and of backends (True). One mapping whose
keys hold the role too would take half the memory of the backends themselves."""


class AddressUses:
    """Number of services that use each address in each role, updated as services change."""

    def __init__(self, services: Iterable[Service] = ()) -> None:
        self._numbers: dict[bool, dict[str, int]] = dict(_count_uses(services))
        self.in_both_roles = self._numbers[False].keys() & self._numbers[True].keys()
        """The addresses that some services have, and others send to."""

    def counts_after(self, leaving: Iterable[Service], coming: Iterable[Service]) -> Uses:
        """The numbers that change."""
        after, less, known = _count_uses(coming), _count_uses(leaving), self._numbers
        for role, numbers in after.items():
            numbers.subtract(less[role])
            for address in numbers.keys() & known[role].keys():
                numbers[address] += known[role][address]
        return after

    def __contains__(self, use: AddressUse) -> bool:
        return use.address in self._numbers[use.as_backend]

    def update(self, uses: Uses) -> set[str]:
        """Set the numbers returned by `counts_after`. Returns the addresses that are in both roles since, or
        no longer are."""
        for role, numbers in uses.items():
            known = self._numbers[role]
            known.update(numbers)
            for address in [address for address, number in numbers.items() if not number]:
                del known[address]
        changed = {address for numbers in uses.values() for address in numbers}
        both = self._numbers[False].keys() & self._numbers[True].keys() & changed
        changed = both ^ (self.in_both_roles & changed)
        self.in_both_roles ^= changed
        return changed


def _count_uses(services: Iterable[Service]) -> dict[bool, Counter[str]]:
    services = tuple(services)
    vips = Counter(address for service in services for address in service.addresses)
    backends = Counter(chain.from_iterable(map(backend_addresses, services)))
    return {False: vips, True: backends}


def find_conflicts(services: Iterable[Service]) -> tuple[Problem, ...]:
    """A problem for each of `conflicts_of`, as many as are kept of one unit."""
    return tuple(claim_problem(*conflict) for conflict in islice(conflicts_of(services), PROBLEMS))


def conflicts_of(
    services: Iterable[Service], *, addresses: bool = True
) -> Iterator[tuple[Service, Claim, Service]]:
    """Every claim that an earlier service prevents, in time linear in the claims: the service,
    the claim, and its owner. Without `addresses`, names and frontends alone.

    The earlier service keeps its claims, also against a third one.
    """
    names: dict[str, Service] = {}
    owners: dict[Frontend, Service] = {}
    vips: dict[str, Service] = {}
    backends: dict[str, Service] = {}
    for service in services:
        namesake = names.setdefault(service.name, service)
        if namesake is not service and not _default_name(service):
            yield service, service.name, namesake
        for frontend in service.frontends():
            owner = owners.setdefault(frontend, service)
            if owner is not service:
                yield service, frontend, owner
        if addresses:
            yield from _conflicts_of_addresses(service, vips, backends)


def _conflicts_of_addresses(
    service: Service, vips: dict[str, Service], backends: dict[str, Service]
) -> Iterator[tuple[Service, Claim, Service]]:
    """Addresses that earlier services use in another role than this one, which then is no user."""
    sought = backend_addresses(service)
    if vips.keys().isdisjoint(sought) and backends.keys().isdisjoint(service.addresses):  # mostly
        for address in service.addresses:
            vips.setdefault(address, service)
        for address in sought:
            backends.setdefault(address, service)
        return
    for use in sorted(address_uses(service)):
        same, other = (backends, vips) if use.as_backend else (vips, backends)
        user = other.get(use.address)
        if user is None:
            same.setdefault(use.address, service)
        else:
            yield service, use, user


def claim_problem(service: Service, claim: Claim, owner: Service) -> Problem:
    """The problem of a service whose claim another one has or prevents."""
    origin = service.origin
    if isinstance(claim, str):
        what = f"the name {claim} is already taken by the service {_place(owner)}"
        hint = "give each service its own name"
        return Problem(origin.path or origin.source, origin.line, "", what, hint)
    claimant = "" if _default_name(service) else f"{service.name}: "
    holder = f"{'the service' if _default_name(owner) else owner.name} {_place(owner)}"
    if isinstance(claim, Frontend):
        what = f"{claim} already belongs to {holder}"
        hint = "one address, port and protocol can serve once"
    else:
        what, hint = address_use_problem(claim, holder, owner)
    return Problem(origin.path or origin.source, origin.line, "", f"{claimant}{what}", hint)


def address_use_problem(claim: AddressUse, holder: str, owner: Service) -> tuple[str, str]:
    """The fault of using an address that `owner`, named `holder`, has in the other role; and a
    hint."""
    if not claim.as_backend:
        what = f"{claim.address} is the address of a backend of {holder}"
        return what, "choose an address that no host has"
    what = f"the backend {claim.address} is a virtual IP, that of {holder}: a packet is translated only once"
    backends = list(dict.fromkeys(map(str, owner.backends[: 10 * MAX_NAMED])))
    named = ", ".join(backends[:MAX_NAMED]) + (", ..." if len(backends) > MAX_NAMED else "")
    return what, f"name the backends of {owner.name} instead{named and ': '}{named}"


def _place(service: Service) -> str:
    return f"at {service.origin}" if service.origin.path else "added by vipctl"


def _default_name(service: Service) -> bool:
    """Whether the name is the first frontend's: then the conflict of that frontend is enough."""
    frontends = service.frontends()
    return bool(frontends) and service.name == str(frontends[0])
