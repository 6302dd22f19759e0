"""The grammar of a service's ports in vipd/v1, and of the ports that it takes of the host itself. Pure."""

from __future__ import annotations

import re

from vipd.declaration.fields import (
    Located,
    Report,
    known_keys,
    misspelt,
    one_or_more,
    read_integer,
    read_short_form,
    read_text,
)
from vipd.declaration.nodes import Mapping, Node
from vipd.declaration.syntax import MAX_PORT, parse_port, parse_protocol, quoted
from vipd.model.service import Protocol, ServicePort

PORT_NAME = re.compile(r"(?=[0-9-]*[a-z])[a-z0-9-]{1,63}")

PORT_NAME_HINT = "1 to 63 of a-z 0-9 - with at least one letter"

PORT_KEYS = ("name", "port", "protocol", "target", "node_port")


def read_ports(report: Report, node: Node, path: str) -> list[Located[ServicePort]]:
    """One port or a list; an empty list and every invalid item are reported."""
    items = one_or_more(node, path)
    if not items:
        report.add(node.line, path, "the list is empty", "every service needs a port, like 53/udp")
    found = []
    for place, item in items:
        port = (
            _read_port_mapping(report, item, place)
            if isinstance(item, Mapping)
            else read_short_form(report, item, place, parse_port, "a port like 53/udp or a mapping")
        )
        if port is not None:
            found.append(Located(port, item.line, place))
    return found


def is_port_name(text: str) -> bool:
    """Whether a name is valid for a service port."""
    return PORT_NAME.fullmatch(text) is not None


def _read_port_mapping(report: Report, node: Mapping, path: str) -> ServicePort | None:
    values: dict[str, Node] = dict(known_keys(report, node, path, PORT_KEYS))
    name = _read_port_name(report, values["name"], f"{path}.name") if "name" in values else ""
    protocol: Protocol | None = Protocol.TCP
    if "protocol" in values:
        place = f"{path}.protocol"
        protocol = read_short_form(report, values["protocol"], place, parse_protocol, "tcp, udp or sctp")
    numbers = {
        key: read_integer(report, values[key], f"{path}.{key}", 1, MAX_PORT)
        for key in ("target", "node_port", "port")
        if key in values
    }
    if "port" not in values and "port" not in misspelt(node, PORT_KEYS):
        report.add(node.line, path, "port is missing", "write {port: 53, protocol: udp}")
    port, target = numbers.get("port"), numbers.get("target")
    if port is None or protocol is None:
        return None
    return ServicePort(port, protocol, name, None if target == port else target, numbers.get("node_port"))


def _read_port_name(report: Report, node: Node, path: str) -> str:
    text = read_text(report, node, path, "a name")
    if text is None or is_port_name(text):
        return text or ""
    report.add(node.line, path, f"{quoted(text)} is not a port name", PORT_NAME_HINT)
    return ""
