"""Reads other programs' chains of the forward hook, from the kernel and both iptables variants."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vipd.dataplane.base import ApplyError
from vipd.dataplane.forward_accept.accepts import (
    FORWARD,
    NFT_FAMILIES,
    OTHER_TABLES,
    AcceptOptions,
    ForwardChain,
    ForwardChainState,
    found_by_nft,
    found_in_iptables,
    found_in_other_table,
)
from vipd.dataplane.iptables.foreign_rules import UFW_USER_INPUT, isolates, refusals_of, refuses
from vipd.dataplane.iptables.jump_order import JumpNeighbours
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.reading import read_called
from vipd.dataplane.iptables.saved_rules import listed_rules
from vipd.dataplane.iptables.tools import (
    LOCK_WAIT_SECONDS,
    Tools,
    find_tools,
    has_legacy_tables,
    list_chain,
)
from vipd.dataplane.nftables.reader import DORMANT, OWNED, BaseChain, TableReader
from vipd.dataplane.nftables.saved_table import MalformedListingError, read_objects
from vipd.dataplane.programs import finish
from vipd.host.netlink_socket import OpenSocket
from vipd.host.process import ProgramResult, Runner
from vipd.model.service import Family

HOOK = 2
"""The forward hook of ip, ip6 and inet."""
_ATTEMPTS = 3
"""How often a reading is started that a concurrent change disturbs."""
_OWNER = "another process owns this table, and nobody else may change it; hint: accept `ct status dnat` there"


@dataclass(frozen=True, slots=True)
class NftChain:
    """A base chain at the forward hook, and the flags of its table."""

    chain: BaseChain
    flags: int


class ForwardReader:
    """Reads those chains in the network namespace in which `run` runs programs."""

    def __init__(self, options: AcceptOptions, run: Runner, open_socket: OpenSocket, proc: Path) -> None:
        self._options, self._run, self._open, self._proc = options, run, open_socket, proc
        self._names = Names(options.prefix)
        self._chain = self._names.fixed(FORWARD)
        self._jump_neighbours: dict[ForwardChain, JumpNeighbours] = {}

    async def read(self, managed: Collection[ForwardChain]) -> tuple[ForwardChainState, ...]:
        """Every chain; `managed`: those in which the dataplane in use writes its own accept. Raises
        ApplyError."""
        for attempt in range(_ATTEMPTS):
            try:
                return await self._read(managed)
            except ApplyError:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def read_legacy(self, managed: Collection[ForwardChain]) -> tuple[ForwardChainState, ...]:
        """Those of iptables-legacy, of which the kernel gives no events. Raises ApplyError."""
        places = [
            ForwardChain.of_iptables(family, "legacy", table)
            for family in Family
            for table in ("filter", *OTHER_TABLES)
            if has_legacy_tables(family, self._proc, table)
        ]
        found = [replace(await self._iptables(p), managed=p in managed) for p in places if p.writable]
        return (*found, *[await self._other_table(place) for place in places if not place.writable])

    async def read_native(self) -> tuple[ForwardChainState, ...]:
        """Those that nft writes, or has written into. Raises ApplyError."""
        found = []
        for each in await asyncio.to_thread(self._chains):
            place = ForwardChain(each.chain.family, each.chain.table, each.chain.name)
            try:
                found.append(await self._native(place, each))
            except ApplyError:
                if not is_of_iptables(*each.chain[:3]):
                    raise
        return tuple(found)

    def forget(self, place: ForwardChain) -> None:
        """vipd's accept is gone because it is not needed: the next one is a new one."""
        self._jump_neighbours.pop(place, None)

    async def _read(self, managed: Collection[ForwardChain]) -> tuple[ForwardChainState, ...]:
        found = list(await self.read_legacy(managed))
        for each in await asyncio.to_thread(self._chains):
            chain = each.chain
            place = ForwardChain(chain.family, chain.table, chain.name)
            if is_of_iptables(chain.family, chain.table, chain.name):
                place = replace(place, variant="nft")
                if chain.table == "filter":
                    found.append(replace(await self._iptables(place, chain), managed=place in managed))
                elif not (place.writable or chain.accepts):
                    found.append(await self._other_table(place))
            else:
                found.append(await self._native(place, each))
        return tuple(found)

    def _chains(self) -> list[NftChain]:
        try:
            with TableReader(None, open_socket=self._open) as reader:
                flags, chains = reader.table_flags(), reader.base_chains()
        except ApplyError as error:
            if "modprobe" in error.hint:
                return []  # this kernel has no nf_tables
            raise
        families = {*NFT_FAMILIES.values(), "inet"}
        here = [c for c in chains if c.hook == HOOK and c.family in families]
        found = [NftChain(chain, flags.get((chain.family, chain.table), 0)) for chain in here]
        return [each for each in found if not each.flags & DORMANT]

    async def _native(self, place: ForwardChain, each: NftChain) -> ForwardChainState:
        words = ["nft", "-t", "-j", "list", "table", place.family, place.table]
        policy = "accept" if each.chain.accepts else "drop"
        listed = _objects(await finish(words, "", self._run), place)
        try:
            found = found_by_nft(place, policy, listed, self._options)
        except (LookupError, TypeError, AttributeError):
            raise ApplyError(f"{place} cannot be read", "what nft prints is not understood") from None
        return replace(found, obstacle=_OWNER) if each.flags & OWNED else found

    async def _iptables(self, place: ForwardChain, chain: BaseChain | None = None) -> ForwardChainState:
        try:
            tools = await tools_of(place, self._run)
        except ApplyError as error:
            drops = chain is not None and not chain.accepts
            why = f"it is to be written by {place.program}, which is not here; hint: apt install iptables"
            return ForwardChainState(place, drops, obstacle=f"{why} ({error.why})")
        said = await self._list(tools, FORWARD)
        if "incompatible" in said.stderr and chain is not None:
            # It already has rules of nft, which iptables cannot read; another one does no harm.
            return await self._native(replace(place, variant=""), NftChain(chain, 0))
        if said.exit_code:
            raise ApplyError(f"{place} cannot be read", " ".join(said.stderr.split()))
        own = await self._list(tools, self._chain)
        if own.exit_code not in (0, 1):  # 1: there is no such chain
            raise ApplyError(f"{place} cannot be read", " ".join(own.stderr.split()))
        rules = None if own.exit_code else listed_rules(own.stdout, self._chain)
        forward = listed_rules(said.stdout, FORWARD)
        called = await read_called(tools, self._names, forward, self._run, but=isolates)
        neighbours = self._jump_neighbours.setdefault(place, {})
        found = found_in_iptables(place, said.stdout, rules, self._options, called, neighbours)
        denying = UFW_USER_INPUT[place.family == "ip6"]
        if not any(name.startswith(("ufw-", "ufw6-")) for name in called):
            return found
        denied = await list_chain(tools, ChainId("filter", denying), self._run) or ()
        denials = tuple(each for rule in denied for each in refusals_of(rule, denying, {}) if refuses(rule))
        return replace(found, denials=denials, called=found.called | {denying})

    async def _other_table(self, place: ForwardChain) -> ForwardChainState:
        """It is only reported, so an unreadable one is no fault."""
        try:
            said = await self._list(await tools_of(place, self._run), FORWARD, place.table)
        except ApplyError:
            return ForwardChainState(place, drops=False)
        return found_in_other_table(place, said.stdout)

    async def _list(self, tools: Tools, chain: str, table: str = "filter") -> ProgramResult:
        program = tools.save.removesuffix("-save")
        argv = [program, "-w", str(LOCK_WAIT_SECONDS), "-t", table, "-S", chain]
        return await finish(argv, "", self._run)


async def tools_of(place: ForwardChain, run: Runner) -> Tools:
    """The programs that write an iptables variant's FORWARD. Raises ApplyError."""
    family = Family.IPV4 if place.family == "ip" else Family.IPV6
    try:
        return await find_tools(family, place.variant, run)
    except ApplyError:
        tools = await find_tools(family, "auto", run)  # some hosts have one variant, without its second name
        if tools.legacy is not (place.variant == "legacy"):
            raise
        return tools


def is_of_iptables(family: str, table: str, chain: str) -> bool:
    """Whether iptables-nft writes a chain, by the names that it uses."""
    return family in NFT_FAMILIES.values() and chain == FORWARD and table in ("filter", *OTHER_TABLES)


def _objects(said: ProgramResult, place: ForwardChain) -> list[Mapping[str, Any]]:
    why = " ".join(said.stderr.split()) or "what nft prints is not understood"
    try:
        if said.exit_code == 0:
            return read_objects(said.stdout)
    except MalformedListingError as error:
        why = str(error)
    raise ApplyError(f"{place} cannot be read", why)
