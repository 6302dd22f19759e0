"""Reading one family's rules from the kernel: all of them, or single chains.

Where another program has put a rule there that only nft can show, iptables-nft-save leaves out the whole
table, and says so in a comment alone. Our own chains can be listed all the same, and of the built-in ones it
can be asked whether they hold our jumps. To take such a table for an empty one would add the jumps again at
each reading.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Collection, Mapping

from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import TABLES, ChainId, Names, Rules
from vipd.dataplane.iptables.plan import Installed
from vipd.dataplane.iptables.saved_rules import left_out_tables, read_saved
from vipd.dataplane.iptables.tools import IncompatibleError, Tools, has_rule, list_chain
from vipd.host.process import Runner

MOST_CHAINS = 64
"""Chains above which a table that iptables-save does not show is not read one by one: a process for each."""
UNREADABLE: Rules = ("(unreadable)",)
"""Stands for the rules of a chain of ours that iptables cannot show. Equal to none that are wanted."""


def absent_tables(saved: str) -> list[str]:
    """The tables that do not exist, by what iptables-save has printed."""
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
    """What iptables-save printed, and what it left out of these chains and jumps. Raises ApplyError."""
    try:
        # In a thread: of a large table it takes seconds.
        installed = await asyncio.to_thread(read_saved, saved, names)
    except (ValueError, IndexError) as error:
        raise ApplyError(f"{tools.save} is not understood", str(error), "vipd tries again") from None
    for table in left_out_tables(saved):
        asked = [chain for chain in {**dict.fromkeys(chains), **jumps} if chain.table == table]
        if len(asked) > MOST_CHAINS:
            why = f"another program has put a rule into table {table} that only nft can show"
            raise ApplyError(f"{tools.save} does not show all rules", why, "look: nft list ruleset")
        for chain in asked:
            rules = await read_chain(tools, names, chain, jumps.get(chain, ()), run)
            if rules is not None:
                (installed.chains if names.owns(chain) else installed.builtins)[chain] = rules
    return installed


async def read_chain(tools: Tools, names: Names, chain: ChainId, jumps: Rules, run: Runner) -> Rules | None:
    """One chain's rules; None when there is no such chain. Of a built-in one that iptables cannot show, those
    of `jumps` that it holds. Raises ApplyError."""
    try:
        return await list_chain(tools, chain, run)
    except IncompatibleError:
        if names.owns(chain):
            return UNREADABLE
        return tuple([jump for jump in jumps if await has_rule(tools, chain, shlex.split(jump), run)])
