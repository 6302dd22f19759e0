"""The rules of both iptables variants, and nft's chains at the hook forward. Nothing is made by reading."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.fast_path.table import fast_path_table
from vipd.dataplane.forward_accept.accepts import accepts_translated, is_ours, rules_of
from vipd.dataplane.iptables.saved_rules import MalformedRulesError, left_out_tables
from vipd.dataplane.iptables.tools import find_tools, save
from vipd.dataplane.nftables.options import table_name
from vipd.dataplane.nftables.reader import BaseChain, TableReader
from vipd.dataplane.nftables.saved_table import read_objects
from vipd.host.process import ProgramTimeoutError, Runner
from vipd.model.service import Family
from vipd.observe.doctor.rules import NftForward, Ruleset

VARIANTS = ("nft", "legacy")
IPTABLES_CHAINS = ("FORWARD",)
"""iptables-nft's names for its own base chains at the hook forward."""
TABLES = frozenset({"raw", "mangle", "nat", "filter", "security"})
LEGACY = {Family.IPV4: "net/ip_tables_names", Family.IPV6: "net/ip6_tables_names"}
_UNREADABLE = (OSError, ProgramTimeoutError, ValueError, KeyError, TypeError, AttributeError)
FAMILIES = {"ip": Family.IPV4, "ip6": Family.IPV6}


async def read_rulesets(
    proc: Path, run: Runner, written: Callable[[], Awaitable[Collection[str]]]
) -> tuple[tuple[Ruleset, ...], str]:
    """The rules of each variant for each family, and why some could not be read.

    `written` returns the tables of iptables that the kernel has in nf_tables, or raises ApplyError. It is
    called only if the program that would show them is missing: they stay when that is uninstalled.
    """
    found, faults = [], []
    for variant in VARIANTS:
        for family in Family:
            try:
                if variant == "legacy" and not _has_legacy_tables(family, proc):
                    continue
                tools = await find_tools(family, variant, run)
                saved = await save(tools, run)
                if hidden := left_out_tables(saved):
                    faults.append(f"{tools.save} cannot show the tables {', '.join(hidden)}")
                found.append(Ruleset.of(family, variant, saved))
            except ApplyError as error:
                # A variant that is not installed has no rules, unless the kernel has its tables.
                absent = variant == "nft" and isinstance(error, MissingProgramError)
                if not absent or await _is_written(family, written, faults):
                    faults.append(f"{error.what}: {error.why}")
            except (OSError, MalformedRulesError) as error:
                faults.append(f"the {family} rules of iptables ({variant}): {error}")
    return tuple(found), "; ".join(dict.fromkeys(faults))


async def _is_written(
    family: Family, written: Callable[[], Awaitable[Collection[str]]], faults: list[str]
) -> bool:
    try:
        return any(FAMILIES[table.partition(" ")[0]] is family for table in await written())
    except ApplyError as error:
        faults.append(f"{error.what}: {error.why}")
        return False


async def tables_of_iptables() -> frozenset[str]:
    """Tables in nf_tables that iptables would use, as `ip nat`; read from the kernel, without a program.

    Raises ApplyError.
    """
    try:
        chains = await asyncio.to_thread(_base_chains)
    except ApplyError as error:
        if "modprobe" in error.hint:
            return frozenset()  # a kernel without nf_tables has no rules there
        raise
    return frozenset(f"{c.family} {c.table}" for c in chains if c.family in FAMILIES and c.table in TABLES)


def _base_chains() -> list[BaseChain]:
    reader = TableReader(None)
    with reader:
        return reader.base_chains()


def _has_legacy_tables(family: Family, proc: Path) -> bool:
    """Raises OSError if that is unknown."""
    try:
        return bool((proc / LEGACY[family]).read_text().strip())
    except FileNotFoundError:
        return False


async def read_flowtables(run: Runner) -> tuple[str, ...]:
    """nft's flowtables to which a rule adds flows. Raises one of _UNREADABLE."""
    found = [item["flowtable"] for item in await _nft(["list", "flowtables"], run) if "flowtable" in item]
    names: dict[str, None] = {}
    for family, table in {(each["family"], each["table"]) for each in found}:
        for item in await _nft(["list", "table", family, table], run):
            for expression in item.get("rule", {}).get("expr", ()):
                if "flow" in expression:
                    names[f"{family} {table} {str(expression['flow']['flowtable']).lstrip('@')}"] = None
    return tuple(sorted(names))


async def read_nft(prefix: str, run: Runner) -> tuple[tuple[NftForward, ...], frozenset[Family], str]:
    """nft's chains at the hook forward but iptables' and vipd's, the families for which there is a table of
    vipd's, and why something of this could not be read."""
    own_table = table_name(prefix)
    own = {own_table, fast_path_table(prefix).split()[1]}
    try:
        listed = await _nft(["list", "chains"], run)
        places = {(item["chain"]["family"], item["chain"]["table"]) for item in listed if "chain" in item}
        foreign = [item["chain"] for item in listed if "chain" in item and _matters(item["chain"], own)]
    except _UNREADABLE as error:
        return (), frozenset(), _error_text(error)
    families = frozenset(family for name, family in FAMILIES.items() if (name, own_table) in places)
    found, faults = [], []
    for chain in foreign:
        try:
            drops = chain.get("policy") == "drop" and not await _lets_pass(chain, prefix, run)
            found.append(NftForward(chain["family"], chain["table"], chain["name"], drops))
        except _UNREADABLE as error:
            faults.append(f"table {chain['family']} {chain['table']}: {_error_text(error)}")
    return tuple(found), families, "; ".join(dict.fromkeys(faults))


async def _lets_pass(chain: Mapping[str, Any], prefix: str, run: Runner) -> bool:
    """Whether vipd's accept is in a chain, or the rule that is advised instead. Raises one of _UNREADABLE."""
    listed = await _nft(["list", "table", chain["family"], chain["table"]], run)
    return any(is_ours(rule, prefix) or accepts_translated(rule) for rule in rules_of(listed, chain["name"]))


async def _nft(words: list[str], run: Runner) -> list[Mapping[str, Any]]:
    """The objects that nft prints. Raises one of _UNREADABLE."""
    said = await run(["nft", "-j", *words], "")
    if said.exit_code:
        raise ValueError(" ".join(said.stderr.split()) or f"nft: exit code {said.exit_code}")
    return read_objects(said.stdout)


def _error_text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "nft is needed to list them"
    if isinstance(error, OSError | ProgramTimeoutError):
        return str(error)
    return f"what nft prints is not understood: {type(error).__name__}: {error}"


def _matters(chain: Mapping[str, Any], own: Collection[str]) -> bool:
    return chain.get("hook") == "forward" and not _known(chain, own)


def _known(chain: Mapping[str, Any], own: Collection[str]) -> bool:
    iptables = chain["family"] in ("ip", "ip6") and chain["name"] in IPTABLES_CHAINS
    return iptables or chain["table"] in own or chain["family"] not in ("inet", "ip", "ip6")
