"""The rules and the routes of a host, for an explanation with what other programs have put there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vipd.model.service import Family
from vipd.observe.simulator import Packet, Ruleset, Tables, parse_ruleset, parse_tables
from vipd.observe.simulator.errors import RulesetError
from vipd.observe.simulator.walk import BaseChain, Rules


@dataclass(frozen=True, slots=True)
class HostState:
    """What a host has, as read."""

    iptables: Mapping[str, str] = field(default_factory=dict)
    """The rules of one family by variant of iptables, as iptables-save prints them."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """The other tables of nft by their name, such as `inet filter`, as `nft -n list table` prints them;
    neither iptables' nor vipd's own."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """By address: the interface by which packets to it leave; empty where there is no route."""
    unread: tuple[str, ...] = ()
    """Rules of iptables that could not be read, and why."""
    faults: tuple[str, ...] = ()
    """What else could not be read, and why."""


@dataclass(frozen=True, slots=True)
class MergedRules:
    """The rules of several programs for one family."""

    family: Family
    parts: Sequence[Rules]
    left_out: tuple[str, ...] = ()
    """What of them is not looked at."""

    def base_chains(self, hook: str) -> Sequence[BaseChain[Any]]:
        """Those of a hook in the kernel's order: by priority."""
        found = [chain for part in self.parts for chain in part.base_chains(hook)]
        return sorted(found, key=lambda chain: chain.priority)


def merged_rules(host: HostState, family: Family, prefix: str, own: Tables | None) -> MergedRules:
    """The rules of a host in one family. `own`: vipd's table; None where its rules are among iptables'.

    Raises:
        RulesetError: a text is not understood at all, or vipd's own rules could not be read.
    """
    if own is None and (host.unread or not host.iptables):
        raise RulesetError("", "; ".join(host.unread) or "there are no rules of iptables")
    parts: list[Ruleset | Tables] = [own] if own else []
    left_out: list[str] = []
    for variant, text in host.iptables.items():
        parts.append(_named(f"iptables ({variant})", parse_ruleset, text, family, prefix=prefix))
    for name, text in host.tables.items():
        if name.partition(" ")[0] in _OF[family]:
            tables = _named(f"table {name}", parse_tables, text, family)
            parts.append(tables)
            left_out += tables.left_out
        elif name.partition(" ")[0] in ("bridge", "netdev"):
            left_out.append(name)
    return MergedRules(family, parts, tuple(left_out))


_OF = {Family.IPV4: ("ip", "inet"), Family.IPV6: ("ip6", "inet")}


def _named(name: str, parse: Any, text: str, family: Family, **options: str) -> Any:
    try:
        return parse(text, family, strict=False, **options)
    except RulesetError as error:
        raise RulesetError(f"{name}: {error.text}" if error.text else name, error.why) from None


def arriving_by_route(packet: Packet, devices: Mapping[str, str]) -> Packet:
    """The packet with the interface that it probably comes by: the one by which replies leave."""
    return replace(packet, in_interface=packet.in_interface or devices.get(packet.source) or None)


def unreachable(backends: Collection[str], devices: Mapping[str, str]) -> list[str]:
    """The addresses of the backends, each `ADDR:PORT`, to which there is no route."""
    without = [address for address, device in devices.items() if not device]
    return [a for a in without if any(b == a or b.startswith((f"{a}:", f"[{a}]:")) for b in backends)]
