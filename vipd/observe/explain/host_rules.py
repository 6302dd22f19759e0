"""The rules and the routes of a host, for an explanation with what other programs have put there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """Rules that could not be read, and why: then nothing can be told."""
    faults: tuple[str, ...] = ()
    """Routes that could not be read, and why."""


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


def merged_rules(host: HostState, own: Ruleset | Tables, prefix: str) -> MergedRules:
    """The rules of a host in one family, with vipd's `own` ones. With iptables these are among the host's,
    as the kernel has them.

    Raises:
        RulesetError: something could not be read, or is not understood at all.
    """
    if host.unread:
        raise RulesetError("", f"rules of this host could not be read: {'; '.join(host.unread)}")
    family = own.family
    parts: list[Ruleset | Tables] = [own] if isinstance(own, Tables) else []
    if not parts and not host.iptables:
        raise RulesetError("", "the kernel has no rules of iptables")
    for variant, text in host.iptables.items():
        with _naming(f"iptables ({variant})"):
            parts.append(parse_ruleset(text, family, strict=False, prefix=prefix))
    left_out: list[str] = []
    for name, text in host.tables.items():
        of = name.partition(" ")[0]
        if of in _FAMILIES[family]:
            with _naming(f"table {name}"):
                parts.append(tables := parse_tables(text, family, strict=False))
            left_out += tables.left_out
        elif of in ("bridge", "netdev"):
            left_out.append(name)
    return MergedRules(family, parts, tuple(left_out))


_FAMILIES = {Family.IPV4: ("ip", "inet"), Family.IPV6: ("ip6", "inet")}


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Within it a RulesetError names what the text is of."""
    try:
        yield
    except RulesetError as error:
        raise RulesetError(f"{name}: {error.text}" if error.text else name, error.why) from None


def arriving_by_route(packet: Packet, devices: Mapping[str, str]) -> Packet:
    """The packet with the interface that it probably comes by: the one by which replies leave."""
    return replace(packet, in_interface=packet.in_interface or devices.get(packet.source) or None)


def unreachable(backends: Collection[str], devices: Mapping[str, str]) -> list[str]:
    """The addresses of the backends, each `ADDR:PORT`, to which there is no route."""
    without = [address for address, device in devices.items() if not device]
    return [a for a in without if any(b == a or b.startswith((f"{a}:", f"[{a}]:")) for b in backends)]
