"""The grammar of one service in vipd/v1: a table per mapping, a function per key. Pure.

To add a key: one line in its table and one function that reads the value into the draft.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from vipd.declaration.backend_reader import read_backends
from vipd.declaration.fields import (
    Placed,
    Report,
    known_keys,
    one_or_more,
    read_integer,
    read_notation,
    read_text,
)
from vipd.declaration.nodes import Mapping, Node
from vipd.declaration.notation import (
    MAX_PORT,
    parse_address,
    parse_port,
    parse_protocol,
    shown,
)
from vipd.declaration.policy_reader import DEFAULTS_KEYS, UNSUPPORTED_KEYS, Policy, read_check
from vipd.declaration.service_rules import (
    check_backends,
    check_vip,
    unique_addresses,
    unique_ports,
)
from vipd.model import (
    Backend,
    Frontend,
    Origin,
    Protocol,
    Service,
    ServicePort,
    family_of,
)

_SERVICE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")
_PORT_NAME = re.compile(r"(?=[0-9-]*[a-z])[a-z0-9-]{1,63}")


@dataclass(slots=True)
class _Draft(Policy):
    """A service as far as it is read."""

    name: Placed[str] | None = None
    addresses: list[Placed[str]] = field(default_factory=list)
    ports: list[Placed[ServicePort]] = field(default_factory=list)
    backends: list[Placed[Backend]] = field(default_factory=list)


_ServiceKey: TypeAlias = Callable[[Report, _Draft, Node, str], None]


def read_service(report: Report, node: Node, path: str, defaults: Policy, origin: Origin) -> Service | None:
    """One service, or None when it lacks a readable address or port. Every fault of it is reported."""
    draft = _Draft(defaults.affinity, defaults.masquerade, defaults.refusal, defaults.fallback)
    if not isinstance(node, Mapping):
        report.wrong_type(node, path, "a service: a mapping with address, ports and backends")
        return None
    prefix = f"{path}." if path else ""
    for key, value in known_keys(report, node, path, SERVICE_KEYS, UNSUPPORTED_KEYS):
        SERVICE_KEYS[key](report, draft, value, prefix + key)
    for key in ("address", "ports"):
        if key not in node.items:
            report.add(node.line, path, f"{key} is missing", f"every service needs {key}")
    if not draft.addresses or not draft.ports:
        return None
    return _finish(report, draft, origin)


def _finish(report: Report, draft: _Draft, origin: Origin) -> Service:
    fallback = list(draft.fallback)
    if not draft.own_fallback:
        families = {family_of(address.value) for address in draft.addresses}
        fallback = [backend for backend in fallback if family_of(backend.value.address) in families]
    check_backends(report, draft.backends, draft.addresses, draft.ports)
    check_backends(report, fallback, draft.addresses, draft.ports)
    first = draft.ports[0].value
    default_name = str(Frontend(draft.addresses[0].value, first.port, first.protocol))
    return Service(
        name=_name(report, draft.name, default_name),
        addresses=tuple([address.value for address in draft.addresses]),
        ports=tuple([port.value for port in draft.ports]),
        backends=tuple([backend.value for backend in draft.backends]),
        affinity=draft.affinity,
        masquerade=draft.masquerade,
        refusal=draft.refusal,
        fallback=tuple([backend.value for backend in fallback]),
        origin=origin,
    )


def _name(report: Report, name: Placed[str] | None, default: str) -> str:
    if name is None or name.value == default:
        return default
    if _SERVICE_NAME.fullmatch(name.value):
        return name.value
    what = f"{shown(name.value)} is not a service name"
    hint = "1 to 128 of A-Z a-z 0-9 . _ / - with a letter or digit at both ends"
    if ":" in name.value:
        hint = f"only the default name {default} may contain a colon"
    report.add(name.line, name.path, what, hint)
    return default


def _read_name(report: Report, draft: _Draft, node: Node, path: str) -> None:
    text = read_text(report, node, path, "a name")
    if text is not None:
        draft.name = Placed(text, node.line, path)


def _read_address(report: Report, draft: _Draft, node: Node, path: str) -> None:
    items = one_or_more(node, path)
    if not items:
        report.add(node.line, path, "the list is empty", "every service needs an address")
    found = []
    for place, item in items:
        text = read_notation(report, item, place, parse_address, "an IP address")
        if text is not None:
            address = Placed(text, item.line, place)
            if check_vip(report, address):
                found.append(address)
    draft.addresses = unique_addresses(report, found)


def _read_ports(report: Report, draft: _Draft, node: Node, path: str) -> None:
    items = one_or_more(node, path)
    if not items:
        report.add(node.line, path, "the list is empty", "every service needs a port, like 53/udp")
    found = []
    for place, item in items:
        port = (
            _read_port_mapping(report, item, place)
            if isinstance(item, Mapping)
            else read_notation(report, item, place, parse_port, "a port like 53/udp or a mapping")
        )
        if port is not None:
            found.append(Placed(port, item.line, place))
    draft.ports = unique_ports(report, found)


def _read_port_mapping(report: Report, node: Mapping, path: str) -> ServicePort | None:
    values: dict[str, Node] = dict(known_keys(report, node, path, PORT_KEYS))
    name = _read_port_name(report, values["name"], f"{path}.name") if "name" in values else ""
    protocol: Protocol | None = Protocol.TCP
    if "protocol" in values:
        place = f"{path}.protocol"
        protocol = read_notation(report, values["protocol"], place, parse_protocol, "tcp, udp or sctp")
    target = None
    if "target" in values:
        target = read_integer(report, values["target"], f"{path}.target", 1, MAX_PORT)
    if "port" not in values:
        report.add(node.line, path, "port is missing", "write {port: 53, protocol: udp}")
        return None
    port = read_integer(report, values["port"], f"{path}.port", 1, MAX_PORT)
    if port is None or protocol is None:
        return None
    return ServicePort(port, protocol, name, None if target == port else target)


def _read_port_name(report: Report, node: Node, path: str) -> str:
    text = read_text(report, node, path, "a name")
    if text is None:
        return ""
    if _PORT_NAME.fullmatch(text):
        return text
    hint = "1 to 63 of a-z 0-9 - with at least one letter"
    report.add(node.line, path, f"{shown(text)} is not a port name", hint)
    return ""


def _read_backends(report: Report, draft: _Draft, node: Node, path: str) -> None:
    draft.backends = read_backends(report, node, path)


SERVICE_KEYS: dict[str, _ServiceKey] = {
    "name": _read_name,
    "address": _read_address,
    "ports": _read_ports,
    "backends": _read_backends,
    **DEFAULTS_KEYS,
    "check": read_check,
}
"""The keys of a service."""

PORT_KEYS = ("name", "port", "protocol", "target")
