"""The grammar of one service in vipd/v1: a table per mapping, a function per key. Pure.

To add a key: one line in its table and one function that reads the value into the draft.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TypeAlias

from vipd.declaration.backend_reader import read_backends
from vipd.declaration.external_reader import (
    check_allowed,
    read_allow_from,
    read_external_addresses,
    read_traffic_policy,
)
from vipd.declaration.fields import (
    Located,
    Report,
    known_keys,
    misspelt,
    one_or_more,
    read_boolean,
    read_choice,
    read_integer,
    read_short_form,
    read_text,
)
from vipd.declaration.nodes import Mapping, Node
from vipd.declaration.policy_reader import DEFAULTS_KEYS, AnnounceSpec
from vipd.declaration.policy_reader import ServiceDefaults as DefaultPolicy
from vipd.declaration.port_reader import read_ports
from vipd.declaration.service_rules import (
    check_backend_ports,
    check_backends,
    check_flow_takeover,
    check_host_ports,
    check_names,
    check_port,
    check_vip,
    check_weight_source,
    required_protocol,
    templates,
    unique_addresses,
    unique_ports,
)
from vipd.declaration.service_size import check_address_endpoints, check_size, network_count
from vipd.declaration.syntax import MAX_PORT, parse_address, quoted
from vipd.model import limits
from vipd.model.check import UNCHECKED
from vipd.model.check_target import backends_without_check_port
from vipd.model.frozen import fast_constructor
from vipd.model.service import (
    Announcement,
    Backend,
    ExternalAddress,
    Frontend,
    NamedBackend,
    Origin,
    Service,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
    family_of,
)

_FEW = 10
"""This many ports, with as many addresses and a tenth of the backends, are below every limit."""

SERVICE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")


@dataclass(slots=True)
class _Draft(DefaultPolicy):
    """A partly read service."""

    name: Located[str] | None = None
    addresses: list[Located[str]] = field(default_factory=list)
    ports: list[Located[ServicePort]] = field(default_factory=list)
    backends: list[Located[Backend]] = field(default_factory=list)
    named: list[Located[NamedBackend]] = field(default_factory=list)
    external: list[Located[ExternalAddress]] = field(default_factory=list)
    load_balancer: list[Located[ExternalAddress]] = field(default_factory=list)
    allow_from: Located[tuple[str, ...]] | None = None
    internal_policy: TrafficPolicy = TrafficPolicy.CLUSTER
    external_policy: TrafficPolicy = TrafficPolicy.CLUSTER
    node_port: Located[int] | None = None
    health_port: Located[int] | None = None
    ends_flows: bool = False
    answers_ping: bool = True
    registrations: bool | None = None
    flow_takeover: Located[bool] | None = None
    distribution: TrafficDistribution = TrafficDistribution.PREFER_SAME_ZONE

    def claimed(self) -> list[Located[str]]:
        """Every address, those for inside first."""
        outside = [*self.external, *self.load_balancer]
        return [*self.addresses, *(Located(e.value.address, e.line, e.path) for e in outside)]

    def names(self) -> list[Located[NamedBackend]]:
        return [*self.named, *self.named_fallback]


_defaults = attrgetter(*(each.name for each in fields(DefaultPolicy)))
"""The values of `defaults`, in the order in which a draft takes them."""

_new_service = fast_constructor(Service)

_ServiceKey: TypeAlias = Callable[[Report, _Draft, Node, str], None]


def read_service(
    report: Report, node: Node, path: str, defaults: DefaultPolicy, origin: Origin
) -> Service | None:
    """One service, or None when it lacks a readable address or port. Every fault of it is reported."""
    draft = _Draft(*_defaults(defaults))
    draft.own_fallback = draft.own_check = draft.own_announce = False
    if not isinstance(node, Mapping):
        report.wrong_type(node, path, "a service: a mapping with address, ports and backends")
        return None
    prefix = f"{path}." if path else ""
    for key, value in known_keys(report, node, path, SERVICE_KEYS):
        SERVICE_KEYS[key](report, draft, value, prefix + key)
    written = {*node.items, *misspelt(report, node, SERVICE_KEYS)}
    if not ADDRESS_KEYS & written:
        report.add(node.line, path, "address is missing", "every service needs address")
    if "ports" not in written:
        report.add(node.line, path, "ports is missing", "every service needs ports")
    claimed = draft.claimed()
    if not claimed or not draft.ports or not _check_size(report, node.line, path, draft):
        return None
    _check_consistency(report, draft, unique_addresses(report, claimed))
    service = _finish(report, draft, origin)
    if draft.flow_takeover and service.flow_takeover:
        check_flow_takeover(report, draft.flow_takeover, service)
    unasked = set(backends_without_check_port(service))
    if unasked and not report.accepted:
        places = [b for b in (*draft.backends, *draft.fallback) if b.value in unasked]
        check_backend_ports(report, places, service)
    return service


def _check_size(report: Report, line: int, path: str, draft: _Draft) -> bool:
    """Whether its parts are few enough to be combined."""
    few = len(draft.ports) <= _FEW and len(draft.addresses) <= _FEW and not draft.allow_from
    if (
        few
        and _FEW * len(draft.backends) <= limits.BACKENDS
        and not (draft.external or draft.load_balancer or draft.fallback or draft.names())
    ):
        return True  # most services: nothing to count
    externals = [*draft.external, *draft.load_balancer]
    addresses = len(draft.addresses) + len(externals)
    networks = network_count(externals, draft.allow_from.value if draft.allow_from else (), draft.addresses)
    backends = [*draft.backends, *draft.fallback, *templates(draft.names())]
    if not check_size(report, line, path, draft.ports, backends, addresses + networks):
        return False
    return check_address_endpoints(report, line, path, addresses, len(draft.ports) * len(backends))


def _check_consistency(report: Report, draft: _Draft, claimed: list[Located[str]]) -> None:
    """Combine the parts of a draft, and report invalid combinations."""
    places = {address.path for address in claimed}
    draft.external = [e for e in (*draft.external, *draft.load_balancer) if e.path in places]
    draft.load_balancer = []
    check_allowed(report, draft.addresses, draft.external, draft.allow_from)
    if draft.node_port is not None:
        _assign_node_port(report, draft, draft.node_port)
    check_host_ports(report, draft.ports, draft.health_port)
    if not draft.own_fallback:
        families = {family_of(address.value) for address in claimed}
        draft.fallback = tuple([b for b in draft.fallback if family_of(b.value.address) in families])
    outside = [family_of(e.value.address) for e in draft.external]
    check_backends(report, draft.backends, draft.addresses, draft.ports, outside)
    check_backends(report, draft.fallback, draft.addresses, draft.ports, outside)
    for named in filter(None, (draft.named, draft.named_fallback)):
        check_names(report, named, [port.value for port in draft.ports])
    _check_health_checks(report, draft)
    if draft.announce:
        _check_announce(report, draft, draft.announce)


def _check_health_checks(report: Report, draft: _Draft) -> None:
    """A check must have a port to probe. A default one without a port is not inherited."""
    protocols = {port.value.protocol for port in draft.ports}
    if draft.check and not draft.own_check and required_protocol(draft.check.value) not in {None, *protocols}:
        draft.check = None
    if draft.check:
        check_port(report, draft.check, protocols)
    backends = [*draft.backends, *templates(draft.named)] if draft.named else draft.backends
    for backend in backends:
        if backend.value.check is not None:
            check_port(report, Located(backend.value.check, backend.line, f"{backend.path}.check"), protocols)
    check_weight_source(report, draft.weight_from, draft.check, [b.value for b in backends])


def _assign_node_port(report: Report, draft: _Draft, node_port: Located[int]) -> None:
    """A node port of the whole service is that of its only port."""
    port = draft.ports[0]
    if len(draft.ports) > 1:
        what = f"node_port fits a service with one port; this one has {len(draft.ports)}"
        example = (
            f"{{port: {port.value.port}, protocol: {port.value.protocol}, node_port: {node_port.value}}}"
        )
        report.add(node_port.line, node_port.path, what, f"say it of a port: {example}")
    elif port.value.node_port:
        what = f"a node port is already said in {port.reference_from(node_port.line)}"
        report.add(node_port.line, node_port.path, what, "remove one of them")
    else:
        draft.ports = [port._replace(value=replace(port.value, node_port=node_port.value))]


def _finish(report: Report, draft: _Draft, origin: Origin) -> Service:
    first = draft.ports[0].value
    default_name = str(Frontend(draft.claimed()[0].value, first.port, first.protocol))
    return _new_service(
        name=_name(report, draft.name, default_name),
        addresses=tuple([address.value for address in draft.addresses]),
        ports=tuple([port.value for port in draft.ports]),
        backends=tuple([backend.value for backend in draft.backends]),
        named_backends=tuple([named.value for named in draft.named]),
        named_fallback=tuple([named.value for named in draft.named_fallback]),
        affinity=draft.affinity,
        masquerade=draft.masquerade,
        refusal=draft.refusal,
        fallback=tuple([backend.value for backend in draft.fallback]),
        external_addresses=tuple([external.value for external in draft.external]),
        allow_from=draft.allow_from.value if draft.allow_from else (),
        internal_policy=draft.internal_policy,
        external_policy=draft.external_policy,
        health_port=draft.health_port.value if draft.health_port else None,
        ends_flows=draft.ends_flows,
        answers_ping=draft.answers_ping,
        balance=draft.balance,
        check=draft.check.value if draft.check else UNCHECKED,
        keeps_unhealthy=draft.keeps_unhealthy,
        slow_start=draft.slow_start,
        weight_from_check=draft.weight_from is not None and draft.weight_from.value,
        registrations=draft.registrations,
        traffic_distribution=draft.distribution,
        announcement=_announcement(draft, draft.announce.value) if draft.announce else None,
        flow_takeover=draft.flow_takeover is not None and draft.flow_takeover.value,
        limits=draft.limits,
        origin=origin,
    )


def _check_announce(report: Report, draft: _Draft, announce: Located[AnnounceSpec]) -> None:
    """`external` on a service without such addresses announces none of them."""
    if draft.own_announce and announce.value.inside is False and not draft.external:
        what = "announces external addresses; this service has none"
        hint = f"write announce: {announce.value.by}, which announces address then"
        report.add(announce.line, announce.path, what, hint)


def _announcement(draft: _Draft, announce: AnnounceSpec) -> Announcement | None:
    """What is announced. `address` is if it is the only one, but only when the service says so itself: a
    default would announce every internal service of the document."""
    by, inside = announce.by, announce.inside
    if inside is None:
        inside = draft.own_announce and not draft.external
    return Announcement(by, inside) if inside or draft.external else None


def _name(report: Report, name: Located[str] | None, default: str) -> str:
    if name is None or name.value == default:
        return default
    if SERVICE_NAME.fullmatch(name.value):
        return name.value
    what = f"{quoted(name.value)} is not a service name"
    hint = "1 to 128 of A-Z a-z 0-9 . _ / - with a letter or digit at both ends"
    if ":" in name.value:
        hint = f"only the default name {default} may contain a colon"
    report.add(name.line, name.path, what, hint)
    return default


def _read_name(report: Report, draft: _Draft, node: Node, path: str) -> None:
    text = read_text(report, node, path, "a name")
    if text is not None:
        draft.name = Located(text, node.line, path)


def _read_address(report: Report, draft: _Draft, node: Node, path: str) -> None:
    items = one_or_more(node, path)
    if not items:
        report.add(node.line, path, "the list is empty", "every service needs an address")
    found = []
    for place, item in items:
        text = read_short_form(report, item, place, parse_address, "an IP address")
        if text is not None:
            address = Located(text, item.line, place)
            if check_vip(report, address):
                found.append(address)
    draft.addresses = unique_addresses(report, found)


def _read_backends(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.backends, draft.named = read_backends(report, node, path)


def _read_ports(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.ports = unique_ports(report, read_ports(report, node, path))


def _read_external(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.external = read_external_addresses(report, node, path, load_balancer=False)


def _read_load_balancer(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.load_balancer = read_external_addresses(report, node, path, load_balancer=True)


def _read_allow_from(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.allow_from = Located(read_allow_from(report, node, path), node.line, path)


def _read_traffic_policy(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.internal_policy, draft.external_policy = read_traffic_policy(report, node, path)


def _read_traffic_distribution(report: Report, draft: _Draft, node: Node, path: str) -> None:
    choice = read_choice(report, node, path, {each.value: each for each in TrafficDistribution})
    draft.distribution = choice or draft.distribution


def _read_node_port(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.node_port = _read_host_port(report, node, path)


def _read_health_port(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.health_port = _read_host_port(report, node, path)


def _read_on_remove(report: Report, draft: _Draft, node: Node, path: str) -> None:
    choice = read_choice(report, node, path, ON_REMOVE)
    draft.ends_flows = draft.ends_flows if choice is None else choice


def _read_respond_to_ping(report: Report, draft: _Draft, node: Node, path: str) -> None:
    choice = read_boolean(report, node, path)
    draft.answers_ping = draft.answers_ping if choice is None else choice


def _read_registrations(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.registrations = read_boolean(report, node, path)


def _read_flow_takeover(report: Report, draft: _Draft, node: Node, path: str) -> None:
    choice = read_boolean(report, node, path)
    draft.flow_takeover = None if choice is None else Located(choice, node.line, path)


def _read_host_port(report: Report, node: Node, path: str) -> Located[int] | None:
    number = read_integer(report, node, path, 1, MAX_PORT)
    return None if number is None else Located(number, node.line, path)


ON_REMOVE = {"keep": False, "reset": True}
"""What happens to established flows of a removed backend."""

ADDRESS_KEYS = {"address", "external_addresses", "load_balancer_addresses"}

SERVICE_KEYS: dict[str, _ServiceKey] = {
    "name": _read_name,
    "address": _read_address,
    "ports": _read_ports,
    "backends": _read_backends,
    "external_addresses": _read_external,
    "load_balancer_addresses": _read_load_balancer,
    "allow_from": _read_allow_from,
    "node_port": _read_node_port,
    "health_port": _read_health_port,
    "traffic_policy": _read_traffic_policy,
    "traffic_distribution": _read_traffic_distribution,
    "on_remove": _read_on_remove,
    "respond_to_ping": _read_respond_to_ping,
    "registrations": _read_registrations,
    "flow_takeover": _read_flow_takeover,
    **DEFAULTS_KEYS,
}
"""The keys of a service."""
