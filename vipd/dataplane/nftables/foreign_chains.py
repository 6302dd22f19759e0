"""Finds chains in tables of other programs that drop or bypass the table's flows on this host."""

from __future__ import annotations

import asyncio

from vipd.dataplane.nftables.reader import BaseChain, TableReader
from vipd.host.netlink_socket import OpenSocket, open_netlink

INPUT = 1


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


def _read(open_socket: OpenSocket) -> list[BaseChain]:
    with TableReader(None, open_socket=open_socket) as reader:
        return reader.base_chains()
