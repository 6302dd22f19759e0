"""Services as vipd/v1: the canonical short form as JSON types, and as YAML for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial

from vipd.declaration.service import API_VERSION, BACKEND, CHECK, SERVICE
from vipd.declaration.values import one_or_list
from vipd.declaration.yaml_text import plain_value
from vipd.model.check import UNCHECKED
from vipd.model.service import (
    Backend,
    NamedBackend,
    RejectAction,
    Service,
    ServicePort,
    TrafficPolicy,
)
from vipd.model.text import yaml_quoted

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@%+-]*")
"""Text that needs no quotes anywhere."""


def service_to_spec(service: Service) -> dict[str, object]:
    """The canonical short form: defaults left out, one address as text and several as a list.

    Raises ValueError for a service that both drops and has fallback backends, which vipd/v1 cannot express.
    """
    spec: dict[str, object] = {}
    for name, key in _ORDERED.items():
        if name in _OWN:
            value = _OWN[name](service)
        else:
            value = getattr(service, key.field)
            value = None if value == _DEFAULTS[key.field] else key.kind.written(value)
        if value is not None:
            spec[name] = value
    return spec


_FIRST = (
    *("name", "description", "address", "external_addresses", "load_balancer_addresses", "allow_from"),
    *("ports", "backends", "affinity", "masquerade", "fallback", "traffic_policy", "traffic_distribution"),
    *("health_port", "on_remove", "respond_to_ping", "balance", "check", "slow_start", "weight_from"),
    *("registrations", "announce", "flow_takeover"),
)
"""Keys in the order in which people read them; all others follow."""
_SHORT_FORMS = frozenset({"node_port"})
"""Keys that say what another one says, too."""
_ORDERED = {
    name: SERVICE.keys[name] for name in dict.fromkeys((*_FIRST, *SERVICE.keys)) if name not in _SHORT_FORMS
}
_DEFAULTS = {each.name: each.default for each in fields(Service)}


def _name(service: Service) -> object:
    return service.name if service.name != str(service.frontends()[0]) else None


def _backends(service: Service) -> object:
    backends = [_backend_spec(backend) for backend in service.backends if backend.declared]
    return [*backends, *map(_named_spec, service.named_backends)] or None


def _traffic_policy(service: Service) -> object:
    policies = {"internal": service.internal_policy, "external": service.external_policy}
    return {key: p.value for key, p in policies.items() if p is not TrafficPolicy.CLUSTER} or None


def _external(service: Service, key: str) -> object:
    balanced = key == "load_balancer_addresses"
    chosen = [e for e in service.external_addresses if e.load_balancer is balanced]
    return SERVICE.keys[key].kind.written(chosen) if chosen else None


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
    for name in ("port", "ports", "weight", "backup", "check", "max_connections", "state", "node", "zone"):
        key = BACKEND.keys[name]
        value = getattr(backend, key.field or name)
        if value != _BACKEND_DEFAULTS[key.field or name]:
            spec[name] = key.kind.written(value)
    return spec


_BACKEND_DEFAULTS = {each.name: each.default for each in fields(Backend) if each.name != "address"}


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


def _announce(service: Service) -> object:
    announcement = service.announcement
    if announcement is None:
        return None
    if announcement.inside is not bool(service.external_addresses):
        return announcement.by.value
    return {"by": announcement.by.value, "addresses": "all" if announcement.inside else "external"}


_OWN: Mapping[str, Callable[[Service], object]] = {
    "name": _name,
    "address": lambda service: one_or_list(service.addresses) if service.addresses else None,
    **{key: partial(_external, key=key) for key in ("external_addresses", "load_balancer_addresses")},
    "ports": lambda service: [_port_spec(port) for port in service.ports],
    "backends": _backends,
    "fallback": _fallback_spec,
    "traffic_policy": _traffic_policy,
    "check": lambda service: CHECK.written(service.check) if service.check != UNCHECKED else None,
    "announce": _announce,
}
"""What of a service is the value of a key, for those that are not a field's; None: the key is left out."""


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
    plain = _PLAIN.fullmatch(text) and type(plain_value(text)) is str
    return text if plain else yaml_quoted(text)
