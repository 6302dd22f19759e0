"""Reads what an explanation needs of a host: rules of other programs, and routes. Changes nothing."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Collection, Mapping
from functools import partial
from socket import if_indextoname

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.iptables.saved_rules import left_out_tables
from vipd.dataplane.iptables.tools import find_tools, has_legacy_tables, save
from vipd.dataplane.nftables.options import table_name
from vipd.dataplane.nftables.reader import TableReader
from vipd.host.process import ProgramTimeoutError, Runner
from vipd.host.process import run as run_program
from vipd.model.service import Family
from vipd.observe.explain.host_rules import HostState

VARIANTS = ("nft", "legacy")
MAX_TABLES = 64
MAX_TEXT = 8 * 2**20
"""Bytes of rules that a program may print; iptables has some 3,000 services in so many."""
PROGRAM_SECONDS = 10.0
READ_SECONDS = 5.0
MAX_ADDRESSES = 256
"""Addresses whose routes are looked up."""


BOUNDED_RUN: Runner = partial(run_program, timeout=PROGRAM_SECONDS, max_output=MAX_TEXT)


async def read_host(
    family: Family, prefix: str, addresses: Collection[str], run: Runner = BOUNDED_RUN
) -> HostState:
    """The rules of all programs in one family, and the routes to these addresses. What cannot be read is
    named in `unread` or `faults`. `prefix`: that of vipd's own chains and table."""
    faults, unread = list[str](), list[str]()
    iptables = await _iptables(family, run, unread)
    tables = await _tables(prefix, _shown(family, iptables), run, unread)
    devices: dict[str, str] = {}
    wanted = list(dict.fromkeys(addresses))
    if len(wanted) > MAX_ADDRESSES:
        faults.append(f"routes to {len(wanted) - MAX_ADDRESSES} more addresses")
    try:
        devices = await devices_to(wanted[:MAX_ADDRESSES])
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
        except (OSError, ProgramTimeoutError) as error:
            unread.append(f"the {family} rules of iptables ({variant}): {error}")
        else:
            found[variant] = text
    return found


def _shown(family: Family, iptables: Mapping[str, str]) -> set[str]:
    """The tables of nf_tables that iptables has shown, as `ip nat`; it leaves out what only nft can show."""
    text, word = iptables.get("nft", ""), "ip" if family is Family.IPV4 else "ip6"
    shown = {line[1:].strip() for line in text.splitlines() if line.startswith("*")}
    return {f"{word} {name}" for name in shown - set(left_out_tables(text))}


async def _tables(prefix: str, shown: Collection[str], run: Runner, unread: list[str]) -> dict[str, str]:
    """The other tables, but for those that iptables has shown."""
    found: dict[str, str] = {}
    try:
        chains = await asyncio.to_thread(_base_chain_tables)
    except ApplyError as error:
        unread.append(f"{error.what}: {error.why}")
        return found
    own = table_name(prefix)
    others = [
        (family, name)
        for family, name in chains
        if name != own and not name.startswith(f"{own}-") and f"{family} {name}" not in shown
    ]
    for family, name in others[:MAX_TABLES]:
        if family in ("bridge", "netdev"):
            found[f"{family} {name}"] = ""
            continue
        try:
            printed = await run(["nft", "-n", "list", "table", family, name], "")
        except (OSError, ProgramTimeoutError) as error:
            unread.append(f"table {family} {name}: {error}")
            continue
        if printed.exit_code:
            why = " ".join(printed.stderr.split()) or f"exit code {printed.exit_code}"
            unread.append(f"table {family} {name}: {why}")
        else:
            found[f"{family} {name}"] = printed.stdout
    if len(others) > MAX_TABLES:
        unread.append(f"{len(others) - MAX_TABLES} more tables of nft")
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
