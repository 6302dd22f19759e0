"""The grammar of external addresses in vipd/v1, their allowed clients, and traffic policies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vipd.declaration.fields import (
    Located,
    Report,
    describe_node,
    known_keys,
    one_or_more,
    read_choice,
    read_short_form,
)
from vipd.declaration.nodes import Mapping, Node, Scalar, is_null
from vipd.declaration.service_rules import check_vip
from vipd.declaration.syntax import InvalidTextError, parse_address, parse_network
from vipd.model.service import ExternalAddress, Family, TrafficPolicy, family_of

EXTERNAL_KEYS = ("address", "allow_from")
TRAFFIC_KEYS = ("internal", "external")

_POLICIES = {policy.value: policy for policy in TrafficPolicy}
_ANY = "any"


def read_external_addresses(
    report: Report, node: Node, path: str, *, load_balancer: bool
) -> list[Located[ExternalAddress]]:
    """One external address or a list; every invalid item is reported."""
    items = one_or_more(node, path)
    if not items:
        report.add(node.line, path, "the list is empty", "name an address, or remove the key")
    found = []
    for place, item in items:
        external = _read_external_address(report, item, place)
        if external is not None and check_vip(report, Located(external.address, item.line, place)):
            found.append(Located(replace(external, load_balancer=load_balancer), item.line, place))
    return found


def _read_external_address(report: Report, node: Node, path: str) -> ExternalAddress | None:
    if not isinstance(node, Mapping):
        address = read_short_form(report, node, path, parse_address, "an IP address or a mapping")
        return None if address is None else ExternalAddress(address)
    values: dict[str, Node] = dict(known_keys(report, node, path, EXTERNAL_KEYS))
    allowed = None
    if "allow_from" in values:
        allowed = read_allow_from(report, values["allow_from"], f"{path}.allow_from")
    if "address" not in values:
        report.add(node.line, path, "address is missing", "write {address: 203.0.113.10, allow_from: any}")
        return None
    address = read_short_form(report, values["address"], f"{path}.address", parse_address, "an IP address")
    return None if address is None else ExternalAddress(address, allow_from=allowed)


def read_allow_from(report: Report, node: Node, path: str) -> tuple[str, ...]:
    """One network or address, or a list, or `any`, which is the empty tuple. Networks that repeat are
    reported."""
    if isinstance(node, Scalar) and node.text == _ANY:
        return ()
    items = one_or_more(node, path)
    if not items:
        report.add(node.line, path, "the list is empty", "name a network, or write any")
    first: dict[str, str] = {}
    for place, item in items:
        network = read_short_form(report, item, place, _parse_allowed, "a network like 203.0.113.0/24")
        if network is None:
            continue
        if network in first:
            report.add(item.line, place, f"{network} is already {first[network]}", "remove one of them")
        first.setdefault(network, place)
    return tuple(first)


def _parse_allowed(text: str) -> str:
    if text == _ANY:
        raise InvalidTextError("any stands among networks", "write allow_from: any alone, or leave any out")
    return parse_network(text)


def read_traffic_policy(report: Report, node: Node, path: str) -> tuple[TrafficPolicy, TrafficPolicy]:
    """The policies for traffic from inside and from outside; `cluster` by default."""
    if isinstance(node, Scalar) and not is_null(node):
        word = node.text if node.text in _POLICIES else "local"
        hint = f"write {{internal: {word}, external: {word}}}, or one of the two"
        report.add(node.line, path, f"must be a mapping, not {describe_node(node)}", hint)
        return TrafficPolicy.CLUSTER, TrafficPolicy.CLUSTER
    values: dict[str, Node] = dict(known_keys(report, node, path, TRAFFIC_KEYS))
    found = {key: read_choice(report, values[key], f"{path}.{key}", _POLICIES) for key in values}
    return found.get("internal") or TrafficPolicy.CLUSTER, found.get("external") or TrafficPolicy.CLUSTER


def check_allowed(
    report: Report,
    addresses: Sequence[Located[str]],
    externals: Sequence[Located[ExternalAddress]],
    allowed: Located[tuple[str, ...]] | None,
) -> None:
    """Report limited addresses whose family no network has."""
    of_all = allowed.value if allowed else ()
    for address in addresses:
        _check_family(report, address, of_all, "")
    for each in externals:
        external, address = each.value, Located(each.value.address, each.line, each.path)
        networks = of_all if external.allow_from is None else external.allow_from
        _check_family(report, address, networks, f"write {{address: {external.address}, allow_from: any}}")


def _check_family(report: Report, address: Located[str], networks: Sequence[str], hint: str) -> None:
    family = family_of(address.value)
    if not networks or any(family_of(network) is family for network in networks):
        return
    name, everyone = ("IPv6", "::/0") if family is Family.IPV6 else ("IPv4", "0.0.0.0/0")
    what = f"no network of allow_from is {name}: {address.value} would be open to all"
    hint = hint or f"{everyone} for everyone"
    report.add(address.line, address.path, what, f"name an {name} network, or {hint}")
