"""Answers on every address of its namespace with the address and port that it was reached at.

    answerer.py tcp/8080 udp/10.244.0.5:53      TCP on all addresses, UDP on one
Prints READY once all is bound; ends when its standard input closes. An answer is `10.244.0.5:53 PEER:PORT`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import cast

from tests.lab.server import EVERYWHERE, Datagrams, Lines, bound, socket_text


class AddressAnswers(Lines):
    """A connection whose answers name the address that it came to."""

    def __init__(self) -> None:
        super().__init__("")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Learn that address."""
        self._name = socket_text(cast("asyncio.Transport", transport).get_extra_info("sockname"))
        super().connection_made(transport)


async def serve(places: list[str]) -> None:
    """Bind all places, say READY, and serve until standard input closes."""
    loop = asyncio.get_running_loop()
    for place in places:
        protocol, _, where = place.partition("/")
        if protocol == "tcp":
            for family, address in EVERYWHERE:
                listener = bound(family, address, int(where), socket.SOCK_STREAM, 0)
                await loop.create_server(AddressAnswers, sock=listener, backlog=4096)
        else:
            address, _, port = where.rpartition(":")
            family = socket.AF_INET6 if "[" in address else socket.AF_INET
            receiver = bound(family, address.strip("[]"), int(port), socket.SOCK_DGRAM, 0)
            await loop.create_datagram_endpoint(lambda name=where: Datagrams(name), sock=receiver)  # type: ignore[misc]  # a default binds the loop's value
    print("READY", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
