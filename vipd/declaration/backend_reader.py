"""The grammar of backend lists in vipd/v1: of a service and of its fallback. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from vipd.declaration.check_reader import read_check
from vipd.declaration.dns_names import parse_any_backend, parse_backend_address, parse_dns_name
from vipd.declaration.fields import (
    Located,
    Report,
    known_keys,
    misspelt,
    one_or_more,
    read_boolean,
    read_choice,
    read_integer,
    read_short_form,
    read_text,
)
from vipd.declaration.nodes import Mapping, Node, is_null
from vipd.declaration.port_reader import is_port_name
from vipd.declaration.service_rules import check_backend_address
from vipd.declaration.syntax import MAX_PORT, quoted
from vipd.model.flow_limits import MAX_CONNECTIONS
from vipd.model.service import MAX_WEIGHT, Backend, BackendState, NamedBackend, NameKind

BACKEND_KEYS = (
    *("address", "dns", "srv", "port", "ports", "weight", "state", "node", "zone", "backup", "check"),
    "max_connections",
)

STATES = {
    **{state.value: state for state in BackendState},
    "active": BackendState.UP,
    "ready": BackendState.UP,
    "draining": BackendState.DRAIN,
    "disabled": BackendState.DOWN,
}
"""The words for a backend's state. The canonical ones are those of the model; they are used for output."""

TOPOLOGY_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")

TOPOLOGY_NAME_HINT = "1 to 253 of A-Z a-z 0-9 . _ - with a letter or digit at both ends"


def is_topology_name(text: str) -> bool:
    """Whether a name is valid for a node or a zone."""
    return TOPOLOGY_NAME.fullmatch(text) is not None


def read_backends(
    report: Report, node: Node, path: str
) -> tuple[list[Located[Backend]], list[Located[NamedBackend]]]:
    """Backends with addresses, and those with names: one or a list; null is an empty list."""
    backends: list[Located[Backend]] = []
    named: list[Located[NamedBackend]] = []
    for place, item in [] if is_null(node) else one_or_more(node, path):
        backend = (
            _read_backend_mapping(report, item, place)
            if isinstance(item, Mapping)
            else read_short_form(report, item, place, parse_any_backend, "a backend address or a mapping")
        )
        if isinstance(backend, NamedBackend):
            named.append(Located(backend, item.line, place))
        elif backend is not None:
            placed = Located(backend, item.line, place)
            if check_backend_address(report, placed):
                backends.append(placed)
    return backends, named


def _read_backend_mapping(report: Report, node: Mapping, path: str) -> Backend | NamedBackend | None:
    values: dict[str, Node] = dict(known_keys(report, node, path, BACKEND_KEYS))
    port, weight, ports = _read_ports_and_weight(report, values, path)
    state, where, zones = _read_state_and_topology(report, values, path)
    backup = check = most = None
    if "backup" in values:
        backup = read_boolean(report, values["backup"], f"{path}.backup")
    if "check" in values:
        check = read_check(report, values["check"], f"{path}.check")
    if "max_connections" in values:
        place = f"{path}.max_connections"
        most = read_integer(report, values["max_connections"], place, 1, MAX_CONNECTIONS)
    template = Backend("", port, weight, state, where, zones, ports, bool(backup), check, most)
    kinds = [kind for kind in NameKind if kind in values]
    if kinds:
        return _read_name(report, values, path, kinds[0], template)
    if "address" not in values:
        if "address" not in misspelt(report, node, BACKEND_KEYS):
            report.add(node.line, path, "address is missing", "write {address: 10.0.0.5, weight: 2}")
        return None
    place = f"{path}.address"
    address = read_short_form(report, values["address"], place, parse_backend_address, "an IP address")
    return None if address is None else replace(template, address=address)


def _read_name(
    report: Report, values: dict[str, Node], path: str, kind: NameKind, template: Backend
) -> NamedBackend | None:
    """A backend with a name. Reports keys that exclude it."""
    own = ("port", "ports", "weight") if kind is NameKind.SRV else ()
    for key in ("address", *(other for other in NameKind if other is not kind), *own):
        if key in values:
            hint = f"remove {key}: an SRV record has its own" if key in own else "write one of them"
            report.add(values[key].line, path, f"{kind} and {key} exclude each other", hint)
            return None
    name = read_short_form(report, values[kind], f"{path}.{kind}", parse_dns_name, "a DNS name")
    return None if name is None else NamedBackend(kind, name, template)


def _read_ports_and_weight(
    report: Report, values: dict[str, Node], path: str
) -> tuple[int | None, int, tuple[tuple[str, int], ...]]:
    """The port, the weight, and the ports by name."""
    port = weight = None
    ports: tuple[tuple[str, int], ...] = ()
    if "port" in values:
        port = read_integer(report, values["port"], f"{path}.port", 1, MAX_PORT)
    if "weight" in values:
        weight = read_integer(report, values["weight"], f"{path}.weight", 0, MAX_WEIGHT)
    if "ports" in values:
        ports = _read_named_ports(report, values["ports"], f"{path}.ports")
        if "port" in values:
            hint = "ports names the only service ports that the backend serves; port is for all of them"
            report.add(values["port"].line, path, "port and ports exclude each other", hint)
            port = None
    return port, 1 if weight is None else weight, ports


def _read_named_ports(report: Report, node: Node, path: str) -> tuple[tuple[str, int], ...]:
    """Ports by name of the service's port. Does not check whether the service has such ports."""
    if not isinstance(node, Mapping):
        report.wrong_type(node, path, "a mapping like {http: 8080}", "for one port for all, write port: 8080")
        return ()
    if not node.items:
        report.add(
            node.line, path, "the mapping is empty", "a backend of no port is none: remove the backend"
        )
    found = []
    for name, value in node.items.items():
        place = f"{path}.{name}" if is_port_name(name) else path
        number = read_integer(report, value, place, 1, MAX_PORT)
        if number is not None:
            found.append((name, number))
    return tuple(found)


def _read_state_and_topology(
    report: Report, values: dict[str, Node], path: str
) -> tuple[BackendState, str, tuple[str, ...]]:
    """The state, the node and the zones."""
    state, node = None, ""
    zones: tuple[str, ...] = ()
    if "state" in values:
        state = read_choice(report, values["state"], f"{path}.state", STATES)
    if "node" in values:
        node = _read_topology_name(report, values["node"], f"{path}.node", "node")
    if "zone" in values:
        items = one_or_more(values["zone"], f"{path}.zone")
        if not items:
            report.add(
                values["zone"].line, f"{path}.zone", "the list is empty", "name a zone, or remove the key"
            )
        names = [_read_topology_name(report, item, place, "zone") for place, item in items]
        zones = tuple(dict.fromkeys(filter(None, names)))
    return state or BackendState.UP, node, zones


def _read_topology_name(report: Report, node: Node, path: str, what: str) -> str:
    text = read_text(report, node, path, f"the name of a {what}")
    if text is None or is_topology_name(text):
        return text or ""
    report.add(node.line, path, f"{quoted(text)} is not the name of a {what}", TOPOLOGY_NAME_HINT)
    return ""
