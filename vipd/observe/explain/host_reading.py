"""Reads what an explanation needs of a host: rules of other programs, and routes. Changes nothing."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Collection
from functools import partial
from socket import if_indextoname

from vipd.dataplane.base import ApplyError, MissingProgramError
from vipd.dataplane.iptables.saved_rules import left_out_tables, partly_shown_tables, without_tables
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
    tables = dict[str, str]()
    try:
        in_kernel, with_sets = await asyncio.to_thread(_kernel_tables)
    except ApplyError as error:
        unread.append(f"{error.what}: {error.why}")
    else:
        word = "ip" if family is Family.IPV4 else "ip6"
        if "nft" in iptables:
            iptables["nft"] = _fully_shown(iptables["nft"], {t for f, t in with_sets if f == word})
        lines = iptables.get("nft", "").splitlines()
        shown = {f"{word} {line[1:]}" for line in lines if line.startswith("*")}
        tables = await _tables(prefix, [t for t in in_kernel if " ".join(t) not in shown], run, unread)
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


def _fully_shown(text: str, with_sets: Collection[str]) -> str:
    """The tables of which iptables-nft-save has shown all; nft shows the others.

    Version 1.8.9 prints a rule that looks up a set as if it did not, so that `tcp dport @ports drop` is
    `-p tcp -j DROP`; iptables itself makes no sets.
    """
    return without_tables(text, {*left_out_tables(text), *partly_shown_tables(text), *with_sets})


async def _tables(
    prefix: str, in_kernel: Collection[tuple[str, str]], run: Runner, unread: list[str]
) -> dict[str, str]:
    """The text of these tables, each a family and a name, but for vipd's own."""
    found: dict[str, str] = {}
    own = table_name(prefix)
    others = [(family, name) for family, name in in_kernel if name != own and not name.startswith(f"{own}-")]
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


def _kernel_tables() -> tuple[list[tuple[str, str]], set[tuple[str, str]]]:
    """The family and the name of every table that packets enter, and of every table with sets."""
    with TableReader(None) as reader:
        chains = reader.base_chains()
        return list(dict.fromkeys((c.family, c.table) for c in chains)), reader.tables_with_sets()


async def devices_to(addresses: Collection[str]) -> dict[str, str]:
    """By address: the name of the interface by which packets to it leave; empty where there is no route.
    Raises OSError."""
    # Imported on use, in a thread, as in `host.vip_routes`.
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
