"""Finds and deletes vipd's accepts in foreign tables. Needs no daemon, settings or store.

Their comments, which begin with the chain prefix, identify them. In FORWARD of iptables the accept is a chain
of that prefix, which vipd.dataplane.iptables.removal deletes with all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from vipd.dataplane.base import MissingProgramError
from vipd.dataplane.forward_accept.accepts import AcceptOptions, ForwardChainState
from vipd.dataplane.forward_accept.driver import write
from vipd.dataplane.forward_accept.reading import ForwardReader
from vipd.host.netlink_socket import OpenSocket, open_netlink
from vipd.host.process import Runner


async def find_leftovers(
    prefixes: Iterable[str], recorded: Collection[str], run: Runner, open_socket: OpenSocket = open_netlink
) -> list[ForwardChainState]:
    """Foreign chains that contain rules of these prefixes. Raises ApplyError.

    Without nft this fails only if there are `recorded` ones.
    """
    found: list[ForwardChainState] = []
    for prefix in prefixes:
        reader = ForwardReader(AcceptOptions(prefix, 0, 0), run, open_socket, Path("/proc"))
        try:
            found += [each for each in await reader.read_native() if each.present]
        except MissingProgramError:
            if recorded:
                raise
    return found


async def remove(leftovers: Iterable[ForwardChainState], run: Runner) -> None:
    """Delete these rules. Raises ApplyError."""
    for each in leftovers:
        await write(each.forward_chain, each.delete_text, run)
