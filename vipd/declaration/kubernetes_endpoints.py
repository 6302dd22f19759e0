"""EndpointSlice and Endpoints objects: the servers of each service. Pure.

Conditions default as in kube-proxy 1.36 (contract 4), and only the first address of an endpoint counts, as
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from vipd.declaration.backend_reader import TOPOLOGY_NAME_HINT, is_topology_name
from vipd.declaration.fields import Located
from vipd.declaration.kubernetes_fields import FieldCursor
from vipd.declaration.nodes import Mapping
from vipd.declaration.service_rules import check_backend_address
from vipd.declaration.syntax import quoted
from vipd.model.service import Backend, BackendState, Family, Protocol, family_of

SERVICE_LABEL = "kubernetes.io/service-name"
HEADLESS_LABEL = "service.kubernetes.io/headless"
PROXY_LABEL = "service.kubernetes.io/service-proxy-name"

PROTOCOLS = {protocol.value.upper(): protocol for protocol in Protocol}

_HINTS = ("forZones", "forNodes")
_MAX_ADDRESSES = _MAX_HINTS = 5
"""More unknown hints than these are not named."""

_FAMILIES: dict[str, Family | None] = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}


@dataclass(frozen=True, slots=True)
class NamedPort:
    """A port of endpoints: which port of the service it serves, by name and protocol, and its number."""

    name: str
    protocol: Protocol
    number: int


@dataclass(frozen=True, slots=True)
class EndpointGroup:
    """Servers that have the same ports, behind one service. A server is a `Backend` without ports."""

    service: str
    ports: tuple[NamedPort, ...]
    servers: tuple[Located[Backend], ...]
    not_ready: frozenset[int] = frozenset()
    """Places in `servers` of those that an Endpoints object counts as not ready."""


def object_name(place: FieldCursor) -> str:
    """An object's `namespace/name`, the name perhaps empty."""
    return _in_namespace(place, place.at("metadata", "name").text())


def _in_namespace(place: FieldCursor, name: str) -> str:
    whole = f"{place.at('metadata', 'namespace').text('default')}/{name}"
    # An invalid name is a problem only if it would be served; elsewhere it is only shown.
    return whole if whole.isprintable() else ascii(whole)[1:-1]


def slice_service(place: FieldCursor) -> str:
    """The `namespace/name` of the Service that an object's label names; empty without one."""
    service = place.at("metadata", "labels", SERVICE_LABEL).text()
    return _in_namespace(place, service) if service else ""


def read_slice(place: FieldCursor) -> EndpointGroup | None:
    """An EndpointSlice; None with a note if kube-proxy would skip it."""
    name = object_name(place)
    labels = place.at("metadata", "labels")
    if labels.has(HEADLESS_LABEL) or labels.has(PROXY_LABEL):
        return None
    service = labels.at(SERVICE_LABEL).text()
    if not service:
        place.note(f"EndpointSlice {name} left out: it has no label {SERVICE_LABEL}")
        return None
    kind = place.at("addressType")
    if kind.text() == "FQDN":
        place.note(f"EndpointSlice {name} left out: its endpoints are names, which are not resolved")
        return None
    if kind.node is None:
        kind.problem("addressType is missing", "write IPv4 or IPv6")
    family = kind.choice(_FAMILIES, None)
    ports = tuple(port for item in place.at("ports").items() if (port := _read_port(item)))
    endpoints = list(place.at("endpoints").items())
    read = [_read_endpoint(item, family) for item in endpoints]
    if further := [(item, text) for item in endpoints for text in _further_addresses(item)]:
        named = ", ".join(quoted(text)[1:-1] for _, text in further[:_MAX_ADDRESSES])
        more = f" and {len(further) - _MAX_ADDRESSES} more" if len(further) > _MAX_ADDRESSES else ""
        what = f"EndpointSlice {name}: {named}{more} left out: an endpoint serves at its first address alone"
        further[0][0].note(what)
    unread = next(((item, text) for item in endpoints if (text := _unread_hints(item))), None)
    if unread:
        unread[0].note(f"EndpointSlice {name}: {unread[1]} left out of the hints of its endpoints")
    return EndpointGroup(_in_namespace(place, service), ports, tuple(server for server in read if server))


def read_endpoints(place: FieldCursor) -> list[EndpointGroup]:
    """An Endpoints object: a group for each subset."""
    name = object_name(place)
    groups = []
    for subset in place.at("subsets").items():
        ports = tuple(port for item in subset.at("ports").items() if (port := _read_port(item)))
        ready = [_read_address(item) for item in subset.at("addresses").items()]
        waiting = [_read_address(item) for item in subset.at("notReadyAddresses").items()]
        servers = [server for server in ready if server]
        late = [server for server in waiting if server]
        not_ready = frozenset(range(len(servers), len(servers) + len(late)))
        groups.append(EndpointGroup(name, ports, (*servers, *late), not_ready))
    return groups


def _read_port(place: FieldCursor) -> NamedPort | None:
    """A port; None without a number, as kube-proxy then ignores it."""
    name = place.at("name").text()
    protocol = place.at("protocol").choice(PROTOCOLS, Protocol.TCP)
    number = place.at("port").port()
    return NamedPort(name, protocol, number) if number else None


def _read_endpoint(place: FieldCursor, family: Family | None) -> Located[Backend] | None:
    first = next(place.at("addresses").items(), None)
    if first is None:
        place.problem("addresses is missing", "every endpoint needs an address")
        return None
    address = first.address()
    if first.node is None:
        first.problem("has no value", "write an IP address")
    if address is None:
        return None
    if family is not None and family_of(address.value) is not family:
        first.problem(f"{address.value} is not an address of the slice's addressType")
        return None
    zones = [_place_name(zone.at("name"), "zone") for zone in place.at("hints", "forZones").items()]
    node = _place_name(place.at("nodeName"), "node")
    known = tuple(dict.fromkeys(filter(None, zones)))
    backend = Backend(address.value, state=_state(place.at("conditions")), node=node, zones=known)
    return _sound(place, Located(backend, address.line, address.path))


def _further_addresses(place: FieldCursor) -> list[str]:
    """The addresses of an endpoint after the first, which lead to the same backend: kube-proxy does not use
    them, either."""
    return [item.text() for item in islice(place.at("addresses").items(), 1, None)]


def _unread_hints(place: FieldCursor) -> str:
    """The part of an endpoint's hints that does not count: keys other than those of Kubernetes 1.36, and
    nodes other than the endpoint's own, which is the only one that Kubernetes writes."""
    hints = place.at("hints")
    if not isinstance(hints.node, Mapping):
        return ""
    items = hints.at("forNodes").items()
    nodes = {item.at("name").text() for item in items if isinstance(item.node, Mapping)}
    others = [key for key in hints.node.items if key not in _HINTS]
    if nodes - {place.at("nodeName").text()}:
        others.append("forNodes with nodes other than nodeName")
    return ", ".join(quoted(key)[1:-1] for key in others[:_MAX_HINTS])


def _state(conditions: FieldCursor) -> BackendState:
    """Ready takes precedence over terminating: both are true only if the service publishes unready
    endpoints."""
    ready, serving = conditions.at("ready").boolean(), conditions.at("serving").boolean()
    terminating = conditions.at("terminating").boolean()
    if ready is not False:
        return BackendState.UP
    return BackendState.DRAIN if terminating and serving is not False else BackendState.DOWN


def _read_address(place: FieldCursor) -> Located[Backend] | None:
    """One address of an Endpoints object."""
    ip = place.at("ip")
    if ip.node is None:
        place.problem("ip is missing", "every address of Endpoints needs an ip")
    address = ip.address()
    node = _place_name(place.at("nodeName"), "node")
    if address is None:
        return None
    return _sound(place, Located(Backend(address.value, node=node), address.line, address.path))


def _sound(place: FieldCursor, server: Located[Backend]) -> Located[Backend] | None:
    return server if check_backend_address(place.report, server) else None


def _place_name(place: FieldCursor, what: str) -> str:
    text = place.text()
    if not text or is_topology_name(text):
        return text
    place.problem(f"{quoted(text)} is not the name of a {what}", TOPOLOGY_NAME_HINT)
    return ""
