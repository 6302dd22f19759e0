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
from vipd.declaration.nodes import Mapping, Node, Scalar, Sequence, other_meaning
from vipd.declaration.syntax import MAX_PORT, parse_ports, parse_protocol, quoted
from vipd.model.service import Protocol, ServicePort

PORT_NAME = re.compile(r"(?=-*[a-z0-9])[a-z0-9-]{1,63}")
"""Digits alone are legal in Kubernetes, which names a port `80-8080` itself."""

PORT_NAME_HINT = "1 to 63 of a-z 0-9 - with at least one letter or digit"

PORT_KEYS = ("name", "port", "protocol", "target", "node_port")


def read_ports(report: Report, node: Node, path: str) -> list[Located[ServicePort]]:
    """One port or a list; an empty list and every invalid item are reported."""
    items = one_or_more(node, path)
    if not items:
        report.add(node.line, path, "the list is empty", "every service needs a port, like 53/udp")
    found = []
    for index, (place, item) in enumerate(items):
        ports: tuple[ServicePort, ...] = ()
        if isinstance(item, Mapping):
            port = _read_port_mapping(report, item, place)
            ports = () if port is None else (port,)
        elif _is_misread(report, item, place, items[index - 1][1] if index else None):
            continue
        else:
            wanted = "a port like 53/udp or a mapping"
            ports = read_short_form(report, item, place, parse_ports, wanted) or ()
        found += [Located(port, item.line, place) for port in ports]
    return found


def _is_misread(report: Report, node: Node, path: str, before: Node | None) -> bool:
    """Report what YAML makes of a port without quotes: the item `udp` of `[80/tcp,udp]`, the number
    `22:22`."""
    if not isinstance(node, Scalar):
        return False
    if isinstance(before, Scalar) and node.text.lower() in tuple(Protocol) and "/" in before.text:
        hint = f'a comma ends an item of a list: write "{before.text},{node.text}" in quotes'
        report.add(node.line, path, f"{quoted(node.text)} is not a port", hint)
        return True
    if ":" in node.text and other_meaning(node):
        report.wrong_type(node, path, "a port", f'put it in quotes: "{node.text}", or write {node.text}/tcp')
        return True
    return False


def is_port_name(text: str) -> bool:
    """Whether a name is valid for a service port."""
    return PORT_NAME.fullmatch(text) is not None


def _read_port_mapping(report: Report, node: Mapping, path: str) -> ServicePort | None:
    values: dict[str, Node] = dict(known_keys(report, node, path, PORT_KEYS))
    name = _read_port_name(report, values["name"], f"{path}.name") if "name" in values else ""
    protocol: Protocol | None = Protocol.TCP
    if "protocol" in values:
        given, place = values["protocol"], f"{path}.protocol"
        if isinstance(given, Sequence) or (isinstance(given, Scalar) and "," in given.text):
            hint = "write a port for each, or the short form: 53:5353/tcp,udp"
            report.add(given.line, place, "a port has one protocol", hint)
            protocol = None
        else:
            protocol = read_short_form(report, given, place, parse_protocol, "tcp, udp or sctp")
    numbers = {
        key: read_integer(report, values[key], f"{path}.{key}", 1, MAX_PORT)
        for key in ("target", "node_port", "port")
        if key in values
    }
    if "port" not in values and "port" not in misspelt(report, node, PORT_KEYS):
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
