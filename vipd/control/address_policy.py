"""Decides which addresses, backends, host ports and health checks a service may declare. Pure.

A service that claims an address intercepts every packet to that address that passes this host (CVE-2020-8554,
contract 7.19). So the settings list the allowed networks, and this host's own addresses are never allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from ipaddress import ip_address

from vipd.declaration.problems import Problem
from vipd.declaration.syntax import MAX_PORT
from vipd.host.facts import NO_FACTS, HostFacts
from vipd.model.check import UNCHECKED, Check, ExecProbe, HttpProbe, depends_on_host
from vipd.model.claim_limits import (
    ANY_NAME,
    CLI,
    ETCD,
    BySource,
    ClaimLimits,
    SourceNetworks,
    check_violation,
    claim_limits,
    name_allowed,
    source_networks,
)
from vipd.model.service import AnnounceMethod, Balance, Origin, RegisteredBackend, Service

_OUTSIDE_HINT = "choose another address, or widen allowed_addresses in vipd's settings"
_ANNOUNCE_HINT = "name its network in announce_addresses in vipd's settings, or leave announce out"
L2_HINT = "set etcd in vipd.yaml, or leave announce out and use keepalived with vipctl ready"
_OWN_HINT = "choose an address that no host has; for a port of this host itself use node_port"


CheckProblems = Callable[[Check], tuple[str, ...]]
"""The programs, users and certificates that a check requires and this host lacks."""


def no_problems(_: Check) -> tuple[str, ...]:
    """For a host that lacks nothing."""
    return ()


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """The claims that services may make. Raises ValueError for an invalid network or address."""

    allowed: BySource = ()
    """Networks that services' addresses must lie in, as CIDRs of both families; empty: anywhere."""
    host_addresses: tuple[str, ...] = ()
    """This host's own addresses, which no service may claim."""
    exec_sources: tuple[str, ...] = ("file", "cli")
    """Sources whose services may have checks that run programs."""
    balances: frozenset[Balance] = frozenset(Balance)
    """The balance methods that the dataplane supports."""
    ca_sources: tuple[str, ...] = ("file", "cli")
    """Sources whose services may name CA files on this host. Authors in etcd have no access to such files."""
    flow_limits: bool = True
    """Whether services may limit their flows: kube-proxy's chains have no place for that."""
    check_problems: CheckProblems = field(default=no_problems, compare=False)
    """Returns what this host lacks for a check."""
    host: HostFacts = NO_FACTS
    """Addresses and ports of this host that no service may claim."""
    backends: BySource = ()
    """Networks that backends must be in; empty: anywhere, but from etcd no link-local addresses."""
    host_ports: BySource = ()
    """Ranges like `30000-32767` that node ports and health ports must lie in; empty: any."""
    announced: BySource = ()
    """Networks whose addresses may be announced beyond this host, and claimed by services that announce
    them."""
    names: BySource = (ANY_NAME,)
    """Endings of the DNS names that backends may have; a source without any may name none."""
    host_ports_per_author: int = MAX_PORT
    """How many ports of this host one author may have as node ports and health ports."""
    lan_holders: bool = True
    """Whether hosts can agree on the one that answers for an address on a LAN: they do so in etcd."""
    _addresses: SourceNetworks = field(init=False, repr=False, compare=False)
    limits: ClaimLimits = field(init=False, repr=False, compare=False)
    _announced: SourceNetworks = field(init=False, repr=False, compare=False)
    _own: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The class is frozen: only object.__setattr__ can set what is derived from the fields.
        object.__setattr__(self, "_addresses", source_networks(self.allowed))
        object.__setattr__(self, "limits", claim_limits(self.backends, self.host_ports))
        object.__setattr__(self, "_announced", source_networks(self.announced))
        object.__setattr__(self, "_own", frozenset(str(ip_address(a)) for a in self.host_addresses))

    def allows(self, address: str, source: str = CLI) -> bool:
        """Whether an address is in the networks that a source may use."""
        return self._addresses.allows(address, source)

    def announces(self, address: str, source: str = CLI) -> bool:
        """Whether an address may be announced: only in a network that the settings name. Services that may
        claim any address may announce none, so that no slip of a declaration draws a network's traffic."""
        return any(
            networks.is_limited(source) and networks.allows(address, source)
            for networks in (self._addresses, self._announced)
        )

    def owned(self, address: str) -> bool:
        """Whether an address is one of this host's own."""
        return address in self._own

    def resolved_refusal(self, address: str, source: str) -> str:
        """Why an address that a name resolved to may be no backend of a service from this source; empty: it
        may. Addresses that this host has or needs are only for those who write them: a name server could else
        lead the clients of a service there."""
        if refusal := self.limits.resolved_violation(address, source):
            return refusal
        role = self.host.role_of(address)
        if not role or self.limits.names_alone(address, source):
            return ""
        return f"it is {role}, which allowed_backends does not name by itself"

    def for_accepted(self) -> AddressPolicy:
        """The policy for versions that were accepted earlier: only the settings apply, not the state of the
        host. That etcd is out of bounds comes from the settings.

        A service in etcd that names a CA file stays if it was accepted before vipd refused such files, and so
        does one with `announce: l2` without etcd.
        """
        return replace(
            self,
            host_addresses=(),
            ca_sources=(*self.ca_sources, ETCD),
            check_problems=no_problems,
            host=self.host.of_settings(),
            lan_holders=True,
        )


def admit_addresses(
    service: Service, policy: AddressPolicy, serving: Service | None = None
) -> tuple[Service, tuple[Problem, ...]]:
    """The service without the external addresses that the policy does not allow, and a problem for each.
    `serving` is as in `admit_service`.

    This concerns the Services of a cluster: their status lists addresses that its nodes have, as that of k3s
    does. From other services nothing is left out.
    """
    externals, origin = service.external_addresses, service.origin
    if not (origin.part and externals):
        return service, ()
    left, problems, claimed = [], [], _claimed(serving)
    for external in externals:
        address = external.address
        refusal = _address_refusal(address, (), claimed, origin.source, policy)
        refusal = refusal or policy.host.address_refusal(address, claimed)
        if refusal is None:
            left.append(external)
            continue
        what = f"{service.name}: {refusal[0]}: it is left out, and the rest of the service serves"
        problems.append(Problem(origin.path, origin.line, "", what, refusal[1], partial=True))
    return (replace(service, external_addresses=tuple(left)) if problems else service), tuple(problems)


def _claimed(serving: Service | None) -> frozenset[str]:
    return frozenset(serving.all_addresses()) if serving else frozenset()


def _address_refusal(
    address: str, announced: Collection[str], claimed: Collection[str], source: str, policy: AddressPolicy
) -> tuple[str, str] | None:
    """Why a service from this source may not have an address, with a hint; None if it may."""
    if policy.owned(address) and address not in claimed:
        return f"{address} is an address of this host itself", _OWN_HINT
    if address in announced and not policy.announces(address, source):
        return f"{address} may not be announced: announce_addresses does not name it", _ANNOUNCE_HINT
    if address not in announced and not policy.allows(address, source):
        return f"{address} lies outside allowed_addresses", _OUTSIDE_HINT
    return None


def admit_service(
    service: Service, policy: AddressPolicy, serving: Service | None = None
) -> tuple[Problem, ...]:
    """Returns a problem for each address, port, balance method and check that the policy does not allow. The
    problems are located at the service's origin. This host's own addresses and ports do not matter where
    `serving`, the version in use, claims them already."""
    found = []
    origin = service.origin
    announced = service.announced_addresses() if service.announcement else ()
    claimed = _claimed(serving)
    for address in service.all_addresses():
        if refusal := _address_refusal(address, announced, claimed, origin.source, policy):
            what, hint = f"{service.name}: {refusal[0]}", refusal[1]
            found.append(Problem(origin.path or origin.source, origin.line, "", what, hint))
    for what, hint in (
        *_beyond_dataplane(service, policy),
        *_without_lan_holder(service, policy, serving),
        *policy.host.violations(service, serving),
        *policy.limits.violations(service, policy.host.own_addresses),
        *(_name_violations(service, policy) if service.names else ()),
    ):
        found.append(Problem(origin.path or origin.source, origin.line, "", what, hint))
    return (*found, *_check_problems(service, policy))


def _name_violations(service: Service, policy: AddressPolicy) -> Iterator[tuple[str, str]]:
    """The DNS names that a service's source may not use, each with a hint."""
    for named in service.names:
        if not name_allowed(named.name, policy.names, service.origin.source):
            what = f"{service.name}: backend {named}: allowed_names has no such name"
            yield (
                what,
                f"name an ending of it for {service.origin.source} in allowed_names in vipd's settings",
            )


def _beyond_dataplane(service: Service, policy: AddressPolicy) -> Iterator[tuple[str, str]]:
    """What the dataplane cannot do for a service, each with a hint."""
    if service.balance not in policy.balances:
        what = f"{service.name}: the dataplane cannot do balance: {service.balance}"
        yield what, "use dataplane: nftables in vipd's settings, or affinity: client-ip"
    if service.limits and not policy.flow_limits:
        what = f"{service.name}: kube-proxy's chains have no place for limits"
        yield what, "leave limits out, or use another chain_prefix, without compat: kube-proxy"


def _without_lan_holder(
    service: Service, policy: AddressPolicy, serving: Service | None
) -> Iterator[tuple[str, str]]:
    """That no host would answer for the service's addresses, with a hint; nothing where `serving`, the
    version in use, has the same announcement already."""
    announcement = service.announcement
    if policy.lan_holders or announcement is None or (serving and serving.announcement == announcement):
        return
    if announcement.by is AnnounceMethod.L2:
        yield f"{service.name}: announce: l2 needs etcd, and vipd has none here", L2_HINT


def host_port_numbers(service: Service) -> set[int]:
    """The numbers of a service's node ports and health port."""
    return {port.node_port for port in service.ports if port.node_port} | (
        {service.health_port} if service.health_port else set()
    )


def port_share_problem(services: Iterable[Service], taken: Collection[int], most: int) -> Problem | None:
    """That these services of one author, beside the host ports that are `taken` by his others, have more than
    `most`; located at the first one beyond."""
    numbers = set(taken)
    for service in services:
        numbers |= host_port_numbers(service)
        if len(numbers) > most:
            origin = service.origin
            whose = f"{origin.author} has" if origin.source != CLI else "vipctl's services have"
            what = f"{service.name}: {whose} more than {most} ports of this host, the most of one author"
            hint = "use fewer node ports, or raise node_ports_per_author in vipd's settings"
            return Problem(origin.path or origin.source, origin.line, "", what, hint)
    return None


def admit_registered(
    service: Service, registered: RegisteredBackend, policy: AddressPolicy
) -> tuple[Problem, ...]:
    """Returns a problem for each reason why a backend that registered itself may not join a service. The
    limits for etcd apply to it, whatever the service's source."""
    place, backend = registered
    if not service.accepts_registrations:
        what = f"it takes no registered backends, and is declared by {service.origin.owner}"
        hint = "write registrations: true in its declaration"
        if service.origin.source == CLI:
            hint = f"vipctl set {service.name} --registrations true"
        return (Problem(place, 0, "", f"{service.name}: {what}", hint),)
    refusals = list(policy.limits.backend_violations((backend,), ETCD))
    if backend.address in service.all_addresses():
        # Packets to it would match the service's rules again, in an endless loop.
        what = f"backend {backend.address} is an address of the service itself"
        refusals.append((what, "register the address that the server has"))
    told = [Problem(place, 0, "", f"{service.name}: {what}", hint) for what, hint in refusals]
    alone = replace(
        service,
        backends=(backend,),
        named_backends=(),
        fallback=(),
        named_fallback=(),
        check=UNCHECKED,
        origin=Origin(ETCD, place),
    )
    return (*told, *_check_problems(alone, policy))


def checks_to_query(service: Service, policy: AddressPolicy) -> Iterator[Check]:
    """The checks of a service that depend on the host's programs, users or files, without forbidden ones."""
    return (
        check
        for check in _checks_of(service)
        if depends_on_host(check) and not _forbidden(check, service, policy)
    )


def _checks_of(service: Service) -> Iterable[Check]:
    templates = (named.template for named in service.names)
    own = [b.check for b in (*service.backends, *templates, *service.fallback) if b.check is not None]
    return dict.fromkeys((service.check, *own)) if own else (service.check,)


def _forbidden(check: Check, service: Service, policy: AddressPolicy) -> tuple[str, str] | None:
    """Why a service from its source may not have a check, with a hint; None if it may."""
    source = service.origin.source
    if isinstance(check.probe, ExecProbe) and source not in policy.exec_sources:
        hint = "use another type of check, or see exec_checks in vipd's settings"
        return "checks that run programs are not allowed here", hint
    if isinstance(check.probe, HttpProbe) and check.probe.ca and source not in policy.ca_sources:
        hint = "leave it out, for the certificates that the host trusts, or declare the service in a file"
        return f"ca names a file of this host, which a service in {source} may not", hint
    return check_violation(check, source)


def _check_problems(service: Service, policy: AddressPolicy) -> Iterator[Problem]:
    """A problem for each check that is forbidden, or that this host cannot run."""
    origin = service.origin
    for check in _checks_of(service):
        if forbidden := _forbidden(check, service, policy):
            what, hint = forbidden
            yield Problem(origin.path or origin.source, origin.line, "", f"{service.name}: {what}", hint)
            continue
        for problem in policy.check_problems(check):
            what, _, hint = problem.partition("; hint: ")
            yield Problem(origin.path or origin.source, origin.line, "", f"{service.name}: {what}", hint)
