"""Reading one family's rules from the kernel: all of them, or single chains.

If another program has added a rule that only nft can show, iptables-nft-save omits the whole table, and
reports that only in a comment. vipd's own chains can still be listed, and a built-in chain can be checked for
vipd's jumps. If such a table were taken for an empty one, each reading would add the jumps
again.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Collection, Mapping

from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.foreign_rules import UNREADABLE, ForeignChains, may_be_chain
from vipd.dataplane.iptables.names import TABLES, ChainId, Names, Rules
from vipd.dataplane.iptables.plan import Installed
from vipd.dataplane.iptables.saved_rules import left_out_tables, read_saved
from vipd.dataplane.iptables.tools import IncompatibleError, Tools, has_rule, list_chain
from vipd.dataplane.iptables.words import target_of
from vipd.host.process import Runner

MAX_CHAINS = 64
"""Chains above which a table that iptables-save does not show is not read one by one: a process for each."""


def absent_tables(saved: str) -> list[str]:
    """The tables that do not exist, by the output of iptables-save."""
    left_out = left_out_tables(saved)
    return [table for table in TABLES if f"*{table}\n" not in saved and table not in left_out]


async def read_all(
    saved: str,
    tools: Tools,
    names: Names,
    chains: Collection[ChainId],
    jumps: Mapping[ChainId, Rules],
    run: Runner,
) -> Installed:
    """The output of iptables-save, and what it omits of these chains and jumps. Raises ApplyError."""
    try:
        # In a thread: for a large table it takes seconds.
        installed = await asyncio.to_thread(read_saved, saved, names)
    except (ValueError, IndexError) as error:
        raise ApplyError(f"{tools.save} is not understood", str(error), "vipd tries again") from None
    for table in left_out_tables(saved):
        asked = [chain for chain in {**dict.fromkeys(chains), **jumps} if chain.table == table]
        if len(asked) > MAX_CHAINS:
            why = f"another program has put a rule into table {table} that only nft can show"
            raise ApplyError(f"{tools.save} does not show all rules", why, "look: nft list ruleset")
        for chain in asked:
            rules = await read_chain(tools, names, chain, jumps.get(chain, ()), run)
            if rules is not None:
                (installed.chains if names.owns(chain) else installed.builtins)[chain] = rules
    return installed


async def read_chain(tools: Tools, names: Names, chain: ChainId, jumps: Rules, run: Runner) -> Rules | None:
    """One chain's rules; None if it does not exist. For a built-in one that iptables cannot show, those
    of `jumps` that it contains, and UNREADABLE. Raises ApplyError."""
    try:
        return await list_chain(tools, chain, run)
    except IncompatibleError:
        if names.owns(chain):
            return UNREADABLE
        present = [jump for jump in jumps if await has_rule(tools, chain, shlex.split(jump), run)]
        return (*present, *UNREADABLE)


async def read_called(
    tools: Tools,
    names: Names,
    rules: Rules,
    run: Runner,
    *,
    but: Callable[[str], bool] = lambda target: False,
) -> ForeignChains:
    """Other programs' chains of the table filter to which rules jump, and those to which these jump, at most
    MAX_CHAINS.

    `but`: targets that are not followed. Raises ApplyError.
    """
    chains: dict[str, Rules] = {}
    waiting = [target_of(rule) for rule in rules]
    while waiting and len(chains) < MAX_CHAINS:
        target = waiting.pop()
        chain = ChainId("filter", target)
        if target in chains or names.owns(chain) or not may_be_chain(target) or but(target):
            continue
        try:
            found = await list_chain(tools, chain, run)
        except IncompatibleError:
            found = UNREADABLE
        if found is not None:
            chains[target] = found
            waiting += map(target_of, found)
    return chains
