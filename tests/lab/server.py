"""A backend: answers every line or datagram with its name and the peer that it sees.

Stand-alone program, standard library only. Prints READY once every port is bound; ends when its standard
input closes, so that it never outlives whoever started it.

    server.py --name b1 --tcp 8080 --udp 8080     answers "b1 10.10.0.2:40000"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from typing import Any, cast

IPPROTO_SCTP = 132
EVERYWHERE = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))


def socket_text(peer: Any) -> str:
    """`10.0.0.1:80` or `[fd00::1]:80` for a peer as the socket module gives it."""
    return f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"


def bound(family: int, address: str, port: int, kind: int, protocol: int) -> socket.socket:
    """A bound socket; IPv6 ones take IPv6 only, so that both families can share a port."""
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind((address, port))
    made.setblocking(False)
    return made


class Lines(asyncio.Protocol):
    def __init__(self, name: str) -> None:
        self._name = name
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._answer = f"{self._name} {socket_text(self._transport.get_extra_info('peername'))}\n".encode()

    def data_received(self, data: bytes) -> None:
        *lines, self._held = (self._held + data).split(b"\n")
        self._transport.write(self._answer * len(lines))


class Datagrams(asyncio.DatagramProtocol):
    def __init__(self, name: str) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Some Python releases hand over a datagram transport that is no asyncio.DatagramTransport.
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._transport.sendto(f"{self._name} {socket_text(addr)}\n".encode(), addr)


async def serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    for family, address in EVERYWHERE:
        for port in arguments.tcp:
            listener = bound(family, address, port, socket.SOCK_STREAM, 0)
            await loop.create_server(lambda: Lines(arguments.name), sock=listener, backlog=4096)
        for port in arguments.sctp:
            listener = bound(family, address, port, socket.SOCK_STREAM, IPPROTO_SCTP)
            await loop.create_server(lambda: Lines(arguments.name), sock=listener, backlog=128)
        for port in arguments.udp:
            receiver = bound(family, address, port, socket.SOCK_DGRAM, 0)
            await loop.create_datagram_endpoint(lambda: Datagrams(arguments.name), sock=receiver)
    print("READY", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer lines and datagrams with a name and the peer seen.")
    parser.add_argument("--name", required=True)
    for protocol in ("tcp", "udp", "sctp"):
        parser.add_argument(f"--{protocol}", type=int, nargs="*", default=[], metavar="PORT")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
