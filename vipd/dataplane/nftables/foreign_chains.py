"""Finds chains of other programs that drop or bypass the table's flows on this host, or that stand in the way
of iptables."""

from __future__ import annotations

import asyncio

from vipd.dataplane.base import ApplyError
from vipd.dataplane.nftables.reader import BaseChain, TableReader
from vipd.host.netlink_socket import OpenSocket, open_netlink
from vipd.model.service import Family

INPUT = 1

_OF_IPTABLES = {
    ("nat", "PREROUTING"): (0, -100),
    ("nat", "INPUT"): (1, 100),
    ("nat", "OUTPUT"): (3, -100),
    ("nat", "POSTROUTING"): (4, 100),
    ("filter", "INPUT"): (1, 0),
    ("filter", "FORWARD"): (2, 0),
    ("filter", "OUTPUT"): (3, 0),
}
"""Number of the hook, and priority, of each chain that iptables-nft makes in its own tables. It cannot use a
chain of that name that has others: CHAIN_ADD failed."""


async def dropping_chains(open_socket: OpenSocket = open_netlink) -> tuple[BaseChain, ...]:
    """Base chains of INPUT that drop all packets that none of their rules accepts. Raises ApplyError.

    An accept in one table does not keep another from dropping, so vipd's table cannot help there
    as its iptables rules do. Chains of iptables-legacy are not read. For the forward hook see
    `vipd.dataplane.forward_accept`.
    """
    chains = await asyncio.to_thread(_read, open_socket)
    return tuple(chain for chain in chains if chain.hook == INPUT and not chain.accepts)


def warnings(chains: tuple[BaseChain, ...], health_ports: bool) -> tuple[str, ...]:
    """The warning about these chains. `health_ports`: some service has one."""
    return tuple(
        f"chain {chain.name} of table {chain.family} {chain.table} drops by policy, "
        "questions to health ports too; hint: accept these ports there"
        for chain in chains
        if health_ports
    )


def in_iptables_way(family: Family, prefix: str, open_socket: OpenSocket = open_netlink) -> str:
    """The hint at chains in iptables' tables that are not iptables' own; empty if there are none. Blocks."""
    kind = "ip" if family is Family.IPV4 else "ip6"
    for table in ("nat", "filter"):
        try:
            with TableReader(family, table, open_socket) as reader:
                chains = reader.structure().chains
        except ApplyError:
            continue
        for name, found in sorted(chains.items()):
            wanted = _OF_IPTABLES.get((table, name))
            if wanted is not None and found.hook != wanted:
                where = (
                    f"priority {found.hook[1]} in place of {wanted[1]}" if found.hook else "it has no hook"
                )
            elif found.hook and name.startswith(f"{prefix}-"):
                where = "it has a hook"
            else:
                continue
            return (
                f"chain {name} of table {kind} {table} is another program's, not iptables' ({where}): "
                f"rename it, or set dataplane: nftables; look: nft list table {kind} {table}"
            )
    return ""


def _read(open_socket: OpenSocket) -> list[BaseChain]:
    with TableReader(None, open_socket=open_socket) as reader:
        return reader.base_chains()
