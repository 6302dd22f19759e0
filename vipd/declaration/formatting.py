"""Services as vipd/v1: the canonical short form as JSON types, and as YAML for people. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable

from vipd.declaration.nodes import Scalar, other_meaning
from vipd.declaration.notation import duration_text
from vipd.model import (
    DEFAULT_AFFINITY_SECONDS,
    Affinity,
    Backend,
    Refusal,
    Service,
    ServicePort,
)

API_VERSION = "vipd/v1"


def service_to_spec(service: Service) -> dict[str, object]:
    """The canonical short form: defaults left out, one address as text and several as a list.

    Raises ValueError for a service that both drops and has fallback backends, which vipd/v1 cannot say.
    """
    spec: dict[str, object] = {}
    if service.name != str(service.frontends()[0]):
        spec["name"] = service.name
    spec["address"] = service.addresses[0] if len(service.addresses) == 1 else list(service.addresses)
    spec["ports"] = [_port_spec(port) for port in service.ports]
    if service.backends:
        spec["backends"] = [_backend_spec(backend) for backend in service.backends]
    if service.affinity is not None:
        spec["affinity"] = _affinity_spec(service.affinity)
    if service.masquerade is not None:
        spec["masquerade"] = service.masquerade.value
    fallback = _fallback_spec(service)
    if fallback is not None:
        spec["fallback"] = fallback
    return spec


def _port_spec(port: ServicePort) -> object:
    if not port.name and port.target is None:
        return str(port)
    spec: dict[str, object] = {"name": port.name} if port.name else {}
    spec |= {"port": port.port, "protocol": port.protocol.value}
    if port.target is not None:
        spec["target"] = port.target
    return spec


def _backend_spec(backend: Backend) -> object:
    if backend.port is None and backend.weight == 1:
        return backend.address
    spec: dict[str, object] = {"address": backend.address}
    if backend.port is not None:
        spec["port"] = backend.port
    if backend.weight != 1:
        spec["weight"] = backend.weight
    return spec


def _affinity_spec(affinity: Affinity) -> object:
    if affinity.timeout == DEFAULT_AFFINITY_SECONDS:
        return "client-ip"
    return {"by": "client-ip", "timeout": duration_text(affinity.timeout)}


def _fallback_spec(service: Service) -> object:
    if not service.fallback:
        return None if service.refusal is Refusal.REJECT else service.refusal.value
    if service.refusal is not Refusal.REJECT:
        raise ValueError(f"{service.name}: vipd/v1 cannot say both {service.refusal} and fallback backends")
    return {"backends": [_backend_spec(backend) for backend in service.fallback]}


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
    """A whole vipd/v1 document. What it says parses back to equal services. Raises as `service_to_spec`."""
    blocks = "".join(map(format_service, services))
    return f"apiVersion: {API_VERSION}\nservices:{chr(10) if blocks else ' []' + chr(10)}{blocks}"


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    # Colons and brackets mean something to YAML in some places, and some plain words mean no text.
    plain = text[0].isalnum() and ":" not in text and not other_meaning(Scalar(0, text, plain=True))
    return text if plain else json.dumps(text)
