"""Reading the counters of one family's rules: from the kernel directly, or as iptables-save prints them.

The kernel is read over netlink; iptables-nft-save takes ten times as long.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence

from vipd.dataplane.iptables.counters.messages import (
    RULE_ADDED,
    RULE_LISTED,
    Counted,
    RuleMessages,
    limit_of,
    limit_rule,
)
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.saved_rules import split_counters
from vipd.dataplane.iptables.words import target_of
from vipd.host.netlink import (
    DUMP,
    FAMILY_NUMBERS,
    REQUEST,
    MalformedMessageError,
    message,
    nfgenmsg,
    string,
)
from vipd.host.netlink_socket import open_netlink, read_whole
from vipd.model.service import Family

SILENCE_SECONDS = 3.0


def read_kernel(family: Family, chains: Iterable[str], messages: RuleMessages) -> list[Counted]:
    """The counts of the nf_tables rules in these chains of iptables' nat table, in the thread's network
    namespace; missing chains are skipped. Blocks. Raises OSError.

    Chain by chain: to continue a listing of the whole table, the kernel walks through all that it has already
    reported. With 60,000 rules that took 1.9 s of CPU, this 0.7 s.
    """
    counts = list[Counted]()
    table = nfgenmsg(FAMILY_NUMBERS[family]) + string(1, "nat")
    with open_netlink() as opened:
        opened.settimeout(SILENCE_SECONDS)
        for chain in chains:

            def request(sequence: int, chain: str = chain) -> bytes:
                return message(RULE_LISTED, REQUEST | DUMP, sequence, table + string(2, chain))

            def counted(
                datagram: bytes, answers: Sequence[tuple[int, int, int]], chain: str = chain
            ) -> Iterator[Counted]:
                rules = ((start, end) for kind, start, end in answers if kind == RULE_ADDED)
                found = (messages.counted(datagram, start, end, chain) for start, end in rules)
                return (count for count in found if count)

            try:
                counts += read_whole(opened, request, counted)
            except MalformedMessageError as error:
                raise OSError(errno.EBADMSG, f"the kernel's rules: {error}") from error
    return counts


def read_saved_counts(text: str, family: Family, names: Names) -> list[Counted]:
    """The counts in the output of iptables-save with `-c`."""
    counts, heads = [], tuple(f"-A {names.prefix}-{kind}-" for kind in ("SEP", "LIM"))
    nat = text.partition("*nat\n")[2].partition("\nCOMMIT")[0]
    for line in nat.splitlines():
        rule, counted = split_counters(line) if any(head in line for head in heads) else ("", None)
        if not counted or not rule.startswith(heads):
            continue
        chain = rule.split(" ", 2)[1]
        if limit := limit_of(rule, '"'):
            counts.append(Counted(family, limit_rule(chain, limit), 0, counted.packets))
        elif target_of(rule) == "DNAT":
            counts.append(Counted(family, chain, 0, counted.packets))
    return counts
