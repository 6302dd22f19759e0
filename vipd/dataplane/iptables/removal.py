"""Removing every rule of a chain prefix, whoever wrote it and with whichever iptables variant.

Needs no daemon, settings or store: our chains are known by their names alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from vipd.dataplane.base import MissingProgramError
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.plan import Batches, Plan, make_plan
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.dataplane.iptables.saved import read_saved
from vipd.dataplane.iptables.tools import Tools, find_tools, restore, save
from vipd.dataplane.programs import finish
from vipd.model import Family
from vipd.process import Runner

VARIANTS = ("nft", "legacy")


@dataclass(frozen=True, slots=True)
class Leftover:
    """Rules of ours that one iptables variant holds, and the plan that removes them."""

    tools: Tools
    family: Family
    plan: Plan


async def find_leftovers(prefixes: Iterable[str], run: Runner) -> list[Leftover]:
    """Rules under these prefixes in both families, of both variants. Raises ApplyError."""
    found = []
    for variant in VARIANTS:
        for family in Family:
            try:
                tools = await find_tools(family, variant, run)
            except MissingProgramError:
                continue  # it has written nothing
            text = await save(tools, run)
            for prefix in prefixes:
                if plan := removal_plan(text, Names(prefix), family, tools):
                    found.append(Leftover(tools, family, plan))
    return found


async def remove(leftovers: Iterable[Leftover], run: Runner) -> None:
    """Run the plans. Raises ApplyError."""
    for leftover in leftovers:
        for text in leftover.plan.restores:
            await restore(leftover.tools, text, run)


async def remove_empty_tables(
    tables: Iterable[str], run: Runner, *, foretold: Collection[str] | None = None
) -> list[str]:
    """Delete nft tables (`FAMILY TABLE`) that vipd's first write made, if nobody else put a rule in since.

    Without the nft program they stay: empty base chains that do nothing. Returns those deleted. Given the
    chain prefixes that are still to be removed, deletes nothing: returns those that will be empty then.
    Raises ApplyError.
    """
    deleted: list[str] = []
    for name in tables:
        family, table = name.split()
        kind = "ip" if family == str(Family.IPV4) else "ip6"
        try:
            listed = await finish(["nft", "list", "table", kind, table], "", run)
        except MissingProgramError:
            return deleted
        if listed.code != 0 or not _only_empty_base_chains(listed.output, foretold or ()):
            continue
        if foretold is None and (await finish(["nft", "delete", "table", kind, table], "", run)).code:
            continue
        deleted.append(f"{kind} {table}")
    return deleted


def removal_plan(saved: str, names: Names, family: Family, tools: Tools) -> Plan:
    """What removes everything of ours, by what iptables-save has printed."""
    installed = read_saved(saved, names)
    wanted = Ruleset(RuleOptions(family, names.prefix)).whole(installed.chains)
    return make_plan(wanted, installed, names, Batches.of(legacy=tools.legacy))


def _only_empty_base_chains(listing: str, ignored: Collection[str]) -> bool:
    """Whether a listed table holds nothing but built-in chains that accept everything.

    `ignored` are prefixes of chains that do not count, nor the jumps to them.
    """
    own = tuple(f"{prefix}-" for prefix in ignored)
    chains, bodies, chain = 0, [], ""
    for line in listing.splitlines():
        if line.startswith("\tchain "):
            chain = line.split()[1]
            chains += not chain.startswith(own)
        elif line.startswith("\t\t") and not (chain.startswith(own) or line.split()[-1].startswith(own)):
            bodies.append(line.strip())
    return len(bodies) == chains and all(
        body.startswith("type ") and body.endswith("policy accept;") for body in bodies
    )
