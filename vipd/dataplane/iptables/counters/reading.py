"""Reading the counters of one family's rules: from the kernel directly, or as iptables-save prints them.

The kernel is read over netlink; iptables-nft-save takes ten times as long.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

from vipd.dataplane.iptables.counters.limits import packets
from vipd.dataplane.iptables.counters.messages import RULE_ADDED, RULE_LISTED, Counted, RuleMessages
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.saved_rules import split_counters
from vipd.dataplane.iptables.words import target_of
from vipd.host.netlink import (
    ATTRIBUTES,
    DUMP,
    FAMILY_NUMBERS,
    REQUEST,
    MalformedMessageError,
    message,
    nfgenmsg,
    string,
)
from vipd.host.netlink_socket import dump, open_netlink
from vipd.model.service import Family

SILENCE_SECONDS = 3.0


def read_kernel(family: Family, chains: Iterable[str], messages: RuleMessages) -> list[Counted]:
    """The counts of the nf_tables rules in these chains of iptables' nat table, in the thread's network
    namespace; missing chains are skipped. Blocks. Raises OSError.

    Chain by chain: to continue a listing of the whole table, the kernel walks through all that it has already
    reported. With 60,000 rules that took 1.9 s of CPU, this 0.7 s.
    """
    counts = list[Counted]()

    def read(chain: str, datagram: bytes, rules: Iterable[tuple[int, int]]) -> None:
        told = (messages.counted(datagram, start, end, chain) for start, end in rules)
        counts.extend(found for found in told if found)

    _read_chains(family, chains, read)
    return counts


def read_limits(family: Family, chains: Iterable[str]) -> dict[str, list[int]]:
    """The packets that each rule of these chains has matched, in the same way. Blocks. Raises OSError."""
    counts: dict[str, list[int]] = {}

    def read(chain: str, datagram: bytes, rules: Iterable[tuple[int, int]]) -> None:
        matched = [packets(datagram[start + ATTRIBUTES : end]) for start, end in rules]
        counts.setdefault(chain, []).extend(matched)

    _read_chains(family, chains, read)
    return counts


def _read_chains(
    family: Family, chains: Iterable[str], read: Callable[[str, bytes, Iterable[tuple[int, int]]], None]
) -> None:
    """Pass on each chain's datagrams, with the places of rules in them. Raises OSError."""
    table = nfgenmsg(FAMILY_NUMBERS[family]) + string(1, "nat")
    with open_netlink() as opened:
        opened.settimeout(SILENCE_SECONDS)
        for sequence, chain in enumerate(chains, 1):
            request = message(RULE_LISTED, REQUEST | DUMP, sequence, table + string(2, chain))
            try:
                for datagram, answers in dump(opened, request, sequence):
                    read(
                        chain, datagram, [(start, end) for kind, start, end in answers if kind == RULE_ADDED]
                    )
            except MalformedMessageError as error:
                raise OSError(errno.EBADMSG, f"the kernel's rules: {error}") from error


def read_saved_counts(text: str, family: Family, names: Names) -> list[Counted]:
    """The counts in the output of iptables-save with `-c`."""
    counts, head = [], f"-A {names.prefix}-SEP-"
    nat = text.partition("*nat\n")[2].partition("\nCOMMIT")[0]
    for line in nat.splitlines():
        rule, counted = split_counters(line) if head in line else ("", None)
        if counted and rule.startswith(head) and target_of(rule) == "DNAT":
            counts.append(Counted(family, rule.split(" ", 2)[1], 0, counted.packets))
    return counts
