"""Kubernetes objects as declarations: Service, EndpointSlice, Endpoints, and lists of them. Pure.

vipd interprets them as kube-proxy 1.36 does (contract 4). A Service and its endpoints may be in different
documents of one file, in any order, but not in different files. Each Service is accepted or refused by
itself, with the faults of its endpoints. What is not asked for is never read, so objects as `kubectl` prints
them need no trimming; a value of the wrong kind is reported, and counts as absent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeVar

from vipd.declaration import rules
from vipd.declaration.rules import Draft
from vipd.declaration.service import (
    ADDRESS,
    API_VERSION,
    PORT_NAME,
    PORT_NAME_HINT,
    PORT_NUMBER,
    TOPOLOGY_NAME,
    TOPOLOGY_NAME_HINT,
    usable,
)
from vipd.declaration.syntax import (
    FORBIDDEN_BACKEND_KINDS,
    FORBIDDEN_VIP_KINDS,
    MAX_PORT,
    parse_network,
    quoted,
)
from vipd.declaration.values import (
    INVALID,
    Faults,
    Located,
    Path,
    Read,
    number,
    read_text,
    reader_of_short_form,
)
from vipd.declaration.yaml_text import Ambiguous
from vipd.model import limits
from vipd.model.service import (
    DEFAULT_AFFINITY_SECONDS,
    MAX_AFFINITY_SECONDS,
    Affinity,
    Backend,
    BackendState,
    ExternalAddress,
    Family,
    Origin,
    Protocol,
    Service,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
    family_of,
)

T = TypeVar("T")

_SERVICE_LABEL = "kubernetes.io/service-name"
_HEADLESS_LABEL = "service.kubernetes.io/headless"
_PROXY_LABEL = "service.kubernetes.io/service-proxy-name"
_HINTS_ANNOTATION = "service.kubernetes.io/topology-mode"
_OLD_HINTS_ANNOTATION = "service.kubernetes.io/topology-aware-hints"

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")


def _parse_range(text: str) -> str:
    """A network as kube-proxy reads it: without blanks around it, bits beyond its length, and zeros in front,
    which are decimal to Kubernetes. Also an address alone."""
    text = text.strip()
    return parse_network(text if ":" in text else _LEADING_ZEROS.sub("", text), mask=True)


_read_range = reader_of_short_form(_parse_range, "a network like 203.0.113.0/24")
_read_timeout = number(1, MAX_AFFINITY_SECONDS).read
_read_optional_port = number(0, MAX_PORT).read
"""0 is what Kubernetes also writes for none."""

_TYPES = {name: name for name in ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")}
_OPEN_TYPES = ("NodePort", "LoadBalancer")
"""Types whose ports have node ports."""
_PROTOCOLS = {protocol.value.upper(): protocol for protocol in Protocol}
_FAMILIES: dict[str, Family | None] = {"IPv4": Family.IPV4, "IPv6": Family.IPV6}
_POLICIES = {"Cluster": TrafficPolicy.CLUSTER, "Local": TrafficPolicy.LOCAL}
_DISTRIBUTIONS = {
    "PreferClose": TrafficDistribution.PREFER_SAME_ZONE,
    "PreferSameZone": TrafficDistribution.PREFER_SAME_ZONE,
    "PreferSameNode": TrafficDistribution.PREFER_SAME_NODE,
}
"""PreferClose is the older name of PreferSameZone."""
_READINESS = (BackendState.UP, BackendState.DRAIN, BackendState.DOWN)

_MAX_NAMED = 5
"""More addresses or hints that are left out are not named."""


class Field(NamedTuple):
    """One field of an object. `value` is None if there is none."""

    faults: Faults
    value: Any
    path: Path

    def at(self, *keys: str) -> Field:
        """The field below by these keys."""
        value, path = self.value, self.path
        for key in keys:
            if value is not None and type(value) is not dict:
                value = self.faults.wrong_type(value, path, "a mapping")
            value, path = value.get(key) if type(value) is dict else None, (*path, key)
        return Field(self.faults, value, path)

    def has(self, key: str) -> bool:
        """Whether this key has a value other than null."""
        return self.at(key).value is not None

    def items(self) -> list[Field]:
        """The items of a list; none if there is no value."""
        if type(self.value) is list:
            return [Field(self.faults, item, (*self.path, index)) for index, item in enumerate(self.value)]
        if self.value is not None:
            self.faults.wrong_type(self.value, self.path, "a list")
        return []

    def each(self, read: Callable[[Field], T | None]) -> list[T]:
        """What a function reads of the items of a list, without None."""
        return [value for item in self.items() if (value := read(item)) is not None]

    def read(self, reader: Read) -> Any:
        """The value as this function reads it; None if there is none, or an invalid one."""
        value = None if self.value is None else reader(self.value, self.path, self.faults)
        return None if value is INVALID else value

    def text(self, default: str = "") -> str:
        """Text; the default if there is no value, or the empty text."""
        return self.read(read_text) or default

    def choice(self, choices: Mapping[str, T], default: T) -> T:
        """The value of one of a few words."""
        text = self.text()
        if text and text not in choices:
            self.problem(f"must be one of {', '.join(choices)}, not {quoted(text)}")
        return choices.get(text, default)

    def boolean(self) -> bool | None:
        """True or false; None if there is no value."""
        if isinstance(self.value, bool) or self.value is None:
            return self.value
        if isinstance(self.value, Ambiguous) and self.value.lower() in ("true", "false"):
            return self.value.lower() == "true"
        self.faults.wrong_type(self.value, self.path, "true or false")
        return None

    def address(self) -> Located[str] | None:
        """An IP address; None if there is no value, or an invalid one."""
        address = self.read(ADDRESS.read)
        return None if address is None else Located(address, self.path)

    def problem(self, what: str, hint: str = "") -> None:
        """Report a fault of this field."""
        self.faults.add(self.path, what, hint)

    def note(self, text: str) -> None:
        """Add a note about this field, which is no fault."""
        self.faults.note(self.path, text)


class NamedPort(NamedTuple):
    """A port of endpoints: which port of the service it serves, by name and protocol, and its number."""

    name: str
    protocol: Protocol
    number: int


class EndpointGroup(NamedTuple):
    """Servers that have the same ports, behind one service. A server is a `Backend` without ports."""

    service: str
    ports: list[NamedPort]
    servers: list[Located[Backend]]
    late: bool = False
    """An Endpoints object counts them as not ready."""


def object_name(field: Field) -> str:
    """An object's `namespace/name`, the name perhaps empty."""
    return _in_namespace(field, field.at("metadata", "name").text())


def _in_namespace(field: Field, name: str) -> str:
    whole = f"{field.at('metadata', 'namespace').text('default')}/{name}"
    # An invalid name is a problem only if it would be served; elsewhere it is only shown.
    return whole if whole.isprintable() else ascii(whole)[1:-1]


def slice_service(field: Field) -> str:
    """The `namespace/name` of the Service that an object's label names; empty without one."""
    service = field.at("metadata", "labels", _SERVICE_LABEL).text()
    return _in_namespace(field, service) if service else ""


def read_slice(field: Field) -> list[EndpointGroup]:
    """An EndpointSlice; no group, with a note, if kube-proxy would skip it."""
    name, kind, labels = object_name(field), field.at("addressType"), field.at("metadata", "labels")
    if labels.has(_HEADLESS_LABEL) or labels.has(_PROXY_LABEL):
        return []
    service = slice_service(field)
    if not service:
        field.note(f"EndpointSlice {name} left out: it has no label {_SERVICE_LABEL}")
        return []
    if kind.text() == "FQDN":
        field.note(f"EndpointSlice {name} left out: its endpoints are names, which are not resolved")
        return []
    if kind.value is None:
        kind.problem("addressType is missing", "write IPv4 or IPv6")
    family = kind.choice(_FAMILIES, None)
    ports = field.at("ports").each(_read_endpoint_port)
    endpoints = field.at("endpoints").items()
    servers = [server for item in endpoints if (server := _read_endpoint(item, family))]
    _note_left_out(endpoints, f"EndpointSlice {name}")
    return [EndpointGroup(service, ports, servers)]


def read_endpoints(field: Field) -> list[EndpointGroup]:
    """An Endpoints object: groups for each subset."""
    name = object_name(field)
    groups = []
    for subset in field.at("subsets").items():
        ports = subset.at("ports").each(_read_endpoint_port)
        for key, late in (("addresses", False), ("notReadyAddresses", True)):
            groups.append(EndpointGroup(name, ports, subset.at(key).each(_read_address), late))
    return groups


def _read_endpoint_port(field: Field) -> NamedPort | None:
    """A port; None without a number, as kube-proxy then ignores it."""
    name = field.at("name").text()
    protocol = field.at("protocol").choice(_PROTOCOLS, Protocol.TCP)
    port = field.at("port").read(_read_optional_port)
    return NamedPort(name, protocol, port) if port else None


def _read_endpoint(field: Field, family: Family | None) -> Located[Backend] | None:
    addresses = field.at("addresses").items()
    if not addresses:
        field.problem("addresses is missing", "every endpoint needs an address")
        return None
    first = addresses[0]
    address = first.read(ADDRESS.read)
    if first.value is None:
        first.problem("has no value", "write an IP address")
    if address is None:
        return None
    if family not in (None, family_of(address)):
        first.problem(f"{address} is not an address of the slice's addressType")
        return None
    zones = field.at("hints", "forZones").each(lambda zone: _place_name(zone.at("name"), "zone") or None)
    node = _place_name(field.at("nodeName"), "node")
    state = _state(field.at("conditions"))
    return _usable_server(first, Backend(address, state=state, node=node, zones=tuple(dict.fromkeys(zones))))


def _read_address(field: Field) -> Located[Backend] | None:
    """One address of an Endpoints object."""
    ip = field.at("ip")
    if ip.value is None:
        field.problem("ip is missing", "every address of Endpoints needs an ip")
    address = ip.read(ADDRESS.read)
    node = _place_name(field.at("nodeName"), "node")
    return None if address is None else _usable_server(ip, Backend(address, node=node))


def _usable_server(field: Field, server: Backend) -> Located[Backend] | None:
    sound = usable(server.address, field.path, field.faults, FORBIDDEN_BACKEND_KINDS)
    return Located(server, field.path) if sound else None


def _place_name(field: Field, what: str) -> str:
    text = field.text()
    if not text or TOPOLOGY_NAME.fullmatch(text):
        return text
    field.problem(f"{quoted(text)} is not the name of a {what}", TOPOLOGY_NAME_HINT)
    return ""


def _state(conditions: Field) -> BackendState:
    """Ready takes precedence over terminating: both are true only if the service publishes unready
    endpoints."""
    ready, serving, terminating = (
        conditions.at(key).boolean() for key in ("ready", "serving", "terminating")
    )
    if ready is not False:
        return BackendState.UP
    return BackendState.DRAIN if terminating and serving is not False else BackendState.DOWN


def _note_left_out(endpoints: Sequence[Field], name: str) -> None:
    """Note what of the endpoints kube-proxy does not use, either: addresses after the first, which lead to
    the same backend, and unknown hints."""
    further = [(item, rest.text()) for item in endpoints for rest in item.at("addresses").items()[1:]]
    if further:
        named = ", ".join(quoted(text)[1:-1] for _, text in further[:_MAX_NAMED])
        more = f" and {len(further) - _MAX_NAMED} more" if len(further) > _MAX_NAMED else ""
        further[0][0].note(f"{name}: {named}{more} left out: an endpoint serves at its first address alone")
    unread = next(((item, text) for item in endpoints if (text := _unread_hints(item))), None)
    if unread:
        unread[0].note(f"{name}: {unread[1]} left out of the hints of its endpoints")


def _unread_hints(field: Field) -> str:
    """The part of an endpoint's hints that does not count: keys other than those of Kubernetes 1.36, and
    nodes other than the endpoint's own, which is the only one that Kubernetes writes."""
    hints = field.at("hints")
    if type(hints.value) is not dict:
        return ""
    nodes = {item.at("name").text() for item in hints.at("forNodes").items() if type(item.value) is dict}
    others = [key for key in hints.value if key not in ("forZones", "forNodes")]
    if nodes - {field.at("nodeName").text()}:
        others.append("forNodes with nodes other than nodeName")
    return ", ".join(quoted(key)[1:-1] for key in others[:_MAX_NAMED])


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """A Service object without its endpoints."""

    service: Service
    """Without backends; a port's target is its numeric targetPort."""
    draft: Draft
    """Its addresses and ports, with their paths."""
    zone_hints: bool | None
    """Whether the zones in its endpoints' hints count; None: the Service does not say."""
    prefers_zone: Field | None
    """Its trafficDistribution, if that takes effect by hints alone."""
    publish_not_ready: bool


def read_kubernetes_service(field: Field, origin: Origin) -> KubernetesService | None:
    """One Service object; None with a note if kube-proxy does not serve it, or if it is invalid."""
    name, spec, faults = object_name(field), field.at("spec"), field.faults
    kind = spec.at("type").choice(_TYPES, "ClusterIP")
    if not _sound_name(field):
        return None
    if reason := _reason_left_out(field, kind):
        field.note(f"Service {name} left out: {reason}")
        return None
    addresses = [address for item in _cluster_ips(spec) if (address := item.address())]
    addresses = [each for each in addresses if usable(*each, faults, FORBIDDEN_VIP_KINDS)]
    addresses = rules.unique(addresses, faults)
    draft = Draft(
        field.path, faults, addresses, rules.unique_ports(_read_ports(spec.at("ports"), kind), faults)
    )
    if not draft.addresses or not draft.ports:
        return None
    external = tuple(_read_external(field, name, kind, addresses))
    draft.external = [Located(address, ()) for address in external]
    policy = spec.at("externalTrafficPolicy").choice(_POLICIES, TrafficPolicy.CLUSTER)
    at, health = spec.at("healthCheckNodePort"), None
    if kind == "LoadBalancer" and policy is TrafficPolicy.LOCAL:
        health = at.read(_read_optional_port) or None
    rules.check_host_ports(draft, Located(health, at.path) if health else None)
    hints, preference = _topology_mode(field), spec.at("trafficDistribution")
    distribution = None if hints else _DISTRIBUTIONS.get(preference.text())
    _note_unknown_preference(preference, name)
    service = Service(
        name=name,
        addresses=tuple(address.value for address in addresses),
        ports=tuple(port.value for port in draft.ports),
        affinity=_read_affinity(spec),
        external_addresses=external,
        internal_policy=spec.at("internalTrafficPolicy").choice(_POLICIES, TrafficPolicy.CLUSTER),
        external_policy=policy if kind in _OPEN_TYPES or external else TrafficPolicy.CLUSTER,
        health_port=health,
        traffic_distribution=distribution or TrafficDistribution.PREFER_SAME_ZONE,
        origin=origin,
    )
    publish = spec.at("publishNotReadyAddresses").boolean() or False
    by_zone = distribution is TrafficDistribution.PREFER_SAME_ZONE
    zone_hints = True if distribution else hints
    return KubernetesService(service, draft, zone_hints, preference if by_zone else None, publish)


def _sound_name(field: Field) -> bool:
    metadata = field.at("metadata")
    if not metadata.has("name"):
        field.problem("metadata.name is missing", "every Service needs a name")
        return False
    texts = {key: metadata.at(key).text(default) for key, default in (("namespace", "default"), ("name", ""))}
    bad = {key: text for key, text in texts.items() if not _LABEL.fullmatch(text)}
    for key, text in bad.items():
        hint = "1 to 63 of a-z 0-9 - with a letter or digit at both ends"
        metadata.at(key).problem(f"{quoted(text)} is not a {key} of a Kubernetes object", hint)
    return not bad


def _cluster_ips(spec: Field) -> list[Field]:
    return spec.at("clusterIPs").items() or [spec.at("clusterIP")]


def _reason_left_out(field: Field, kind: str) -> str:
    """Why kube-proxy skips the service; empty: it does not."""
    spec = field.at("spec")
    if kind == "ExternalName":
        return "it is an alias in the DNS (type ExternalName)"
    if field.at("metadata", "labels").has(_PROXY_LABEL):
        return f"another proxy serves it (label {_PROXY_LABEL})"
    if spec.at("clusterIP").text() == "None" or _cluster_ips(spec)[0].text() == "None":
        return "it is headless: it has no address of its own"
    if not spec.at("clusterIP").text() and not spec.at("clusterIPs").items():
        return "it has no clusterIP yet"
    return ""


def _read_ports(field: Field, kind: str) -> list[Located[ServicePort]]:
    items = field.items()
    if not items:
        field.problem("ports is missing", "every Service that is served needs a port")
    ports = []
    for item in items:
        port = _read_port(item, kind)
        if port is not None:
            ports.append(Located(port, item.path))
            if not port.name and len(items) > 1:
                item.problem("name is missing", "each port of a Service with several ports needs a name")
    return ports


def _read_port(field: Field, kind: str) -> ServicePort | None:
    if not field.has("port"):
        field.problem("port is missing", "write port: 80")
    port = field.at("port").read(PORT_NUMBER.read)
    name, target = field.at("name").text(), field.at("targetPort")
    if name and not PORT_NAME.fullmatch(name):
        field.at("name").problem(f"{quoted(name)} is not a port name", PORT_NAME_HINT)
        name = ""
    protocol = field.at("protocol").choice(_PROTOCOLS, Protocol.TCP)
    node_port = field.at("nodePort").read(_read_optional_port) or None
    number = target.read(_read_optional_port if type(target.value) is int else read_text)
    if port is None:
        return None
    # A target's name says nothing here: only the endpoints can resolve it.
    number = number if number not in (0, port) and type(number) is int else None
    return ServicePort(port, protocol, name, number, node_port if kind in _OPEN_TYPES else None)


def _read_external(
    field: Field, name: str, kind: str, cluster_ips: list[Located[str]]
) -> list[ExternalAddress]:
    """The external IPs, then the load balancer's, without those that another rule of the service covers.

    Source ranges apply only to the load balancer's addresses, those of its own family.
    """
    spec, faults = field.at("spec"), field.faults
    balanced: list[Located[str]] = []
    ranges: dict[str, None] = {}
    if kind == "LoadBalancer":
        balanced = field.at("status", "loadBalancer", "ingress").each(_read_ingress)
        ranges = dict.fromkeys(spec.at("loadBalancerSourceRanges").each(lambda item: item.read(_read_range)))
    families = {family_of(address.value) for address in cluster_ips}
    taken = {address.value for address in cluster_ips}
    externals: list[ExternalAddress] = []
    plain = spec.at("externalIPs").each(Field.address)
    for (address, path), balancer in [*((a, False) for a in plain), *((a, True) for a in balanced)]:
        if not usable(address, path, faults, FORBIDDEN_VIP_KINDS):
            continue
        if family_of(address) not in families:
            faults.note(path, f"{address} left out: no clusterIP of Service {name} is of its family")
        elif address in taken:
            faults.note(path, f"{address} left out: Service {name} has it already")
        else:
            taken.add(address)
            own = [network for network in ranges if balancer and family_of(network) is family_of(address)]
            externals.append(ExternalAddress(address, balancer, tuple(own) if ranges else None))
    return externals


def _read_ingress(field: Field) -> Located[str] | None:
    """An address whose packets arrive here unchanged, hence none of mode Proxy."""
    mode = field.at("ipMode").choice({"VIP": True, "Proxy": False}, default=True)
    address = field.at("ip").address() if field.at("ip").text() else None
    return address if mode else None


def _read_affinity(spec: Field) -> Affinity | None:
    if not spec.at("sessionAffinity").choice({"None": False, "ClientIP": True}, default=False):
        return None
    timeout = spec.at("sessionAffinityConfig", "clientIP", "timeoutSeconds").read(_read_timeout)
    return Affinity(timeout or DEFAULT_AFFINITY_SECONDS)


def _topology_mode(field: Field) -> bool | None:
    """Whether the annotation requests hints; None without one. All but `disabled` is a yes; the older
    name wins. A yes takes precedence over trafficDistribution."""
    annotations = field.at("metadata", "annotations")
    key = _OLD_HINTS_ANNOTATION if annotations.has(_OLD_HINTS_ANNOTATION) else _HINTS_ANNOTATION
    text = annotations.at(key).text()
    return text not in {"disabled", "Disabled"} if text else None


def _note_unknown_preference(field: Field, name: str) -> None:
    """Note a trafficDistribution that only another program knows."""
    text, known = field.text(), ", ".join(_DISTRIBUTIONS)
    if text and text not in _DISTRIBUTIONS:
        field.note(f"Service {name}: trafficDistribution {quoted(text)[1:-1]} has no effect; known: {known}")


_ByPort = dict[str, dict[tuple[str, int], Located[Backend]]]
"""By the name of the service's port: the servers by address and number."""


def with_backends(declared: KubernetesService, groups: Sequence[EndpointGroup]) -> Service | None:
    """The service with the backends of these groups, all of this service; None if there are too
    many, which is reported."""
    draft = declared.draft
    if not _within_limits(draft, groups):
        return None
    _note_hints(declared, groups)
    servers = _servers_by_port(declared, groups)
    if not _can_combine(draft, servers):
        return None
    draft.ports = [p._replace(value=_with_target(p.value, servers[p.value.name])) for p in draft.ports]
    ports = tuple(port.value for port in draft.ports)
    backends = _backends(ports, servers)
    rules.check_backends(draft, backends)
    return replace(declared.service, ports=ports, backends=tuple(backend.value for backend in backends))


def _note_hints(declared: KubernetesService, groups: Sequence[EndpointGroup]) -> None:
    """Note hints that do not count, and a preference that has none to go by."""
    hinted = any(server.value.zones for group in groups for server in group.servers)
    name, asked, draft = declared.service.name, declared.prefers_zone, declared.draft
    if hinted and declared.zone_hints is None:
        reason = f"it has neither trafficDistribution nor the annotation {_HINTS_ANNOTATION}"
        draft.faults.note(draft.path, f"Service {name}: hints of its endpoints left out: {reason}")
    if asked is not None and not hinted and any(group.servers for group in groups):
        asked.note(f"Service {name}: trafficDistribution {asked.value} has no effect: no endpoint has hints")


def _served_ports(draft: Draft) -> set[tuple[str, Protocol]]:
    return {(port.value.name, port.value.protocol) for port in draft.ports}


def _within_limits(draft: Draft, groups: Sequence[EndpointGroup]) -> bool:
    """Whether the number of servers, in all and at each port, is within the limits."""
    served = _served_ports(draft)
    servers = [server for group in groups for server in group.servers]
    reached = sum(len(g.servers) * sum((p.name, p.protocol) in served for p in g.ports) for g in groups)
    if not rules.few_parts(draft, servers, whole=True):
        return False
    if reached > limits.SERVICE_ENDPOINTS:
        what = f"its endpoints reach {reached} ports of servers: {limits.SERVICE_ENDPOINTS} are the most"
        draft.faults.add(draft.path, what, "divide it into several services", whole=True)
        return False
    return rules.few_at_addresses(draft, reached, whole=True)


def _can_combine(draft: Draft, servers: _ByPort) -> bool:
    """Whether the servers' numbers at each port are few enough to list for each which ports it has."""
    reached = len(draft.ports) * sum(map(len, servers.values()))
    if reached <= limits.NAMED_PORT_LOOKUPS or len({*map(frozenset, servers.values())}) < 2:
        return True
    what = f"its ports have different endpoints, which make {reached} combinations"
    hint = f"{limits.NAMED_PORT_LOOKUPS} are the most: divide it into several services"
    draft.faults.add(draft.path, what, hint, whole=True)
    return False


def _servers_by_port(declared: KubernetesService, groups: Iterable[EndpointGroup]) -> _ByPort:
    """The servers of the service's families, with zones only if hints count. If an address and number occurs
    twice for a port, the readier one is kept, else the first."""
    families = {family_of(address) for address in declared.service.addresses}
    served = _served_ports(declared.draft)
    servers: _ByPort = {port.name: {} for port in declared.service.ports}
    for group in groups:
        changes: dict[str, Any] = {} if declared.zone_hints else {"zones": ()}
        if group.late and not declared.publish_not_ready:
            changes["state"] = BackendState.DOWN
        own = [
            server._replace(value=replace(server.value, **changes))
            for server in group.servers
            if family_of(server.value.address) in families
        ]
        for port in group.ports:
            for server in own if (port.name, port.protocol) in served else ():
                key = (server.value.address, port.number)
                earlier = servers[port.name].setdefault(key, server)
                servers[port.name][key] = min(earlier, server, key=_readiness)
    return servers


def _readiness(server: Located[Backend]) -> int:
    return _READINESS.index(server.value.state)


def _with_target(port: ServicePort, servers: Iterable[tuple[str, int]]) -> ServicePort:
    """The port with the number of most endpoints, or the lowest such; without any, unchanged."""
    numbers = Counter(each for _, each in servers)
    if not numbers:
        return port
    most = min(numbers, key=lambda each: (-numbers[each], each))
    return replace(port, target=None if most == port.port else most)


def _backends(ports: Sequence[ServicePort], servers: _ByPort) -> list[Located[Backend]]:
    """A backend for each server; several where it has several numbers for one port."""
    numbers: dict[Backend, dict[str, list[int]]] = {}
    first: dict[Backend, Located[Backend]] = {}
    for name, numbered in servers.items():
        for (_, own_number), server in numbered.items():
            numbers.setdefault(server.value, {}).setdefault(name, []).append(own_number)
            first.setdefault(server.value, server)
    backends = []
    for value, of_ports in numbers.items():
        for turn in range(max(map(len, of_ports.values()))):
            own = {name: several[turn] for name, several in of_ports.items() if turn < len(several)}
            backends.append(first[value]._replace(value=_backend(value, ports, own)))
    return backends


def _backend(server: Backend, ports: Sequence[ServicePort], own: Mapping[str, int]) -> Backend:
    if all(own.get(port.name) == (port.target or port.port) for port in ports):
        return server
    if len(ports) == 1:
        return replace(server, port=own[ports[0].name])
    return replace(server, ports=tuple((port.name, own[port.name]) for port in ports if port.name in own))


_VERSIONS = {"Service": "v1", "Endpoints": "v1", "EndpointSlice": "discovery.k8s.io/v1"}
"""The supported kinds of objects, with the version of each."""
_LISTS = {f"{kind}List": kind for kind in _VERSIONS}
KINDS = ("List", *_VERSIONS, *_LISTS)
"""The kinds of documents."""
VERSIONS = tuple(dict.fromkeys(_VERSIONS.values()))
"""Their values of `apiVersion`."""

_MAX_KINDS_NAMED = 20
"""Number of kinds that the note on the objects left out of a List names."""
_LIKENESS = 0.8
"""Of a kind that vipd does not know and one that it knows, above which this one is meant: `Servcie`, but not
`ServiceAccount`."""


def is_kubernetes(document: Any) -> bool:
    """Whether a document is a Kubernetes object: it has a kind, and its apiVersion is not vipd's own."""
    return type(document) is dict and "kind" in document and document.get("apiVersion") != API_VERSION


class KubernetesObjects:
    """Collects the Kubernetes objects of one file, and combines them when all are read."""

    def __init__(self, faults: Faults, origin: Origin) -> None:
        self.parts: dict[str, Faults] = {}
        """The problems of each Service, by its name, and of each object of a kind that vipd does not know."""
        self.declared: set[str] = set()
        """Names of all Services in the file, also of those that vipd leaves out."""
        self._faults, self._origin = faults, origin
        self._services: list[KubernetesService] = []
        self._groups: dict[str, list[EndpointGroup]] = {}
        """By kind and name of the Service: `EndpointSlice default/web`."""
        self._lines: dict[Path, int] = {}
        """The lines of documents, and of the items of lists."""
        self._paths: dict[str, Path] = {}
        """The path of each object, by kind and name."""
        self._referenced: dict[str, tuple[str, Path]] = {}
        """For each service that endpoints name: the first object that names it, and its path."""

    def read(self, document: dict[str, Any], at: Path, line: int, starts: Mapping[int, list[int]]) -> None:
        """Read one document, for which `is_kubernetes` is true."""
        self._lines[at] = line
        items = document.get("items")
        self._lines |= {(*at, "items", index): each for index, each in enumerate(starts.get(id(items), ()))}
        field = Field(self._faults, document, at)
        kind, version = field.at("kind").text(), field.at("apiVersion").text()
        if kind in _VERSIONS:
            self._add_object(field, kind, version)
        elif kind == "List" and _right_version(field, version, kind, "v1"):
            self._read_list(field)
        elif kind in _LISTS and _right_version(field, version, kind, _VERSIONS[_LISTS[kind]]):
            for item in field.at("items").items():
                self._add_object(item, _LISTS[kind])
        elif kind and kind not in KINDS:
            self._add_unknown(field, kind)

    def finish(self) -> list[Service]:
        """Every service with its endpoints. Endpoints objects count only for services without an
        EndpointSlice."""
        for name, (what, path) in self._referenced.items():
            if name not in self.declared:
                self._faults.note(path, f"{what} left out: there is no Service {name} in this file")
        services: list[Service] = []
        for index, declared in enumerate(self._services, 1):
            service, draft, name = None, declared.draft, declared.service.name
            groups = self._groups.get(f"EndpointSlice {name}") or self._groups.get(f"Endpoints {name}", [])
            with draft.faults.contain(draft.path, "reading this service"):
                service = with_backends(declared, groups)
            if service is None:
                continue
            if not rules.within_total(self._faults, draft.path, service, index):
                break
            services.append(service)
        return services

    def _part(self, name: str) -> Faults:
        """The faults of one part of the file."""
        # One problem is enough to refuse a part, and all of them together would be without limit.
        most = limits.PROBLEMS if len(self.parts) < limits.PROBLEMS else 1
        return self.parts.setdefault(name, self._faults.part(most))

    def _of_its_part(self, field: Field, kind: str) -> Field:
        """The same object, whose problems are those of the Service that it concerns. One of an unknown or
        missing kind concerns the Service that its label or else its name says, and the whole file if neither
        does."""
        silent = field._replace(faults=Faults())
        name = object_name(silent)
        if kind == "EndpointSlice" or (kind not in _VERSIONS and slice_service(silent)):
            name = slice_service(silent)
        known = all(map(_LABEL.fullmatch, name.split("/")))
        return field._replace(faults=self._part(name) if known else self._faults)

    def _add_unknown(self, field: Field, kind: str) -> None:
        """An object that vipd does not serve. One whose kind is misspelt concerns a Service."""
        hint = "it serves Service, EndpointSlice, Endpoints, and lists of them"
        if meant := get_close_matches(kind, KINDS, 1, _LIKENESS):
            field, hint = self._of_its_part(field, meant[0]), f'did you mean "{meant[0]}"?'
        else:
            name = object_name(field._replace(faults=Faults()))
            field = field._replace(faults=self._part(f"{quoted(kind)[1:-1]} {name}"))
        field.at("kind").problem(f"kind {quoted(kind)[1:-1]} is not something that vipd serves", hint)

    def _read_list(self, field: Field) -> None:
        """Read a List of mixed kinds, such as `kubectl get all` prints. Leaves other kinds out, and notes
        their number."""
        others: Counter[str] = Counter()
        for item in field.at("items").items():
            kind, version = item.at("kind").text(), item.at("apiVersion").text()
            group = version.rpartition("/")[0]
            if kind in _VERSIONS and (not version or group == _VERSIONS[kind].rpartition("/")[0]):
                self._add_object(item, kind, version)
            elif kind and kind not in KINDS and get_close_matches(kind, KINDS, 1, _LIKENESS):
                self._add_unknown(item, kind)
            elif kind:
                others[kind] += 1
            else:
                hint = "every object of a List has a kind and an apiVersion"
                self._of_its_part(item, kind).problem("kind is missing", hint)
        if others:
            named = others.most_common(_MAX_KINDS_NAMED)
            counts = ", ".join(f"{count} {quoted(kind)[1:-1]}" for kind, count in named)
            field.note(f"left out of the List: {counts}{', ...' if len(others) > _MAX_KINDS_NAMED else ''}")

    def _add_object(self, field: Field, kind: str, version: str | None = None) -> None:
        """Read an object that vipd serves; in a list of one kind none needs a version."""
        if type(field.value) is not dict:
            field.problem(f"must be a {kind}", "remove it")
            return
        field = self._of_its_part(field, kind)
        if version is not None and not _right_version(field, version, kind, _VERSIONS[kind]):
            return
        with field.faults.contain(field.path, f"reading this {kind}"):
            name = object_name(field)
            first = self._paths.setdefault(f"{kind} {name}", field.path)
            if first != field.path and not name.endswith("/"):
                # Nothing says which of the two is valid.
                what = f"{kind} {name} stands already"
                field.faults.add(field.path, what, "keep one of them", other=first, by_line=True)
            elif kind == "Service":
                self._add_service(field, name)
            else:
                for group in read_endpoints(field) if kind == "Endpoints" else read_slice(field):
                    self._referenced.setdefault(group.service, (f"{kind} {name}", field.path))
                    self._groups.setdefault(f"{kind} {group.service}", []).append(group)

    def _add_service(self, field: Field, name: str) -> None:
        self.declared.add(name)
        part = name if self._origin.source == "file" else ""
        origin = replace(self._origin, line=self._lines[field.path], part=part)
        service = read_kubernetes_service(field, origin)
        if service is not None:
            self._services.append(service)


def _right_version(field: Field, version: str, kind: str, wanted: str) -> bool:
    if version == wanted:
        return True
    at = field.at("apiVersion")
    if at.value is None:
        field.problem("apiVersion is missing", f"write apiVersion: {wanted}")
    elif version:
        what = f"{quoted(version)} is not the version of {kind} that vipd reads"
        at.problem(what, f"it reads {wanted}")
    return False
