"""Removes every rule of a chain prefix, whoever wrote it and with whichever iptables variant.

Needs no daemon, settings or store: vipd's chains are identified by their names alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from vipd.dataplane.base import MissingProgramError
from vipd.dataplane.iptables.digest import text_of
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.plan import Installed, Plan, make_plan
from vipd.dataplane.iptables.restore_text import Batches
from vipd.dataplane.iptables.ruleset import DesiredChains, Ruleset
from vipd.dataplane.iptables.saved_rules import read_saved
from vipd.dataplane.iptables.tools import Tools, find_tools, restore, save
from vipd.dataplane.iptables.words import target_of
from vipd.dataplane.nftables.saved_table import read_chains
from vipd.dataplane.programs import finish
from vipd.host.process import Runner
from vipd.model.service import Family

VARIANTS = ("nft", "legacy")

_NO_CHAIN = re.compile(r"^\t(?!chain |\}|\t)", re.MULTILINE)
"""Content of a listed table besides chains: sets, maps, flags."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """vipd's rules in one iptables variant, and the plan that removes them."""

    tools: Tools
    family: Family
    plan: Plan


async def find_leftovers(
    prefixes: Iterable[str],
    run: Runner,
    kept: Collection[tuple[Family, str]] = (),
    *,
    has_legacy: Callable[[Family], bool] = lambda family: True,
) -> list[Leftover]:
    """Rules under these prefixes in both families, of both variants. Raises ApplyError.

    If `kept` names a family and variant, the accept of translated flows in FORWARD is not included there.
    Legacy tables are read only where `has_legacy` is true for their family.
    """
    found = []
    for variant in VARIANTS:
        for family in Family:
            if variant == "legacy" and not has_legacy(family):
                continue
            try:
                tools = await find_tools(family, variant, run)
            except MissingProgramError:
                continue  # it has written nothing
            text = await save(tools, run)
            for prefix in prefixes:
                accept = (family, variant) in kept
                if plan := removal_plan(text, Names(prefix), family, tools, accept=accept):
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
    """Delete nft tables (`FAMILY TABLE`) that vipd's first write created, if they have no other rules.

    Without the nft program they stay: empty base chains without effect. Returns those deleted. Given the
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
        if listed.exit_code != 0 or not _only_empty_base_chains(listed.stdout, foretold or ()):
            continue
        if foretold is None and (await finish(["nft", "delete", "table", kind, table], "", run)).exit_code:
            continue
        deleted.append(f"{kind} {table}")
    return deleted


def removal_plan(saved: str, names: Names, family: Family, tools: Tools, *, accept: bool) -> Plan:
    """The plan that removes all of vipd's rules, by the output of iptables-save; `accept`: except the chain
    that accepts translated flows, which belongs to no dataplane."""
    installed = read_saved(saved, names)
    wanted = Ruleset(RuleOptions(family, names.prefix)).whole(installed.chains)
    wanted = _but_the_accept(wanted, installed, names) if accept else wanted
    return make_plan(wanted, installed, names, Batches.of(legacy=tools.legacy))


def _but_the_accept(wanted: DesiredChains, installed: Installed, names: Names) -> DesiredChains:
    """Without the end of the chain that accepts translated flows, and of the jumps to it."""
    chain, builtin = ChainId("filter", names.fixed("FORWARD")), ChainId("filter", "FORWARD")
    if chain not in installed.chains:
        return wanted
    jumps = tuple(rule for rule in installed.builtins.get(builtin, ()) if target_of(rule) == chain.name)
    return replace(
        wanted,
        shared={chain: text_of(installed.chains[chain])},
        jumps={builtin: jumps},
        obsolete=wanted.obsolete - {chain},
    )


def _only_empty_base_chains(listing: str, ignored: Collection[str]) -> bool:
    """Whether a listed table contains only built-in chains that accept everything.

    `ignored` are prefixes of chains that do not count, nor do jumps to them.
    """
    own = tuple(f"{prefix}-" for prefix in ignored)
    if _NO_CHAIN.search(listing):
        return False
    chains = [chain for name, chain in read_chains(listing).items() if not name.startswith(own)]
    return all(
        chain.hook.endswith("policy accept;")
        and all(rule.text.split()[-1].startswith(own) for rule in chain.rules)
        for chain in chains
    )
