"""Rules across the keys of one service: useless addresses, duplicates, loops. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv6Address

from vipd.declaration.fields import Located, Report
from vipd.declaration.syntax import InvalidTextError, parse_address, quoted
from vipd.model.check import Check, DnsProbe, ExecProbe, HttpProbe, UdpProbe
from vipd.model.service import (
    Backend,
    Balance,
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

_SPECIAL_OCTETS = {"0", "127", "169", "255", *map(str, range(224, 240))}

MAX_NAMED = 20
"""More ports than these are not suggested."""

FORBIDDEN_VIP_KINDS = {
    "unspecified": "a service needs one definite address",
    "loopback": "loopback addresses never leave a host: choose an address of its own for the service",
    "multicast": "a service needs a unicast address",
    "link-local": "link-local addresses are not routed: choose another one",
    "broadcast": "a service needs a unicast address",
}
"""Kinds of addresses that cannot be a service's, with the hint."""

FORBIDDEN_BACKEND_KINDS = {
    "unspecified": "write the address that the backend listens on",
    "loopback": "DNAT to loopback needs the sysctl route_localnet, which vipd never sets: let the backend "
    "listen on another address of this host",
    "multicast": "a backend needs a unicast address",
    "link-local": "link-local IPv6 addresses need an interface: use a routed address",
    "broadcast": "a backend needs a unicast address",
}
"""The same for backends; there link-local counts for IPv6 only."""


def address_kind(address: str) -> str:
    """`unspecified`, `loopback`, `multicast`, `link-local` or `broadcast` of a canonical address, else ""."""
    if ":" in address:
        return _ipv6_kind(address)
    first = address.partition(".")[0]
    if first not in _SPECIAL_OCTETS:
        return ""
    if first == "127":
        return "loopback"
    if first == "169":
        return "link-local" if address.startswith("169.254.") else ""
    if first in {"0", "255"}:
        return {"0.0.0.0": "unspecified", "255.255.255.255": "broadcast"}.get(address, "")  # noqa: S104
    return "multicast"


def _ipv6_kind(address: str) -> str:
    parsed = IPv6Address(address)
    if parsed.is_unspecified:
        return "unspecified"
    if parsed.is_loopback:
        return "loopback"
    if parsed.is_multicast:
        return "multicast"
    return "link-local" if parsed.is_link_local else ""


def check_vip(report: Report, address: Located[str]) -> bool:
    """Whether the address is valid for a service; reports why not."""
    kind = address_kind(address.value)
    if kind:
        report.add(
            address.line, address.path, f"{address.value} is {_a(kind)} address", FORBIDDEN_VIP_KINDS[kind]
        )
    return not kind


def check_backend_address(report: Report, backend: Located[Backend]) -> bool:
    """Whether the address is valid for a backend; reports why not."""
    address = backend.value.address
    kind = address_kind(address)
    if not kind or (kind == "link-local" and ":" not in address):
        return True
    report.add(backend.line, backend.path, f"{address} is {_a(kind)} address", FORBIDDEN_BACKEND_KINDS[kind])
    return False


def resolved_address_fault(address: str) -> str:
    """Why an address that a name resolved to can be no backend; empty: it can."""
    try:
        kind = address_kind(parse_address(address))
    except InvalidTextError as error:
        return error.what
    return f"it is {_a(kind)} address" if kind and (kind != "link-local" or ":" in address) else ""


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def unique_addresses(report: Report, addresses: Iterable[Located[str]]) -> list[Located[str]]:
    """The addresses without repetitions, which are reported."""
    first: dict[str, Located[str]] = {}
    for address in addresses:
        earlier = first.setdefault(address.value, address)
        if earlier is not address:
            what = f"{address.value} is already {earlier.reference_from(address.line)}"
            report.add(address.line, address.path, what, "remove one of them")
    return list(first.values())


def unique_ports(report: Report, ports: Iterable[Located[ServicePort]]) -> list[Located[ServicePort]]:
    """The ports without those that repeat a number and protocol; these and repeated names are reported."""
    numbers: dict[str, Located[ServicePort]] = {}
    names: dict[str, Located[ServicePort]] = {}
    kept = []
    for port in ports:
        twin = numbers.setdefault(str(port.value), port)
        if twin is not port:
            what = f"{port.value} is already {twin.reference_from(port.line)}"
            report.add(port.line, port.path, what, "remove one of them")
            continue
        kept.append(port)
        if not port.value.name:
            continue
        namesake = names.setdefault(port.value.name, port)
        if namesake is not port:
            what = f'the name "{port.value.name}" is already taken by {namesake.reference_from(port.line)}'
            report.add(port.line, port.path, what, "give each port of a service its own name")
    return kept


def check_host_ports(
    report: Report, ports: Sequence[Located[ServicePort]], health_port: Located[int] | None
) -> None:
    """Report ports of the host that the service takes twice: as node ports, or as its health port."""
    first: dict[tuple[int, Protocol], Located[ServicePort]] = {}
    for port in ports:
        if port.value.node_port is None:
            continue
        twin = first.setdefault((port.value.node_port, port.value.protocol), port)
        if twin is not port:
            what = f"{_host_port(port.value.node_port, port.value.protocol)} is already that of"
            report.add(
                port.line, port.path, f"{what} {twin.reference_from(port.line)}", "choose another node port"
            )
    taken = first.get((health_port.value, Protocol.TCP)) if health_port else None
    if health_port and taken:
        what = f"{_host_port(health_port.value, Protocol.TCP)} is already that of"
        hint = "choose another health port"
        report.add(
            health_port.line, health_port.path, f"{what} {taken.reference_from(health_port.line)}", hint
        )


def _host_port(number: int, protocol: Protocol) -> str:
    return str(Frontend("", number, protocol))


def check_backends(
    report: Report,
    backends: Sequence[Located[Backend]],
    addresses: Sequence[Located[str]],
    ports: Sequence[Located[ServicePort]],
    outside: Iterable[Family] = (),
) -> None:
    """Report backends of a family that the service lacks, duplicates, and backends that are the service
    itself.

    `addresses` are those for inside; `outside` are the families of the external ones. Those do not count as
    the service itself: an external address may be a host's own, whose server is then a valid backend.
    """
    if not backends:
        return
    own = {address.value for address in addresses}
    families = {*map(family_of, own), *outside}
    seen = {backend.value.address for backend in backends}
    if len(families) < 2:
        _check_families(report, backends, families)
    if len(seen) < len(backends):
        _check_duplicates(report, backends, [port.value for port in ports])
    if not seen.isdisjoint(own):
        _check_loops(report, backends, own, [port.value for port in ports])
    if any(backend.value.ports for backend in backends):
        _check_port_names(report, backends, [port.value.name for port in ports if port.value.name])


def templates(named: Iterable[Located[NamedBackend]]) -> list[Located[Backend]]:
    """What the backends of names have in common, at the places of the names."""
    return [Located(each.value.template, each.line, each.path) for each in named]


def check_names(report: Report, named: Sequence[Located[NamedBackend]], ports: Sequence[ServicePort]) -> None:
    """Report names that are listed twice, SRV names of a service with several ports, and unknown ports."""
    first: dict[str, Located[NamedBackend]] = {}
    for each in named:
        earlier = first.setdefault(str(each.value), each)
        if earlier is not each:
            what = f"{each.value} is already {earlier.reference_from(each.line)}"
            report.add(each.line, each.path, what, "list it once")
        if each.value.kind is NameKind.SRV and len(ports) > 1:
            what = f"srv fits a service with one port; this one has {len(ports)}"
            hint = "an SRV record has one port: declare a service for each port, or use dns"
            report.add(each.line, each.path, what, hint)
    _check_port_names(report, templates(named), [port.name for port in ports if port.name])


def _check_port_names(report: Report, backends: Sequence[Located[Backend]], names: Sequence[str]) -> None:
    known = frozenset(names)
    some = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
    for backend in backends:
        for name, _ in backend.value.ports:
            if name not in known:
                what = f"the service has no port named {quoted(name)}"
                hint = f"its named ports: {some}" if names else "give its ports names"
                report.add(backend.line, f"{backend.path}.ports", what, hint)


def _check_families(report: Report, backends: Sequence[Located[Backend]], families: set[Family]) -> None:
    for backend in backends:
        family = family_of(backend.value.address)
        if families and family not in families:
            what = (
                f"{backend.value.address} is {_name(family)}, but the service has no {_name(family)} address"
            )
            hint = f"add an {_name(family)} address to the service, or remove the backend"
            report.add(backend.line, backend.path, what, hint)


def _name(family: Family) -> str:
    return "IPv6" if family is Family.IPV6 else "IPv4"


def _check_duplicates(
    report: Report, backends: Sequence[Located[Backend]], ports: Sequence[ServicePort]
) -> None:
    first: dict[tuple[str, str, int], Located[Backend]] = {}
    for backend in backends:
        numbers = [(str(port), backend.value.port_for(port)) for port in ports]
        reached = [(backend.value.address, port, number) for port, number in numbers if number]
        earlier = next((first[key] for key in reached if key in first), None)
        if earlier is None:
            first.update(dict.fromkeys(reached, backend))
            continue
        twin = next(key for key in reached if key in first)
        what = f"{socket_text(twin[0], twin[2])} is already {earlier.reference_from(backend.line)}"
        report.add(backend.line, backend.path, what, "list it once; for a larger share give it a weight")


def _check_loops(
    report: Report, backends: Sequence[Located[Backend]], own: set[str], ports: Sequence[ServicePort]
) -> None:
    frontends = {(port.port, port.protocol) for port in ports}
    for backend in backends:
        if backend.value.address not in own:
            continue
        reached = [Frontend(backend.value.address, backend.value.port_for(p) or 0, p.protocol) for p in ports]
        looping = [frontend for frontend in reached if frontend[1:] in frontends]
        what = f"{backend.value.address} is the service's own virtual IP: a packet is translated only once"
        if looping:
            what = f"{looping[0]} is the service itself: a loop"
        elif report.accepted:
            continue
        report.add(backend.line, backend.path, what, "name the address and port that the server listens on")


def required_protocol(check: Check) -> Protocol | None:
    """The protocol of the service port that a check probes; None if it needs none of them."""
    if check.probe is None or check.probe.port is not None or isinstance(check.probe, ExecProbe):
        return None
    return Protocol.UDP if isinstance(check.probe, UdpProbe | DnsProbe) else Protocol.TCP


def check_port(report: Report, check: Located[Check], protocols: Collection[Protocol]) -> None:
    """Report a check without a port to probe, in a service with ports of these protocols."""
    protocol = required_protocol(check.value)
    if protocol is not None and protocol not in protocols:
        what = f"the service has no {protocol} port that this check could ask at"
        report.add(check.line, check.path, what, "add port to the check, or use another type of check")


def check_backend_ports(report: Report, unasked: Iterable[Located[Backend]], service: Service) -> None:
    """Report backends without a port that their check could probe, though the service has some."""
    for backend in unasked:
        check = service.check if backend.value.check is None else backend.value.check
        protocol = required_protocol(check)
        if protocol is not None and protocol not in {port.protocol for port in service.ports}:
            continue  # reported for the check already
        what = f"the check of {backend.value.address} finds no {protocol or ''} port".replace("  ", " ")
        hint = "add port to the check, or give this backend check: none"
        report.add(backend.line, backend.path, f"{what}: it serves {_served(backend.value)} alone", hint)


def _served(backend: Backend) -> str:
    return ", ".join(name for name, _ in backend.ports[:MAX_NAMED]) or "no port"


def check_weight_source(
    report: Report,
    weight_from: Located[bool] | None,
    check: Located[Check] | None,
    backends: Iterable[Backend],
) -> None:
    """Report a service with weights from answers that no check requests."""
    checks = [backend.check for backend in backends if backend.check is not None]
    checks += [check.value] if check else []
    if weight_from and weight_from.value and not any(isinstance(c.probe, HttpProbe) for c in checks):
        what = "no check of this service can say a weight"
        hint = "add check: {type: http}, or remove weight_from"
        report.add(weight_from.line, weight_from.path, what, hint)


def check_flow_takeover(report: Report, key: Located[bool], service: Service) -> None:
    """Report what keeps the hosts from sending a client to the same backend under the same addresses, so that
    no flow could go on."""
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
            report.add(key.line, key.path, what, hint)
