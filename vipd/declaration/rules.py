"""Rules across the keys of one service: useless addresses, duplicates, loops, checks without a port. Pure.

They look at the values that are right by themselves, so that every fault is told at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from vipd.declaration.service import Announce
from vipd.declaration.syntax import quoted
from vipd.declaration.values import Faults, Located, Path
from vipd.model import limits
from vipd.model.check import Check, DnsProbe, ExecProbe, HttpProbe, UdpProbe
from vipd.model.check_target import backends_without_check_port
from vipd.model.service import (
    Backend,
    Balance,
    ExternalAddress,
    Family,
    Frontend,
    Masquerade,
    NamedBackend,
    NameKind,
    Protocol,
    Service,
    ServicePort,
    TrafficPolicy,
    family_of,
    socket_text,
)

MAX_NAMED = 20
"""More ports than these are not suggested."""
_DIVIDE = "divide it into several services"
_FEW = 10
"""This many ports, with as many addresses and a tenth of the backends, are below every limit."""


@dataclass(slots=True)
class Draft:
    """The right values of a service that is being read."""

    path: Path
    faults: Faults
    addresses: list[Located[str]]
    ports: list[Located[ServicePort]]
    backends: Sequence[Located[Backend]] = ()
    named: Sequence[Located[NamedBackend]] = ()
    fallback: Sequence[Located[Backend]] = ()
    named_fallback: Sequence[Located[NamedBackend]] = ()
    detailed: bool = False
    """Whether a backend may have ports or a check of its own."""
    external: list[Located[ExternalAddress]] = field(default_factory=list)
    allow_from: tuple[str, ...] = ()
    check: Check | None = None

    def claimed(self) -> list[Located[str]]:
        """Every address, those for inside first."""
        return [*self.addresses, *(Located(e.value.address, e.path) for e in self.external)]

    def names(self) -> list[Located[NamedBackend]]:
        """Backends by name, those of the fallback last."""
        return [*self.named, *self.named_fallback]

    def at(self, key: str) -> Path:
        """The path of a key."""
        return (*self.path, key)


def is_plain(draft: Draft) -> bool:
    """Whether no backend has a name or a check of its own, and no port is one of the host."""
    of_host = [port for port, _ in draft.ports if port.node_port is not None]
    return not (draft.detailed or draft.named or of_host)


def unique(addresses: Iterable[Located[str]], faults: Faults) -> list[Located[str]]:
    """The addresses without repetitions."""
    first: dict[str, Located[str]] = {}
    for address in addresses:
        earlier = first.setdefault(address.value, address)
        if earlier is not address:
            faults.add(address.path, f"{address.value} is already", "remove one of them", other=earlier.path)
    return list(first.values())


def unique_ports(ports: Sequence[Located[ServicePort]], faults: Faults) -> list[Located[ServicePort]]:
    """The ports without those that repeat a number and protocol."""
    if len(ports) == 1:
        return list(ports)
    numbers: dict[str, Located[ServicePort]] = {}
    names: dict[str, Located[ServicePort]] = {}
    kept = []
    for port in ports:
        twin = numbers.setdefault(str(port.value), port)
        if twin is not port:
            faults.add(port.path, f"{port.value} is already", "remove one of them", other=twin.path)
            continue
        kept.append(port)
        namesake = names.setdefault(port.value.name, port) if port.value.name else port
        if namesake is not port:
            what = f'the name "{port.value.name}" is already taken by'
            faults.add(port.path, what, "give each port of a service its own name", other=namesake.path)
    return kept


def small_enough(draft: Draft) -> bool:
    """Whether its parts are few enough to be combined."""
    plain = not (draft.allow_from or draft.external or draft.fallback or draft.named or draft.named_fallback)
    few = max(len(draft.ports), len(draft.addresses)) <= _FEW
    if plain and few and _FEW * len(draft.backends) <= limits.BACKENDS:
        return True  # most services: nothing to count
    backends = [*draft.backends, *draft.fallback, *templates(draft.names())]
    return few_parts(draft, backends) and few_at_addresses(draft, len(draft.ports) * len(backends))


def few_parts(draft: Draft, backends: Sequence[Located[Backend]], *, whole: bool = False) -> bool:
    """Whether its ports, backends and addresses are few enough, also multiplied. `whole`: a fault shows no
    path."""
    ports, addresses = len(draft.ports), len(draft.addresses) + len(draft.external)
    for number, most, kind in ((ports, limits.PORTS, "ports"), (len(backends), limits.BACKENDS, "backends")):
        if number > most:
            what = f"{number} {kind} are too many: {most} are the most"
            draft.faults.add(draft.path, what, _DIVIDE, whole=whole)
            return False
    networks = network_count((e.value for e in draft.external), draft.allow_from, len(draft.addresses))
    named = sum(len(backend.value.ports) for backend in backends)
    for number, kind, made, most in (
        (len(backends), "backends", "endpoints", limits.SERVICE_ENDPOINTS),
        (addresses + networks, "addresses and networks", "frontends", limits.SERVICE_ENDPOINTS),
        (named, "ports named by backends", "combinations", limits.NAMED_PORT_LOOKUPS),
    ):
        if ports * number > most:
            what = f"{ports} ports and {number} {kind} make {ports * number} {made}"
            draft.faults.add(draft.path, f"{what}: {most} are the most", _DIVIDE, whole=whole)
            return False
    return True


def few_at_addresses(draft: Draft, endpoints: int, *, whole: bool = False) -> bool:
    """Whether so many endpoints (ports times backends) are few enough at its addresses."""
    addresses = len(draft.addresses) + len(draft.external)
    if addresses * endpoints > limits.ADDRESS_ENDPOINTS:
        what = f"{endpoints} endpoints at each of {addresses} addresses make {addresses * endpoints}"
        what += f": {limits.ADDRESS_ENDPOINTS} are the most"
        draft.faults.add(draft.path, what, _DIVIDE, whole=whole)
        return False
    return True


DIVIDE_FILE = "divide it into several files, or write fewer services"


def beyond_total(size: int, number: int) -> str:
    """Why so many services of this size together are too many; empty: they are not."""
    if number > limits.SERVICES:
        return f"the document has more than {limits.SERVICES} services"
    if size > limits.MAX_UNIT_SIZE:
        return f"up to here the services have more than {limits.MAX_UNIT_SIZE} endpoints"
    return ""


def within_total(faults: Faults, path: Path, service: Service, number: int) -> bool:
    """Whether a service is within the limits together with those read before, being the `number`-th."""
    faults.size += limits.declared_size(service)
    what = beyond_total(faults.size, number)
    if what:
        faults.add(path, what, DIVIDE_FILE, whole=True)
    return not what


def network_count(externals: Iterable[ExternalAddress], allowed: Sequence[str], addresses: int) -> int:
    """Number of networks that limit addresses; those for all of them count for each, and for a node port."""
    own = sum(len(allowed if e.allow_from is None else e.allow_from) for e in externals)
    return own + len(allowed) * (addresses + 1)


def templates(named: Iterable[Located[NamedBackend]]) -> list[Located[Backend]]:
    """What the backends of names have in common, at the paths of the names."""
    return [Located(each.value.template, each.path) for each in named]


def check_allowed(draft: Draft) -> None:
    """Limited addresses whose family no network has."""
    for address in draft.addresses:
        _check_family(draft, address, draft.allow_from, "")
    for external, path in draft.external:
        networks = draft.allow_from if external.allow_from is None else external.allow_from
        hint = f"write {{address: {external.address}, allow_from: any}}"
        _check_family(draft, Located(external.address, path), networks, hint)


def _check_family(draft: Draft, address: Located[str], networks: Sequence[str], hint: str) -> None:
    family = family_of(address.value)
    if not networks or any(family_of(network) is family for network in networks):
        return
    everyone = "::/0" if family is Family.IPV6 else "0.0.0.0/0"
    what = f"no network of allow_from is {family_name(family)}: {address.value} would be open to all"
    hint = hint or f"{everyone} for everyone"
    draft.faults.add(address.path, what, f"name an {family_name(family)} network, or {hint}")


def assign_node_port(draft: Draft, number: int) -> None:
    """A node port of the whole service is that of its only port."""
    port, path = draft.ports[0].value, draft.at("node_port")
    if len(draft.ports) > 1:
        what = f"node_port fits a service with one port; this one has {len(draft.ports)}"
        example = f"{{port: {port.port}, protocol: {port.protocol}, node_port: {number}}}"
        draft.faults.add(path, what, f"say it of a port: {example}")
    elif port.node_port:
        draft.faults.add(
            path, "a node port is already said in", "remove one of them", other=draft.ports[0].path
        )
    else:
        draft.ports = [draft.ports[0]._replace(value=replace(port, node_port=number))]


def check_host_ports(draft: Draft, health_port: Located[int] | None) -> None:
    """Ports of the host that the service takes twice: as node ports, or as its health port."""
    first: dict[tuple[int, Protocol], Located[ServicePort]] = {}
    for port in draft.ports:
        if port.value.node_port is None:
            continue
        twin = first.setdefault((port.value.node_port, port.value.protocol), port)
        if twin is not port:
            what = f"{Frontend('', port.value.node_port, port.value.protocol)} is already that of"
            draft.faults.add(port.path, what, "choose another node port", other=twin.path)
    taken = first.get((health_port.value, Protocol.TCP)) if health_port else None
    if health_port and taken:
        what = f"{Frontend('', health_port.value, Protocol.TCP)} is already that of"
        draft.faults.add(health_port.path, what, "choose another health port", other=taken.path)


def check_backends(draft: Draft, backends: Sequence[Located[Backend]]) -> None:
    """Backends of a family that the service lacks, duplicates, and backends that are the service itself.

    External addresses do not count as the service itself: one may be a host's own, whose server is then a
    valid backend.
    """
    if not backends:
        return
    own = {address for address, _ in draft.addresses}
    families = {family_of(address) for address in own}
    if draft.external:
        families |= {family_of(external.address) for external, _ in draft.external}
    seen = {backend.address for backend, _ in backends}
    # Most services are in one family, and so are their backends: that is seen without a call for each.
    if len(families) == 1 and (Family.IPV6 in families or ":" in "".join(seen)):
        _check_families(draft, backends, families)
    if len(seen) < len(backends):
        _check_duplicates(draft, backends)
    if not seen.isdisjoint(own):
        _check_loops(draft, backends, own)
    if draft.detailed:
        _check_port_names(draft, backends)


def _check_families(draft: Draft, backends: Sequence[Located[Backend]], families: set[Family]) -> None:
    for backend, path in backends:
        family = family_of(backend.address)
        if family not in families:
            name = family_name(family)
            what = f"{backend.address} is {name}, but the service has no {name} address"
            hint = f"add an {name} address to the service, or remove the backend"
            draft.faults.add(path, what, hint)


def _check_duplicates(draft: Draft, backends: Sequence[Located[Backend]]) -> None:
    first: dict[tuple[str, str, int], Located[Backend]] = {}
    ports = [port.value for port in draft.ports]
    for backend in backends:
        numbers = [(str(port), backend.value.port_for(port)) for port in ports]
        reached = [(backend.value.address, port, number) for port, number in numbers if number]
        twin = next((key for key in reached if key in first), None)
        if twin is None:
            first.update(dict.fromkeys(reached, backend))
            continue
        what = f"{socket_text(twin[0], twin[2])} is already"
        hint = "list it once; for a larger share give it a weight"
        draft.faults.add(backend.path, what, hint, other=first[twin].path)


def _check_loops(draft: Draft, backends: Sequence[Located[Backend]], own: set[str]) -> None:
    ports = [port.value for port in draft.ports]
    frontends = {(port.port, port.protocol) for port in ports}
    for backend, path in backends:
        if backend.address not in own:
            continue
        reached = [Frontend(backend.address, backend.port_for(p) or 0, p.protocol) for p in ports]
        looping = [frontend for frontend in reached if frontend[1:] in frontends]
        what = f"{backend.address} is the service's own virtual IP: a packet is translated only once"
        if looping:
            what = f"{looping[0]} is the service itself: a loop"
        elif draft.faults.accepted:
            continue
        draft.faults.add(path, what, "name the address and port that the server listens on")


def _check_port_names(draft: Draft, backends: Sequence[Located[Backend]]) -> None:
    names = [port.value.name for port in draft.ports if port.value.name]
    known = frozenset(names)
    some = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
    for backend, path in backends:
        for name, _ in backend.ports:
            if name not in known:
                what = f"the service has no port named {quoted(name)}"
                hint = f"its named ports: {some}" if names else "give its ports names"
                draft.faults.add((*path, "ports"), what, hint)


def family_name(family: Family) -> str:
    """As people write it."""
    return "IPv6" if family is Family.IPV6 else "IPv4"


def check_names(draft: Draft, named: Sequence[Located[NamedBackend]]) -> None:
    """Names that are listed twice, SRV names of a service with several ports, and unknown ports."""
    first: dict[str, Located[NamedBackend]] = {}
    for backend in named:
        earlier = first.setdefault(str(backend.value), backend)
        if earlier is not backend:
            what = f"{backend.value} is already"
            draft.faults.add(backend.path, what, "list it once", other=earlier.path)
        if backend.value.kind is NameKind.SRV and len(draft.ports) > 1:
            what = f"srv fits a service with one port; this one has {len(draft.ports)}"
            hint = "an SRV record has one port: declare a service for each port, or use dns"
            draft.faults.add(backend.path, what, hint)
    _check_port_names(draft, templates(named))


def required_protocol(check: Check) -> Protocol | None:
    """The protocol of the service port that a check probes; None if it needs none of them."""
    if check.probe is None or check.probe.port is not None or isinstance(check.probe, ExecProbe):
        return None
    return Protocol.UDP if isinstance(check.probe, UdpProbe | DnsProbe) else Protocol.TCP


def check_checks(draft: Draft, own_check: bool, check_path: Path, weight_from: Path | None) -> None:
    """A check must have a port to probe. A default one without a port is not inherited."""
    backends = [*draft.backends, *templates(draft.named)] if draft.named else draft.backends
    own = [(backend.check, (*path, "check")) for backend, path in backends if backend.check is not None]
    if not (draft.check or own or weight_from):
        return
    protocols = {port.value.protocol for port in draft.ports}
    if draft.check and not own_check and required_protocol(draft.check) not in {None, *protocols}:
        draft.check = None
    if draft.check:
        _check_port(draft, draft.check, check_path, protocols)
    for check, path in own:
        _check_port(draft, check, path, protocols)
    checks = [check for check, _ in own] + ([draft.check] if draft.check else [])
    if weight_from and not any(isinstance(check.probe, HttpProbe) for check in checks):
        what = "no check of this service can say a weight"
        draft.faults.add(weight_from, what, "add check: {type: http}, or remove weight_from")


def _check_port(draft: Draft, check: Check, path: Path, protocols: Collection[Protocol]) -> None:
    protocol = required_protocol(check)
    if protocol is not None and protocol not in protocols:
        what = f"the service has no {protocol} port that this check could ask at"
        draft.faults.add(path, what, "add port to the check, or use another type of check")


def check_backend_ports(draft: Draft, service: Service) -> None:
    """Backends without a port that their check could probe, though the service has some."""
    if draft.faults.accepted or not draft.detailed:
        return
    if not [backend for backend in (*service.backends, *service.fallback) if backend.ports]:
        return  # whoever serves all ports can be asked at one of them
    unasked = set(backends_without_check_port(service))
    for backend, path in (*draft.backends, *draft.fallback):
        if backend not in unasked:
            continue
        protocol = required_protocol(service.check if backend.check is None else backend.check)
        if protocol is not None and protocol not in {port.protocol for port in service.ports}:
            continue  # told of the check already
        what = f"the check of {backend.address} finds no {protocol or ''} port".replace("  ", " ")
        serves = ", ".join(name for name, _ in backend.ports[:MAX_NAMED]) or "no port"
        hint = "add port to the check, or give this backend check: none"
        draft.faults.add(path, f"{what}: it serves {serves} alone", hint)


def check_announce(draft: Draft, announce: Announce, own: bool, path: Path) -> None:
    """`external` on a service without such addresses announces none of them."""
    if own and announce.inside is False and not draft.external:
        what = "announces external addresses; this service has none"
        draft.faults.add(path, what, f"write announce: {announce.by}, which announces address then")


def check_flow_takeover(draft: Draft, service: Service) -> None:
    """What keeps the hosts from sending a client to the same backend under the same addresses, so that no
    flow could go on."""
    policy = service.external_policy if service.external_addresses else service.internal_policy
    faults = (
        (
            service.balance is not Balance.SOURCE_HASH,
            "needs the same backend for a client on every host",
            "add balance: source-hash",
        ),
        (
            service.masquerade is not Masquerade.HAIRPIN,
            "needs backends that see the client's address: masquerade uses a host's own",
            "add masquerade: hairpin, and have replies return through the host that they came by",
        ),
        (
            service.affinity is not None,
            "needs a backend that follows from the client's address: each host remembers other clients",
            "remove affinity, which source-hash makes needless",
        ),
        (
            policy is TrafficPolicy.LOCAL,
            "needs backends on any host: under the policy local each host has its own",
            "write traffic_policy: cluster",
        ),
        (
            all(port.protocol is not Protocol.TCP for port in service.ports),
            "concerns TCP flows, and the service has no tcp port",
            "remove it",
        ),
    )
    for wrong, what, hint in faults:
        if wrong:
            draft.faults.add(draft.at("flow_takeover"), what, hint)
