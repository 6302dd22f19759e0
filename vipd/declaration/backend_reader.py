"""The grammar of backend lists in vipd/v1: of a service and of its fallback. Pure."""

from __future__ import annotations

from vipd.declaration.fields import Placed, Report, known_keys, one_or_more, read_integer, read_notation
from vipd.declaration.nodes import Mapping, Node, null
from vipd.declaration.notation import MAX_PORT, parse_address, parse_backend
from vipd.declaration.service_rules import check_backend_address
from vipd.model import MAX_WEIGHT, Backend

BACKEND_KEYS = ("address", "port", "weight")


def read_backends(report: Report, node: Node, path: str) -> list[Placed[Backend]]:
    """One backend or a list; null is an empty list. Every item that is no usable backend is reported."""
    if null(node):
        return []
    found = []
    for place, item in one_or_more(node, path):
        backend = (
            _read_backend_mapping(report, item, place)
            if isinstance(item, Mapping)
            else read_notation(report, item, place, parse_backend, "a backend address or a mapping")
        )
        if backend is not None:
            placed = Placed(backend, item.line, place)
            if check_backend_address(report, placed):
                found.append(placed)
    return found


def _read_backend_mapping(report: Report, node: Mapping, path: str) -> Backend | None:
    values: dict[str, Node] = dict(known_keys(report, node, path, BACKEND_KEYS))
    port = weight = None
    if "port" in values:
        port = read_integer(report, values["port"], f"{path}.port", 1, MAX_PORT)
    if "weight" in values:
        weight = read_integer(report, values["weight"], f"{path}.weight", 0, MAX_WEIGHT)
    if "address" not in values:
        report.add(node.line, path, "address is missing", "write {address: 10.0.0.5, weight: 2}")
        return None
    address = read_notation(report, values["address"], f"{path}.address", parse_address, "an IP address")
    if address is None:
        return None
    return Backend(address, port, 1 if weight is None else weight)
