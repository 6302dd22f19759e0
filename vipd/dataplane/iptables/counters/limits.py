"""The counters of LIM chains: the flows that each rule has refused, in the order of the rules. Pure.

Layouts are those of the kernel's include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.saved_rules import split_counters
from vipd.host.netlink import attributes, text, walk

_EXPRESSIONS = 4
_NAME, _DATA = 1, 2
_PACKETS = 2


def packets(rule: bytes) -> int:
    """The packets that a rule has matched, of its attributes in the kernel's message; 0 without a counter.
    Raises MalformedMessageError."""
    for _, expression in walk(attributes(rule).get(_EXPRESSIONS, b"")):
        found = attributes(expression)
        if text(found.get(_NAME)) == "counter":
            return int.from_bytes(attributes(found.get(_DATA, b"")).get(_PACKETS, b""), "big")
    return 0


def read_saved_limits(saved: str, names: Names) -> Mapping[str, Sequence[int]]:
    """The packets that each rule of each LIM chain has matched, in the output of iptables-save with `-c`."""
    found: dict[str, list[int]] = {}
    head = f"-A {names.prefix}-LIM-"
    for line in saved.partition("*nat\n")[2].partition("\nCOMMIT")[0].splitlines():
        rule, counted = split_counters(line) if head in line else ("", None)
        if counted and rule.startswith(head):
            found.setdefault(rule.split(" ", 2)[1], []).append(counted.packets)
    return found
