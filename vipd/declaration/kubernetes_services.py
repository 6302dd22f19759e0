"""Service objects of Kubernetes: the part that a host serves, as in kube-proxy 1.36 (contract 4). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vipd.declaration.fields import Located
from vipd.declaration.kubernetes_endpoints import PROTOCOLS, PROXY_LABEL, object_name
from vipd.declaration.kubernetes_fields import FieldCursor
from vipd.declaration.nodes import Scalar, integer
from vipd.declaration.port_reader import PORT_NAME_HINT, is_port_name
from vipd.declaration.service_rules import check_host_ports, check_vip, unique_addresses, unique_ports
from vipd.declaration.syntax import parse_network, quoted
from vipd.model.service import (
    DEFAULT_AFFINITY_SECONDS,
    MAX_AFFINITY_SECONDS,
    Affinity,
    ExternalAddress,
    Origin,
    Protocol,
    Service,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
    family_of,
)

_TYPES = {name: name for name in ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")}
_POLICIES = {"Cluster": TrafficPolicy.CLUSTER, "Local": TrafficPolicy.LOCAL}
_DISTRIBUTIONS = {
    "PreferClose": TrafficDistribution.PREFER_SAME_ZONE,
    "PreferSameZone": TrafficDistribution.PREFER_SAME_ZONE,
    "PreferSameNode": TrafficDistribution.PREFER_SAME_NODE,
}
"""PreferClose is the older name of PreferSameZone."""
_AFFINITIES = {"None": False, "ClientIP": True}
_OPEN_TYPES = ("NodePort", "LoadBalancer")
"""Types whose ports have node ports."""

_LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")
LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

_OLD_HINTS = "service.kubernetes.io/topology-aware-hints"
HINTS_ANNOTATION = "service.kubernetes.io/topology-mode"


@dataclass(frozen=True, slots=True)
class KubernetesService:
    """A Service object without its endpoints."""

    service: Service
    """Without backends; a port's target is its numeric targetPort."""
    ports: tuple[Located[ServicePort], ...]
    addresses: tuple[Located[str], ...]
    """The cluster IPs."""
    zone_hints: bool | None
    """Whether the zones in its endpoints' hints count; None: the Service does not say."""
    prefers_zone: Located[str] | None
    """Its trafficDistribution, if that takes effect by hints alone."""
    publish_not_ready: bool


def read_kubernetes_service(place: FieldCursor, origin: Origin) -> KubernetesService | None:
    """One Service object; None with a note if kube-proxy does not serve it, or if it is invalid."""
    name = object_name(place)
    spec = place.at("spec")
    kind = spec.at("type").choice(_TYPES, "ClusterIP")
    if not _sound_name(place) or _left_out(place, name, kind):
        return None
    addresses = _read_cluster_ips(place, name)
    ports = unique_ports(place.report, _read_ports(spec.at("ports"), kind))
    if not addresses or not ports:
        return None
    external = tuple(_read_external(place, name, kind, addresses))
    external_policy = spec.at("externalTrafficPolicy").choice(_POLICIES, TrafficPolicy.CLUSTER)
    health = _read_health_port(spec, kind) if external_policy is TrafficPolicy.LOCAL else None
    check_host_ports(place.report, ports, health)
    accessible = kind in _OPEN_TYPES or bool(external)
    hints = _topology_mode(place)
    distribution = _read_distribution(spec, name)
    if hints:
        distribution = None  # the annotation takes precedence
    service = Service(
        name=name,
        addresses=tuple(address.value for address in addresses),
        ports=tuple(port.value for port in ports),
        affinity=_read_affinity(spec),
        external_addresses=external,
        internal_policy=spec.at("internalTrafficPolicy").choice(_POLICIES, TrafficPolicy.CLUSTER),
        external_policy=external_policy if accessible else TrafficPolicy.CLUSTER,
        health_port=health.value if health else None,
        traffic_distribution=distribution or TrafficDistribution.PREFER_SAME_ZONE,
        origin=origin,
    )
    publish = spec.at("publishNotReadyAddresses").boolean() or False
    at = spec.at("trafficDistribution")
    by_zone = distribution is TrafficDistribution.PREFER_SAME_ZONE
    return KubernetesService(
        service,
        tuple(ports),
        tuple(addresses),
        zone_hints=True if distribution else hints,
        prefers_zone=Located(at.text(), at.line, at.path) if by_zone else None,
        publish_not_ready=publish,
    )


def _sound_name(place: FieldCursor) -> bool:
    metadata = place.at("metadata")
    if not metadata.has("name"):
        place.problem("metadata.name is missing", "every Service needs a name")
        return False
    bad = [
        key
        for key, default in (("namespace", "default"), ("name", ""))
        if not LABEL.fullmatch(metadata.at(key).text(default))
    ]
    for key in bad:
        at = metadata.at(key)
        hint = "1 to 63 of a-z 0-9 - with a letter or digit at both ends"
        at.problem(f"{quoted(at.text())} is not a {key} of a Kubernetes object", hint)
    return not bad


def _left_out(place: FieldCursor, name: str, kind: str) -> bool:
    """Whether kube-proxy skips the service; a note gives the reason."""
    spec = place.at("spec")
    why = ""
    if kind == "ExternalName":
        why = "it is an alias in the DNS (type ExternalName)"
    elif place.at("metadata", "labels").has(PROXY_LABEL):
        why = f"another proxy serves it (label {PROXY_LABEL})"
    elif spec.at("clusterIP").text() == "None":
        why = "it is headless: it has no address of its own"
    elif not spec.at("clusterIP").text() and not list(spec.at("clusterIPs").items()):
        why = "it has no clusterIP yet"
    if why:
        place.note(f"Service {name} left out: {why}")
    return bool(why)


def _read_cluster_ips(place: FieldCursor, name: str) -> list[Located[str]]:
    spec = place.at("spec")
    found = list(spec.at("clusterIPs").items()) or [spec.at("clusterIP")]
    if found[0].text() == "None":
        place.note(f"Service {name} left out: it is headless: it has no address of its own")
        return []
    read = [address for item in found if (address := item.address())]
    return unique_addresses(place.report, [a for a in read if check_vip(place.report, a)])


def _read_ports(place: FieldCursor, kind: str) -> list[Located[ServicePort]]:
    items = list(place.items())
    if not items:
        place.problem("ports is missing", "every Service that is served needs a port")
    found = []
    for item in items:
        port = _read_port(item, kind)
        if port is not None:
            found.append(Located(port, item.line, item.path))
            if not port.name and len(items) > 1:
                item.problem("name is missing", "each port of a Service with several ports needs a name")
    return found


def _read_port(place: FieldCursor, kind: str) -> ServicePort | None:
    at = place.at("port")
    if at.node is None:
        place.problem("port is missing", "write port: 80")
    port = at.integer(1, 65535)
    name = place.at("name").text()
    if name and not is_port_name(name):
        place.at("name").problem(f"{quoted(name)} is not a port name", PORT_NAME_HINT)
        name = ""
    protocol = place.at("protocol").choice(PROTOCOLS, Protocol.TCP)
    node_port = place.at("nodePort").port()
    target = _numeric_target(place.at("targetPort"))
    if port is None:
        return None
    return ServicePort(
        port,
        protocol,
        name,
        None if target == port else target,
        node_port if kind in _OPEN_TYPES else None,
    )


def _read_health_port(spec: FieldCursor, kind: str) -> Located[int] | None:
    at = spec.at("healthCheckNodePort")
    port = at.port() if kind == "LoadBalancer" else None
    return Located(port, at.line, at.path) if port else None


def _numeric_target(place: FieldCursor) -> int | None:
    """The number; None for a name, which only the endpoints can resolve."""
    if isinstance(place.node, Scalar) and integer(place.node) is not None:
        return place.port()
    place.text()
    return None


def _read_external(
    place: FieldCursor, name: str, kind: str, cluster_ips: list[Located[str]]
) -> list[ExternalAddress]:
    """The external IPs, then the load balancer's, without those that another rule of the service covers.

    Source ranges apply only to the load balancer's addresses.
    """
    spec = place.at("spec")
    report = place.report
    balancers = _read_ingress(place) if kind == "LoadBalancer" else []
    ranges = _read_ranges(spec.at("loadBalancerSourceRanges")) if kind == "LoadBalancer" else ()
    externals = [address for item in spec.at("externalIPs").items() if (address := item.address())]
    families = {family_of(address.value) for address in cluster_ips}
    taken = {address.value for address in cluster_ips}
    found: list[ExternalAddress] = []
    for address, balancer in [*((e, False) for e in externals), *((b, True) for b in balancers)]:
        if not check_vip(report, address):
            continue
        if family_of(address.value) not in families:
            text = f"{address.value} left out: no clusterIP of Service {name} is of its family"
            report.note(address.line, text)
        elif address.value in taken:
            report.note(address.line, f"{address.value} left out: Service {name} has it already")
        else:
            taken.add(address.value)
            found.append(_external(address.value, balancer, ranges))
    return found


def _external(address: str, balancer: bool, ranges: tuple[str, ...]) -> ExternalAddress:
    """Its own family's ranges limit a load balancer's address; nothing limits an external IP."""
    if not ranges:
        return ExternalAddress(address, balancer)
    own = tuple(network for network in ranges if family_of(network) is family_of(address))
    return ExternalAddress(address, balancer, own if balancer else ())


def _read_ingress(place: FieldCursor) -> list[Located[str]]:
    """The addresses whose packets arrive here unchanged, hence not those of mode Proxy."""
    found = []
    for item in place.at("status", "loadBalancer", "ingress").items():
        mode = item.at("ipMode").choice({"VIP": True, "Proxy": False}, default=True)
        address = item.at("ip").address() if item.at("ip").text() else None
        if mode and address is not None:
            found.append(address)
    return found


def _read_ranges(place: FieldCursor) -> tuple[str, ...]:
    """Networks, each once."""
    found = [item.short_form(_parse_range, "a network like 203.0.113.0/24") for item in place.items()]
    return tuple(dict.fromkeys(filter(None, found)))


def _parse_range(text: str) -> str:
    """A network as kube-proxy reads it: without blanks around it, bits beyond its length, and zeros in front,
    which are decimal to Kubernetes. Also an address alone."""
    text = text.strip()
    return parse_network(text if ":" in text else _LEADING_ZEROS.sub("", text), mask=True)


def _read_affinity(spec: FieldCursor) -> Affinity | None:
    if not spec.at("sessionAffinity").choice(_AFFINITIES, default=False):
        return None
    timeout = spec.at("sessionAffinityConfig", "clientIP", "timeoutSeconds").integer(1, MAX_AFFINITY_SECONDS)
    return Affinity(timeout or DEFAULT_AFFINITY_SECONDS)


def _topology_mode(place: FieldCursor) -> bool | None:
    """Whether the annotation requests hints; None without one. All but `disabled` is a yes; the older
    name wins."""
    annotations = place.at("metadata", "annotations")
    key = _OLD_HINTS if annotations.has(_OLD_HINTS) else HINTS_ANNOTATION
    text = annotations.at(key).text()
    return text not in {"disabled", "Disabled"} if text else None


def _read_distribution(spec: FieldCursor, name: str) -> TrafficDistribution | None:
    """What the Service prefers; None with a note for a value that only another program knows."""
    at = spec.at("trafficDistribution")
    text = at.text()
    if text and text not in _DISTRIBUTIONS:
        known = ", ".join(_DISTRIBUTIONS)
        at.note(f"Service {name}: trafficDistribution {quoted(text)[1:-1]} has no effect; known: {known}")
    return _DISTRIBUTIONS.get(text)
