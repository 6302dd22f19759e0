"""What declarations may claim at all: addresses, backends, ports of this host, and what checks do. Pure.

An address that a service claims is taken from its real owner for every packet that passes this host
(CVE-2020-8554, contract 7.19). Hence a list of networks in the settings, and never this host's own addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address

from vipd.control.endpoint_budget import EndpointBudget
from vipd.declaration.problems import Declaration, Problem, ProblemList, internal_problem
from vipd.declaration.unit import Unit
from vipd.host.facts import NO_FACTS, HostFacts
from vipd.model.check import UNCHECKED, Check, ExecProbe, HttpProbe, asks_host
from vipd.model.claim_limits import (
    CLI,
    ETCD,
    BySource,
    ClaimLimits,
    SourceNetworks,
    check_refusal,
    claim_limits,
    source_networks,
)
from vipd.model.service import Balance, Origin, Registered, Service

_OUTSIDE_HINT = "choose another address, or widen allowed_addresses in vipd's settings"
_OWN_HINT = "choose an address that no host has; for a port of this host itself use node_port"


CheckProblems = Callable[[Check], tuple[str, ...]]
"""What this host lacks for a check: programs, users, certificates."""


def _no_problems(_: Check) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """What services may claim. Raises ValueError for a network or address that is none."""

    allowed: BySource = ()
    """Networks that services' addresses must lie in, as CIDRs of both families; empty: anywhere."""
    host_addresses: tuple[str, ...] = ()
    """This host's own addresses, which no service may claim."""
    exec_sources: tuple[str, ...] = ("file", "cli")
    """Sources whose services may have checks that run programs."""
    balances: frozenset[Balance] = frozenset(Balance)
    """Those that the dataplane can do."""
    ca_sources: tuple[str, ...] = ("file", "cli")
    """Sources whose services may name files of this host: who writes to etcd has no business with those."""
    check_problems: CheckProblems = field(default=_no_problems, compare=False)
    """What this host lacks for a check."""
    host: HostFacts = NO_FACTS
    """What of this host no service may take."""
    backends: BySource = ()
    """Networks that backends must lie in; empty: anywhere, but for link-local ones of etcd."""
    host_ports: BySource = ()
    """Ranges like `30000-32767` that node ports and health ports must lie in; empty: any."""
    _addresses: SourceNetworks = field(init=False, repr=False, compare=False)
    limits: ClaimLimits = field(init=False, repr=False, compare=False)
    _own: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Frozen: what is derived from the fields once can only be set past the freeze.
        object.__setattr__(self, "_addresses", source_networks(self.allowed))
        object.__setattr__(self, "limits", claim_limits(self.backends, self.host_ports))
        object.__setattr__(self, "_own", frozenset(str(ip_address(a)) for a in self.host_addresses))

    def allows(self, address: str, source: str = CLI) -> bool:
        """Whether an address lies in the networks that are allowed to a source."""
        return self._addresses.allow(address, source)

    def owned(self, address: str) -> bool:
        """Whether it is this host's own."""
        return address in self._own

    def lasting(self) -> AddressPolicy:
        """As far as what was accepted once is held to it: what the settings say, and nothing of the host.

        A file that a service in etcd names since before that was refused stays.
        """
        return replace(
            self,
            host_addresses=(),
            ca_sources=(*self.ca_sources, ETCD),
            check_problems=_no_problems,
            host=NO_FACTS,
        )


def admit(
    declaration: Declaration, policy: AddressPolicy, passed: Collection[int] = frozenset()
) -> Declaration:
    """The declaration with a problem for each address that it must not claim, in line order. Services whose
    `id` is in `passed` have been looked at. Of one that has problems already, this host is asked nothing."""
    if not declaration.ok:
        policy = replace(policy, check_problems=_no_problems)
    fresh = (service for service in declaration.services if id(service) not in passed)
    found = ProblemList(
        problem for service in fresh for problem in _problems_of(service, policy, declaration.ok)
    )
    if not found:
        return declaration
    found.extend(declaration.problems)
    return replace(declaration, problems=found.by_line())


def _problems_of(service: Service, policy: AddressPolicy, sound: bool) -> tuple[Problem, ...]:
    """Why a service may not serve. An exception that nobody expected is a reason too, unless the declaration
    is not `sound`: then half a service may be all that could be read."""
    try:
        return admit_service(service, policy)
    except Exception as error:
        origin = service.origin
        place, doing = origin.path or origin.source, f"admitting {service.name}"
        return (internal_problem(error, doing, place, origin.line),) if sound else ()


def _lasts(service: Service, policy: AddressPolicy) -> bool:
    """Whether a service that was accepted once may go on serving."""
    try:
        return not admit_service(service, policy)
    except Exception:  # the same exception refuses its candidate, and is reported there
        return True


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A unit as it was given and as it was let in. `passed` means services by their `id`, which are theirs
    alone while the unit is kept."""

    given: Unit
    unit: Unit
    passed: frozenset[int] = frozenset()
    """Those that passed the whole policy."""
    lasting: frozenset[int] = frozenset()
    """Those that passed as far as what was accepted once is held to it."""


def admit_unit(unit: Unit, policy: AddressPolicy) -> Unit:
    """A unit as far as it may serve.

    A candidate must pass the whole policy. What was accepted once, and did not change, is held to the
    settings alone, and loses what they forbid: a host may take over an address that is served already, as
    keepalived does.
    """
    return _admitted(unit, policy, None).unit


def _admitted(unit: Unit, policy: AddressPolicy, before: _Admitted | None) -> _Admitted:
    passed, lasted = (before.passed, before.lasting) if before else (frozenset[int](), frozenset[int]())
    lasting = policy.lasting()
    services = unit.accepted.services
    allowed = tuple([s for s in services if id(s) in lasted or _lasts(s, lasting)])
    same = len(allowed) == len(services)
    accepted = unit.accepted if same else replace(unit.accepted, services=allowed)
    if unit.candidate is unit.accepted:
        candidate = accepted if same else admit(unit.candidate, lasting)
        known = passed.intersection(map(id, allowed))
    else:
        # A service that did not change is held to what it was admitted by: the host may have taken over its
        # address since, which must not keep the others of its unit from changing.
        serving = {service.name: service for service in allowed}
        unchanged = {id(s) for s in unit.candidate.services if serving.get(s.name) == s}
        candidate = admit(unit.candidate, policy, passed | unchanged)
        known = frozenset(map(id, unit.candidate.services)) if candidate is unit.candidate else frozenset()
    return _Admitted(unit, Unit(candidate, accepted), known, known.union(map(id, allowed)))


class Admission:
    """All units as far as they may serve. What has not changed is not looked at again: neither a unit, nor a
    service of one that has, as long as the policy is the same."""

    def __init__(self) -> None:
        self._policy: AddressPolicy | None = None
        self._admitted: dict[str, _Admitted] = {}
        self._given: dict[str, Unit] = {}
        self._refused: set[str] = set()
        self._budget = EndpointBudget()
        self.units: dict[str, Unit] = {}
        """By name; it follows later calls."""

    def notice(self, sources: Sequence[Mapping[str, Unit]], policy: AddressPolicy) -> set[str]:
        """See what the sources hold now; the names of the units that have to be looked at, and of those that
        are gone."""
        # What was refused may have been mended on the host, such as a program that was missing.
        changed, number = set(self._refused), 0
        if policy != self._policy:
            self._admitted.clear()
            changed.update(self._given)
        self._policy = policy  # an equal one may know of other sockets
        given = self._given
        for units in sources:
            number += len(units)
            for name, unit in units.items():
                if name not in given or given[name] is not unit:
                    given[name] = unit
                    changed.add(name)
        if number < len(given):
            changed |= self._leave({name for units in sources for name in units})
        return changed

    def size(self, units: Iterable[str]) -> int:
        """How many services these units declare."""
        return sum(len(self._given[name].candidate.services) for name in units if name in self._given)

    def questions(self, units: Iterable[str]) -> set[Check]:
        """The checks of these units that only the host can judge, of candidates without problems alone."""
        assert self._policy is not None  # noqa: S101 (units are noticed under a policy)
        found = set[Check]()
        for name in units:
            unit, before = self._given.get(name), self._admitted.get(name)
            if unit is None or unit.candidate is unit.accepted or not unit.candidate.ok:
                continue
            passed = before.passed if before else frozenset[int]()
            fresh = [service for service in unit.candidate.services if id(service) not in passed]
            found.update(check for service in fresh for check in questions(service, self._policy))
        return found

    def admit(self, changed: Iterable[str], check_problems: CheckProblems | None = None) -> set[str]:
        """Look at what was noticed; the names of the units that are other than before, or gone.

        `check_problems` answers what `questions` asked; without it the policy's own is called.
        """
        assert self._policy is not None  # noqa: S101 (units are noticed under a policy)
        policy = self._policy
        if check_problems is not None:
            policy = replace(policy, check_problems=check_problems)
        # Those that serve already come first, so that newcomers find no room rather than they.
        order = sorted(changed, key=lambda name: (self._newcomer(name), name))
        return {name for name in order if name not in self._given or self._renew(name, policy)}

    def _newcomer(self, name: str) -> bool:
        unit = self._given.get(name)
        return unit is not None and unit.candidate is not unit.accepted

    def _leave(self, present: set[str]) -> set[str]:
        gone = self._given.keys() - present
        for name in gone:
            del self._given[name]
            self._admitted.pop(name, None)
            self._budget.drop(name)
            self.units.pop(name, None)
            self._refused.discard(name)
        return gone

    def _renew(self, name: str, policy: AddressPolicy) -> bool:
        """Look at a unit; whether what is let in is another one than before. An exception that nobody
        expected refuses this unit alone."""
        before, unit = self._admitted.get(name), self._given[name]
        if before and name not in self._refused and _same(before.given, unit):
            return False
        try:
            after = _admitted(unit, policy, before)
        except Exception as error:
            after = _Admitted(unit, refused(name, unit, error, "admitting it"))
        after = replace(after, unit=self._budget.take(name, after.unit))
        self._admitted[name] = after
        (self._refused.discard if after.unit.candidate.ok else self._refused.add)(name)
        known = self.units.get(name)
        if known is not None and _alike(known, after.unit):
            return False
        self.units[name] = after.unit
        return True


def refused(name: str, unit: Unit, error: Exception, doing: str) -> Unit:
    """A unit whose candidate has an unexpected exception as a further problem; what was accepted serves
    on."""
    problem = internal_problem(error, doing, name.removeprefix("file:"))
    problems = (*unit.candidate.problems, problem)
    return Unit(replace(unit.candidate, problems=problems), unit.accepted)


def _same(one: Unit, other: Unit) -> bool:
    return one.candidate is other.candidate and one.accepted is other.accepted


def _alike(one: Unit, other: Unit) -> bool:
    """Whether two units come to the same; what was refused is made anew each time it is looked at."""
    refused = not other.candidate.ok and one.candidate == other.candidate
    return one.accepted is other.accepted and (refused or one.candidate is other.candidate)


def admit_service(service: Service, policy: AddressPolicy) -> tuple[Problem, ...]:
    """A problem for each address and check that a service must not have, at the service's origin."""
    found = []
    origin = service.origin
    for address in service.all_addresses():
        what, hint = "", ""
        if policy.owned(address):
            what, hint = f"{service.name}: {address} is an address of this host itself", _OWN_HINT
        elif not policy.allows(address, origin.source):
            what, hint = f"{service.name}: {address} lies outside allowed_addresses", _OUTSIDE_HINT
        if what:
            found.append(Problem(origin.path or origin.source, origin.line, "", what, hint))
    if service.balance not in policy.balances:
        what = f"{service.name}: the dataplane cannot do balance: {service.balance}"
        hint = "use dataplane: nftables in vipd's settings, or affinity: client-ip"
        found.append(Problem(origin.path or origin.source, origin.line, "", what, hint))
    for what, hint in (*policy.host.refusals(service), *policy.limits.refusals(service, policy.host.own)):
        found.append(Problem(origin.path or origin.source, origin.line, "", what, hint))
    return (*found, *_check_problems(service, policy))


def admit_registered(service: Service, registered: Registered, policy: AddressPolicy) -> tuple[Problem, ...]:
    """A problem for each reason why a backend that registered itself must not take part in a service. It is
    held to what etcd may say, whoever declares the service."""
    place, backend = registered
    if not service.accepts_registrations:
        what = f"it takes no registered backends, and is declared by {service.origin.owner}"
        hint = "write registrations: true in its declaration"
        if service.origin.source == CLI:
            hint = f"vipctl set {service.name} --registrations true"
        return (Problem(place, 0, "", f"{service.name}: {what}", hint),)
    refusals = list(policy.limits.backend_refusals((backend,), ETCD))
    if backend.address in service.all_addresses():
        # Its packets would come back to the rules for ever.
        what = f"backend {backend.address} is an address of the service itself"
        refusals.append((what, "register the address that the server has"))
    told = [Problem(place, 0, "", f"{service.name}: {what}", hint) for what, hint in refusals]
    alone = replace(service, backends=(backend,), fallback=(), check=UNCHECKED, origin=Origin(ETCD, place))
    return (*told, *_check_problems(alone, policy))


def questions(service: Service, policy: AddressPolicy) -> Iterator[Check]:
    """The checks of a service that only the host can judge; those that may not run here are not among
    them."""
    return (
        check for check in _checks_of(service) if asks_host(check) and not _forbidden(check, service, policy)
    )


def _checks_of(service: Service) -> Iterable[Check]:
    own = (b.check for b in (*service.backends, *service.fallback) if b.check is not None)
    return dict.fromkeys((service.check, *own))


def _forbidden(check: Check, service: Service, policy: AddressPolicy) -> tuple[str, str] | None:
    """Why a service of that source may not have a check, and a hint."""
    source = service.origin.source
    if isinstance(check.probe, ExecProbe) and source not in policy.exec_sources:
        hint = "use another type of check, or see exec_checks in vipd's settings"
        return "checks that run programs are not allowed here", hint
    if isinstance(check.probe, HttpProbe) and check.probe.ca and source not in policy.ca_sources:
        hint = "leave it out, for the certificates that the host trusts, or declare the service in a file"
        return f"ca names a file of this host, which a service in {source} may not", hint
    return check_refusal(check, source)


def _check_problems(service: Service, policy: AddressPolicy) -> Iterator[Problem]:
    """A problem for each check that must not run here, or cannot."""
    origin = service.origin
    for check in _checks_of(service):
        if forbidden := _forbidden(check, service, policy):
            what, hint = forbidden
            yield Problem(origin.path or origin.source, origin.line, "", f"{service.name}: {what}", hint)
            continue
        for problem in policy.check_problems(check):
            what, _, hint = problem.partition("; hint: ")
            yield Problem(origin.path or origin.source, origin.line, "", f"{service.name}: {what}", hint)
