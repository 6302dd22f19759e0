"""Reads what an explanation needs of a host: rules of other programs, and routes. Changes nothing."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Collection
from socket import if_indextoname

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.iptables.tools import find_tools, has_legacy_tables, save
from vipd.dataplane.nftables.options import table_name
from vipd.dataplane.nftables.reader import TableReader
from vipd.host.process import ProgramTimeoutError, Runner
from vipd.model.service import Family
from vipd.observe.explain.host_rules import HostState

VARIANTS = ("nft", "legacy")
TABLES_OF_IPTABLES = frozenset({"raw", "mangle", "nat", "filter", "security"})
MAX_TABLES = 64
MAX_TEXT = 8 * 2**20
"""Bytes of rules of one program; with more only a part of them would be read in time."""
READ_SECONDS = 5.0
MAX_ADDRESSES = 256
"""Addresses whose routes are looked up."""


async def read_host(family: Family, prefix: str, addresses: Collection[str], run: Runner) -> HostState:
    """The rules of all programs in one family, and the routes to these addresses. What cannot be read is
    named in `faults`. `prefix`: that of vipd's own chains and table."""
    faults, unread = list[str](), list[str]()
    iptables = await _iptables(family, run, unread)
    tables = await _tables(prefix, run, faults)
    devices: dict[str, str] = {}
    try:
        devices = await devices_to(list(dict.fromkeys(addresses))[:MAX_ADDRESSES])
    except OSError as error:
        faults.append(f"routes: {error}")
    return HostState(iptables, tables, devices, tuple(unread), tuple(faults))


async def _iptables(family: Family, run: Runner, unread: list[str]) -> dict[str, str]:
    found = {}
    for variant in VARIANTS:
        if variant == "legacy" and not has_legacy_tables(family):
            continue
        try:
            text = await save(await find_tools(family, variant, run), run)
        except MissingProgramError:
            if variant == "legacy":  # it has tables, and nothing shows them
                unread.append(f"the {family} rules of iptables ({variant}): the program is missing")
            continue
        except ApplyError as error:
            unread.append(f"{error.what}: {error.why}")
            continue
        if len(text) > MAX_TEXT:
            unread.append(f"the {family} rules of iptables ({variant}): there are too many")
        else:
            found[variant] = text
    return found


async def _tables(prefix: str, run: Runner, faults: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        chains = await asyncio.to_thread(_base_chain_tables)
    except ApplyError as error:
        faults.append(f"{error.what}: {error.why}")
        return found
    own = table_name(prefix)
    others = [
        (family, name)
        for family, name in chains
        if name != own
        and not name.startswith(f"{own}-")
        and not (family in ("ip", "ip6") and name in TABLES_OF_IPTABLES)
    ]
    for family, name in others[:MAX_TABLES]:
        if family in ("bridge", "netdev"):
            found[f"{family} {name}"] = ""
            continue
        try:
            printed = await run(["nft", "-n", "list", "table", family, name], "")
        except (OSError, ProgramTimeoutError) as error:
            faults.append(f"table {family} {name}: {error}")
            continue
        if printed.exit_code or len(printed.stdout) > MAX_TEXT:
            why = " ".join(printed.stderr.split()) or "it has too many rules"
            faults.append(f"table {family} {name}: {why}")
        else:
            found[f"{family} {name}"] = printed.stdout
    if len(others) > MAX_TABLES:
        faults.append(f"{len(others) - MAX_TABLES} more tables of nft")
    return found


def _base_chain_tables() -> list[tuple[str, str]]:
    with TableReader(None) as reader:
        return list(dict.fromkeys((chain.family, chain.table) for chain in reader.base_chains()))


async def devices_to(addresses: Collection[str]) -> dict[str, str]:
    """By address: the name of the interface by which packets to it leave; empty where there is no route.
    Raises OSError."""
    # Imported on use, in a thread, as in `control.host`.
    await asyncio.to_thread(importlib.import_module, "pyroute2")
    from pyroute2 import AsyncIPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    found = {}
    async with asyncio.timeout(READ_SECONDS), AsyncIPRoute() as netlink:
        for address in addresses:
            try:
                (route,) = await netlink.route("get", dst=address)
                found[address] = if_indextoname(route.get("oif"))
            except (NetlinkError, ValueError, TypeError, OSError):
                found[address] = ""
    return found
