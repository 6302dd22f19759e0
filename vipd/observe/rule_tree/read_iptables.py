"""Reads the rules of both iptables variants, with counters. It only reads, and takes no lock.

iptables-save of a large table is slow: with 10,000 services the nft variant takes some ten seconds of
CPU, the legacy one half a second. So of a large table only the chains of the requested services are read, one
by one, some milliseconds each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.iptables.descriptions import Role, RuleParser
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.saved_rules import (
    MalformedRulesError,
    SavedRule,
    SavedTables,
    listed_rule,
    read_tables,
)
from vipd.dataplane.iptables.tools import Tools, find_tools, has_legacy_tables, list_chain, save
from vipd.dataplane.nftables import codec
from vipd.dataplane.nftables.reader import TableReader
from vipd.host.process import Runner
from vipd.model.service import Family
from vipd.observe.rule_tree.dispatch import SHARED
from vipd.observe.rule_tree.iptables_tree import IptablesRules

VARIANTS = ("nft", "legacy")
LARGE_CHAIN_COUNT = 3000
"""Chains above which a table of the nft variant is not read whole for one service."""
MAX_CONCURRENT = 4
"""Programs that run at the same time."""


@dataclass(frozen=True, slots=True)
class Search:
    """The requested rules: those that lead on from these addresses or node ports, and these chains."""

    addresses: frozenset[str] = frozenset()
    service_ports: frozenset[str] = frozenset()
    chains: frozenset[str] = frozenset()


async def read_rules(
    prefix: str, search: Search | None, run: Runner, warn: Callable[[str], None]
) -> list[IptablesRules]:
    """The rules with a prefix in each variant and family that has any. Raises ApplyError, also for output
    that is not understood.

    Without `search` everything is read, else of large tables at least the searched part. `warn` is called
    if that will take long.
    """
    found = []
    for variant in VARIANTS:
        for family in Family:
            if variant == "legacy" and not has_legacy_tables(family):
                continue
            if (tools := await _tools(family, variant, run)) is None:
                continue  # a variant that is not installed has no rules
            large = not tools.legacy and await _is_large(family)
            if search is not None and large:
                tables = await _ChainReader(tools, prefix, search, run).read()
            else:
                if large:
                    warn(f"reading every {family} rule of a large table, which takes a while")
                tables = await _saved(tools, run)
            if rules := IptablesRules(tables, prefix, family, tools.version_text):
                found.append(rules)
    return found


async def _tools(family: Family, variant: str, run: Runner) -> Tools | None:
    try:
        return await find_tools(family, variant, run)
    except MissingProgramError:
        return None


async def _saved(tools: Tools, run: Runner) -> SavedTables:
    try:
        return read_tables(await save(tools, run, counters=True))
    except MalformedRulesError as error:
        raise ApplyError(f"what {tools.save} prints cannot be read", str(error)) from None


async def _is_large(family: Family) -> bool:
    try:
        return await asyncio.to_thread(_chains_of, family) > LARGE_CHAIN_COUNT
    except ApplyError:
        return False


def _chains_of(family: Family) -> int:
    reader = _ChainCounter(family)
    with reader:
        return reader.chains()


class _ChainCounter(TableReader):
    """Counts chains."""

    def chains(self) -> int:
        """Those of iptables' tables, and of all others of the family."""
        return len(self._messages(codec.GET_CHAIN))


class _ChainReader:
    """Reads single chains of one family, following the jumps that are searched for."""

    def __init__(self, tools: Tools, prefix: str, search: Search, run: Runner) -> None:
        self._tools, self._names, self._parser = tools, Names(prefix), RuleParser(prefix)
        self._search, self._run = search, run

    async def read(self) -> SavedTables:
        """The shared chains, and the chains that they and the searched ones lead to."""
        roots = [ChainId(table, f"{self._names.prefix}-{kind}") for table, kind in SHARED]
        named = [ChainId(table, name) for name in sorted(self._search.chains) for table in ("nat", "filter")]
        todo = list(dict.fromkeys((*roots, *(chain for chain in named if self._names.owns(chain)))))
        seen, chains = set(todo), dict[ChainId, tuple[SavedRule, ...]]()
        while todo:
            now, todo = todo[:MAX_CONCURRENT], todo[MAX_CONCURRENT:]
            for chain, rules in zip(now, await asyncio.gather(*map(self._list, now)), strict=True):
                if rules is None:
                    continue
                chains[chain] = rules
                new = dict.fromkeys(c for c in self._jump_targets(chain, rules) if c not in seen)
                seen.update(new)
                todo += new
        return SavedTables(chains, {})

    def _jump_targets(self, chain: ChainId, rules: Iterable[SavedRule]) -> Iterator[ChainId]:
        shared = self._names.is_fixed(chain) or self._parser.kind_of(chain.name) == "GRP"
        for rule in rules:
            target = ChainId(chain.table, rule.target)
            leads_on = self._names.owns(target) and not self._names.is_fixed(target)
            if leads_on and (not shared or self._is_wanted(chain, rule)):
                yield target

    def _is_wanted(self, chain: ChainId, rule: SavedRule) -> bool:
        parsed = self._parser.parse(chain, rule.text)
        if parsed is None:
            return False
        if parsed.role is Role.GROUP:
            network = ip_network(parsed.parts["network"])
            return any(ip_address(address) in network for address in self._search.addresses)
        named = parsed.service_port in self._search.service_ports
        return named or parsed.parts.get("address", "") in self._search.addresses

    async def _list(self, chain: ChainId) -> tuple[SavedRule, ...] | None:
        """One chain's rules with their counters; None if there is no such chain. Raises ApplyError."""
        listed = await list_chain(self._tools, chain, self._run, counters=True)
        if listed is None:
            return None
        return tuple(listed_rule(text)._replace(number=number) for number, text in enumerate(listed, 1))
