"""Services as vipd/v1: the canonical short form as JSON types, and as YAML for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields

from vipd.declaration.service import API_VERSION, CHECK_TYPES, PROBE_FIELDS, SERVICE, TIMING
from vipd.declaration.syntax import period_text
from vipd.declaration.values import one_or_list
from vipd.declaration.yaml_text import plain_value
from vipd.model.check import UNCHECKED, Check, HttpProbe, Timing
from vipd.model.service import (
    Backend,
    ExternalAddress,
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


def _external(service: Service, load_balancer: bool) -> object:
    chosen = [e for e in service.external_addresses if e.load_balancer is load_balancer]
    return one_or_list([_external_address_spec(each) for each in chosen]) if chosen else None


def _check(service: Service) -> object:
    return check_to_spec(service.check) if service.check != UNCHECKED else None


def _external_address_spec(external: ExternalAddress) -> object:
    if external.allow_from is None:
        return external.address
    return {
        "address": external.address,
        "allow_from": one_or_list(external.allow_from) if external.allow_from else "any",
    }


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
    for name in ("port", "ports", "weight", "backup", "check", "max_connections", "state", "node", "zones"):
        value = getattr(backend, name)
        if value != _BACKEND_DEFAULTS[name]:
            spec[name] = value
    if "ports" in spec:
        spec["ports"] = dict(backend.ports)
    if backend.check is not None:
        spec["check"] = check_to_spec(backend.check)
    if "state" in spec:
        spec["state"] = backend.state.value
    if "zones" in spec:
        spec["zone"] = one_or_list(spec.pop("zones"))  # type: ignore[arg-type]
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
    "external_addresses": lambda service: _external(service, False),
    "load_balancer_addresses": lambda service: _external(service, True),
    "ports": lambda service: [_port_spec(port) for port in service.ports],
    "backends": _backends,
    "fallback": _fallback_spec,
    "traffic_policy": _traffic_policy,
    "check": _check,
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


def check_to_spec(check: Check) -> object:
    """A check, defaults left out: `tcp`, or `{type: http, path: /healthz}`. `none` without a probe."""
    if check.probe is None:
        return "none"
    kind = check_type(check)
    spec: dict[str, object] = {"type": kind}
    plain, keys, required = CHECK_TYPES[kind]
    for key in keys:
        name = PROBE_FIELDS.get(key, key)
        value = getattr(check.probe, name)
        if value != getattr(plain, name) or key in required:
            spec[key] = _probe_value(key, value)
    for key in TIMING:
        value = getattr(check.timing, key)
        if value != _default_timing(key, check.timing):
            spec[key] = _timing_value(key, value)
    return kind if len(spec) == 1 else spec


def check_type(check: Check) -> str:
    """The word for the kind of check: `tcp`, `http`, `https`, `udp`, `dns`, `exec` or `none`."""
    if isinstance(check.probe, HttpProbe):
        return "https" if check.probe.tls else "http"
    return next(kind for kind in CHECK_TYPES if type(CHECK_TYPES[kind].probe) is type(check.probe))


def _default_timing(name: str, timing: Timing) -> object:
    """The default of a declaration without a value; its timeout is never longer than its interval."""
    if name == "timeout":
        return min(Timing().timeout, timing.interval)
    return next(field.default for field in fields(Timing) if field.name == name)


def _probe_value(key: str, value: object) -> object:
    if isinstance(value, bytes):
        return _payload_text(value)
    if key == "status" and isinstance(value, tuple):
        ranges = [low if low == high else f"{low}-{high}" for low, high in value]
        return ranges[0] if len(ranges) == 1 else ranges
    return list(value) if isinstance(value, tuple) else value


def _timing_value(key: str, value: object) -> object:
    if isinstance(value, float):
        return f"{round(value * 100)}%" if key == "jitter" else period_text(value)
    return value


def _payload_text(payload: bytes) -> str:
    """The text that the payload is, or `hex:` and digits where text would not be read back the same."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"hex:{payload.hex()}"
    return text if text.isprintable() and not text.startswith("hex:") else f"hex:{payload.hex()}"
