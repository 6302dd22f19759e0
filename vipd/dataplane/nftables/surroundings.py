"""What stands in the way of the table's flows on this host, in tables of others that vipd does not touch."""

from __future__ import annotations

import asyncio

from vipd.dataplane.nftables.reading import BaseChain, OpenSocket, TableReader, open_netlink

INPUT, FORWARD = 1, 2


async def dropping_chains(open_socket: OpenSocket = open_netlink) -> tuple[BaseChain, ...]:
    """Base chains of INPUT and FORWARD that drop what none of their rules accepts. Raises ApplyError.

    An accept in one table does not keep another from dropping, so that a table of our own cannot help there
    as vipd's iptables rules do. Chains of iptables-legacy are not seen.
    """
    chains = await asyncio.to_thread(_read, open_socket)
    return tuple(chain for chain in chains if chain.hook in (INPUT, FORWARD) and not chain.accepts)


def warnings(chains: tuple[BaseChain, ...], flow_mark: int, health_ports: bool) -> tuple[str, ...]:
    """What to tell of these chains: who needs to accept what. `health_ports`: some service has one."""
    mark = f"{flow_mark:#x}"
    found = []
    for chain in chains:
        where = f"chain {chain.name} of table {chain.family} {chain.table}"
        rule = f"nft insert rule {chain.family} {chain.table} {chain.name}"
        if chain.hook == FORWARD:
            accept = f"{rule} ct mark '&' {mark} == {mark} ct status dnat accept"
            found.append(
                f"{where} drops by policy, translated flows too if no rule accepts them; hint: {accept}"
            )
        elif health_ports:
            found.append(
                f"{where} drops by policy, questions to health ports too; hint: accept these ports there"
            )
    return tuple(found)


def _read(open_socket: OpenSocket) -> list[BaseChain]:
    with TableReader(None, open_socket=open_socket) as reader:
        return reader.base_chains()
