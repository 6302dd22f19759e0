"""The grammar of `limits`: how many flows a service and each of its clients may begin and have. Pure."""

from __future__ import annotations

from vipd.declaration.fields import Report, known_keys, read_integer
from vipd.declaration.nodes import Mapping, Node, Scalar
from vipd.model.flow_limits import (
    MAX_BURST,
    MAX_CONNECTIONS,
    MAX_NEW_PER_SECOND,
    MIN_CLIENT_IPV6_PREFIX,
    FlowLimits,
    Limit,
)

LIMIT_RANGES = {
    "connections": (1, MAX_CONNECTIONS),
    "connections_per_client": (1, MAX_CONNECTIONS),
    "new_per_second": (1, MAX_NEW_PER_SECOND),
    "burst": (1, MAX_BURST),
    "new_per_client": (1, MAX_NEW_PER_SECOND),
    "client_burst": (1, MAX_BURST),
    "client_ipv6_prefix": (MIN_CLIENT_IPV6_PREFIX, 128),
}
"""The keys of `limits`, each with its lowest and highest value."""

_BURSTS = {"burst": Limit.NEW_PER_SECOND, "client_burst": Limit.NEW_PER_CLIENT}
"""Each burst, and the rate that it belongs to."""

_EXAMPLE = "write {connections_per_client: 100, new_per_second: 50}, or none"


def read_limits(report: Report, node: Node, path: str) -> FlowLimits | None:
    """The limits that a mapping declares; None for `none`, and for a mapping with a problem."""
    if not isinstance(node, Mapping):
        if not (isinstance(node, Scalar) and node.text == "none"):
            report.wrong_type(node, path, "a mapping or none", _EXAMPLE)
        return None
    given = dict(known_keys(report, node, path, LIMIT_RANGES))
    found = {
        key: number
        for key, value in given.items()
        if (number := read_integer(report, value, f"{path}.{key}", *LIMIT_RANGES[key])) is not None
    }
    for burst, rate in _BURSTS.items():
        if burst in given and rate not in given:
            report.add(given[burst].line, f"{path}.{burst}", f"there is no {rate}", f"write {rate}, too")
    if node.items.keys() <= {"client_ipv6_prefix"}:
        report.add(node.line, path, "names no limit", _EXAMPLE)
    return FlowLimits(**found) if any(limit in found for limit in Limit) else None
