"""Removes the tables of some chain prefixes. Needs no daemon, settings or store: name and comment identify
them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from vipd.dataplane.base import ApplyError
from vipd.dataplane.nftables.base_chains import ENTRANCES
from vipd.dataplane.nftables.layout import COMMENT_START
from vipd.dataplane.nftables.options import TableOptions, table_name
from vipd.dataplane.nftables.reader import Structure, TableReader
from vipd.dataplane.nftables.tools import apply_transaction
from vipd.host.netlink_socket import OpenSocket, open_netlink
from vipd.host.process import Runner
from vipd.model.service import Family


@dataclass(frozen=True, slots=True)
class Leftover:
    """A table of vipd's in the kernel."""

    table: str
    """As nft commands name it: `ip vipd`."""
    chains: int
    holders: int
    """Maps and sets."""
    entrances: tuple[str, ...] = ()
    """The chains in which packets enter it."""

    def __str__(self) -> str:
        return f"table {self.table}: {self.chains} chains, {self.holders} maps and sets"


async def find_leftovers(prefixes: Iterable[str], open_socket: OpenSocket = open_netlink) -> list[Leftover]:
    """Tables of these prefixes in both families. Empty if the kernel has no nf_tables."""
    found = []
    for prefix in prefixes:
        for family in Family:
            try:
                there = await asyncio.to_thread(_look, family, table_name(prefix), open_socket)
            except ApplyError as error:
                if "modprobe" in error.hint:
                    continue
                raise
            # A table of that name with another comment belongs to another program.
            if there.comment is not None and there.comment.startswith(COMMENT_START):
                table = TableOptions(family, prefix).table
                entrances = tuple(name for name in ENTRANCES if name in there.chains)
                found.append(Leftover(table, len(there.chains), len(there.sets), entrances))
    return found


async def remove(leftovers: Iterable[Leftover], run: Runner) -> None:
    """Delete these tables. Raises ApplyError.

    Their entrances go first. Deleting a table empties its maps, but not its sets: a packet in it would be
    refused as one for an unused port, though another dataplane already serves it.
    """
    for leftover in leftovers:
        closed = "".join(f"flush chain {leftover.table} {name}\n" for name in leftover.entrances)
        try:
            if closed:
                await apply_transaction(closed, run)
            await apply_transaction(f"delete table {leftover.table}\n", run)
        except ApplyError as error:
            what = f"table {leftover.table} cannot be deleted"
            raise ApplyError(what, f"{error.what}: {error.why}", error.hint) from None


def _look(family: Family, table: str, open_socket: OpenSocket) -> Structure:
    with TableReader(family, table, open_socket) as reader:
        return reader.structure()
