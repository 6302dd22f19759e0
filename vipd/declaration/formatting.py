"""Services as vipd/v1: the canonical short form as JSON types, and as YAML for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from vipd.declaration.check_formatting import check_to_spec
from vipd.declaration.nodes import Scalar, other_meaning
from vipd.declaration.syntax import duration_text
from vipd.model.check import UNCHECKED
from vipd.model.flow_limits import FlowLimits
from vipd.model.service import (
    DEFAULT_AFFINITY_SECONDS,
    Affinity,
    Announcement,
    Backend,
    BackendState,
    Balance,
    ExternalAddress,
    NamedBackend,
    RejectAction,
    Service,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
)
from vipd.model.text import yaml_quoted

API_VERSION = "vipd/v1"

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@%+-]*")
"""Text that needs no quotes anywhere."""


def service_to_spec(service: Service) -> dict[str, object]:
    """The canonical short form: defaults left out, one address as text and several as a list.

    Raises ValueError for a service that both drops and has fallback backends, which vipd/v1 cannot express.
    """
    spec: dict[str, object] = {}
    if service.name != str(service.frontends()[0]):
        spec["name"] = service.name
    if service.addresses:
        spec["address"] = _one_or_list(service.addresses)
    spec |= _external_spec(service)
    spec["ports"] = [_port_spec(port) for port in service.ports]
    backends = [_backend_spec(backend) for backend in service.backends if backend.declared]
    if backends := [*backends, *map(_named_spec, service.named_backends)]:
        spec["backends"] = backends
    spec |= _policy_spec(service)
    if service.registrations is not None:
        spec["registrations"] = service.registrations
    if service.announcement is not None:
        spec["announce"] = _announcement_spec(service, service.announcement)
    if service.flow_takeover:
        spec["flow_takeover"] = True
    if service.limits is not None:
        spec["limits"] = limits_to_spec(service.limits)
    return spec


def _policy_spec(service: Service) -> dict[str, object]:
    spec: dict[str, object] = {}
    if service.affinity is not None:
        spec["affinity"] = _affinity_spec(service.affinity)
    if service.masquerade is not None:
        spec["masquerade"] = service.masquerade.value
    fallback = _fallback_spec(service)
    if fallback is not None:
        spec["fallback"] = fallback
    spec |= _traffic_spec(service)
    if service.health_port is not None:
        spec["health_port"] = service.health_port
    if service.ends_flows:
        spec["on_remove"] = "reset"
    if not service.answers_ping:
        spec["respond_to_ping"] = False
    return spec | _check_spec(service)


def _traffic_spec(service: Service) -> dict[str, object]:
    spec: dict[str, object] = {}
    policies = {"internal": service.internal_policy, "external": service.external_policy}
    traffic = {key: policy.value for key, policy in policies.items() if policy is not TrafficPolicy.CLUSTER}
    if traffic:
        spec["traffic_policy"] = traffic
    if service.traffic_distribution is not TrafficDistribution.PREFER_SAME_ZONE:
        spec["traffic_distribution"] = service.traffic_distribution.value
    return spec


def _check_spec(service: Service) -> dict[str, object]:
    spec: dict[str, object] = {}
    if service.balance is not Balance.RANDOM:
        spec["balance"] = service.balance.value
    if service.check != UNCHECKED:
        spec["check"] = check_to_spec(service.check)
    if service.slow_start:
        spec["slow_start"] = duration_text(service.slow_start)
    if service.weight_from_check:
        spec["weight_from"] = "check"
    return spec


def _external_spec(service: Service) -> dict[str, object]:
    spec: dict[str, object] = {}
    for key, load_balancer in (("external_addresses", False), ("load_balancer_addresses", True)):
        found = [
            _external_address_spec(e) for e in service.external_addresses if e.load_balancer is load_balancer
        ]
        if found:
            spec[key] = _one_or_list(found)
    if service.allow_from:
        spec["allow_from"] = _one_or_list(service.allow_from)
    return spec


def _external_address_spec(external: ExternalAddress) -> object:
    if external.allow_from is None:
        return external.address
    return {
        "address": external.address,
        "allow_from": _one_or_list(external.allow_from) if external.allow_from else "any",
    }


def _one_or_list(values: Sequence[object]) -> object:
    return values[0] if len(values) == 1 else list(values)


def _port_spec(port: ServicePort) -> object:
    if not port.name and port.target is None and port.node_port is None:
        return str(port)
    spec: dict[str, object] = {"name": port.name} if port.name else {}
    spec |= {"port": port.port, "protocol": port.protocol.value}
    if port.target is not None:
        spec["target"] = port.target
    if port.node_port is not None:
        spec["node_port"] = port.node_port
    return spec


def _backend_spec(backend: Backend) -> object:
    spec = {"address": backend.address, **_backend_keys(backend)}
    return backend.address if len(spec) == 1 else spec


def _named_spec(named: NamedBackend) -> object:
    return {named.kind.value: named.name, **_backend_keys(named.template)}


def _backend_keys(backend: Backend) -> dict[str, object]:
    """What a backend declares besides its address or name."""
    spec: dict[str, object] = {}
    if backend.port is not None:
        spec["port"] = backend.port
    if backend.ports:
        spec["ports"] = dict(backend.ports)
    if backend.weight != 1:
        spec["weight"] = backend.weight
    if backend.backup:
        spec["backup"] = True
    if backend.check is not None:
        spec["check"] = check_to_spec(backend.check)
    if backend.max_connections is not None:
        spec["max_connections"] = backend.max_connections
    return spec | _state_and_topology_spec(backend)


def _state_and_topology_spec(backend: Backend) -> dict[str, object]:
    spec: dict[str, object] = {}
    if backend.state is not BackendState.UP:
        spec["state"] = backend.state.value
    if backend.node:
        spec["node"] = backend.node
    if backend.zones:
        spec["zone"] = _one_or_list(backend.zones)
    return spec


def _affinity_spec(affinity: Affinity) -> object:
    if affinity.timeout == DEFAULT_AFFINITY_SECONDS:
        return "client-ip"
    return {"by": "client-ip", "timeout": duration_text(affinity.timeout)}


def _fallback_spec(service: Service) -> object:
    if service.keeps_unhealthy:
        return "keep"
    backends = [_backend_spec(backend) for backend in service.fallback if backend.declared]
    backends += map(_named_spec, service.named_fallback)
    if not backends:
        return None if service.refusal is RejectAction.REJECT else service.refusal.value
    if service.refusal is not RejectAction.REJECT:
        raise ValueError(f"{service.name}: vipd/v1 cannot say both {service.refusal} and fallback backends")
    return {"backends": backends}


def _announcement_spec(service: Service, announcement: Announcement) -> object:
    if announcement.inside is not bool(service.external_addresses):
        return announcement.by.value
    return {"by": announcement.by.value, "addresses": "all" if announcement.inside else "external"}


def limits_to_spec(limits: FlowLimits) -> dict[str, int]:
    """The keys of `limits` that differ from their defaults."""
    given = {each.name: (getattr(limits, each.name), each.default) for each in fields(limits)}
    return {key: value for key, (value, default) in given.items() if value != default}


def format_service(service: Service) -> str:
    """One list item for `services:`, indented by two spaces. Raises as `service_to_spec`."""
    lines: list[str] = []
    for key, value in service_to_spec(service).items():
        if key == "backends" and isinstance(value, list):
            lines.append("backends:")
            lines += [f"  - {_inline(item)}" for item in value]
        else:
            lines.append(f"{key}: {_inline(value)}")
    return "  - " + "\n    ".join(lines) + "\n"


def format_declaration(services: Iterable[Service]) -> str:
    """A whole vipd/v1 document. It parses back to equal services. Raises as `service_to_spec`."""
    blocks = "".join(map(format_service, services))
    return f"apiVersion: {API_VERSION}\nservices:{chr(10) if blocks else ' []' + chr(10)}{blocks}"


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_inline(key)}: {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    # Within brackets most signs have a meaning in YAML, and some plain words are no text.
    plain = _PLAIN.fullmatch(text) and not other_meaning(Scalar(0, text, plain=True))
    return text if plain else yaml_quoted(text)
