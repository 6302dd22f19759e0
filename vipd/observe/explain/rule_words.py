"""Describes one step of a packet in words: the effect of its rule, and the result of its lookup. Pure."""

from __future__ import annotations

import re
from typing import TypeAlias

from vipd.dataplane.iptables.descriptions import describe as describe_iptables
from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.nftables.descriptions import describe as describe_nftables
from vipd.dataplane.nftables.descriptions import describe_element
from vipd.dataplane.nftables.options import TableOptions
from vipd.observe.simulator import Step

_HOLDER = re.compile(r"@(\w+)")


Options: TypeAlias = RuleOptions | TableOptions
"""All settings that affect the rules of an address family. The type identifies the dataplane."""


def step_words(step: Step, service_port: str = "") -> str:
    """The effect of a rule, then the element of a map or set, or the slots, that matched.

    `service_port` is that of the packet's first destination: maps of the nftables dataplane contain no
    service name.
    """
    if not in_table(step):
        return describe_iptables(ChainId(step.table, step.chain), step.rule.removeprefix(f"-A {step.chain} "))
    found = _slots(step) if step.slots is not None else _element(step, service_port)
    words = describe_nftables(step.chain, step.rule)
    return f"{words}: {found}" if found else words


def in_table(step: Step) -> bool:
    """The step is of the nftables dataplane."""
    return step.table.startswith(("ip ", "ip6 "))


def _slots(step: Step) -> str:
    slots = step.slots
    if slots is None or slots.total == 1:
        return ""
    count = len(slots.chosen)
    return f"slot {slots.chosen[0]}" if count == 1 else f"{count} of them"


def _element(step: Step, service_port: str) -> str:
    holders = _HOLDER.findall(step.rule)
    return describe_element(holders[-1], step.element, service_port) if holders and step.element else ""
