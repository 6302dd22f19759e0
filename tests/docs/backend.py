"""A backend as users have them: a web server on TCP port 8080 and a name server on UDP port 53.

Stand-alone program, standard library only. Prints READY once both are bound; ends when its standard input
closes, so that it never outlives whoever started it.

    backend.py b1 192.0.2.11      answers HTTP with "b1 answers CLIENT", every name with 192.0.2.11
"""

from __future__ import annotations

import asyncio
import ipaddress
import struct
import sys
from typing import cast

HEADER = 12
"""Bytes of a DNS message's header (RFC 1035, 4.1.1)."""
ANSWER = 0x8180
"""Flags of an answer without error."""
POINTER_TO_NAME = 0xC000 | HEADER
A_RECORD, INTERNET, SECONDS = 1, 1, 60


class NameServer(asyncio.DatagramProtocol):
    """Answers every question with one address."""

    def __init__(self, address: str) -> None:
        self._address = ipaddress.IPv4Address(address).packed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember through which socket to answer."""
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """Copy the question and add the address."""
        end = data.index(0, HEADER) + 5
        head = data[:2] + struct.pack("!5H", ANSWER, 1, 1, 0, 0)
        record = struct.pack("!3HIH", POINTER_TO_NAME, A_RECORD, INTERNET, SECONDS, 4) + self._address
        self._transport.sendto(head + data[HEADER:end] + record, addr)


async def answer(name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One HTTP request, and its answer."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        body = f"{name} answers {writer.get_extra_info('peername')[0]}\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def serve(name: str, address: str) -> None:
    """Bind both ports, say READY, and serve until standard input closes."""
    loop = asyncio.get_running_loop()
    await asyncio.start_server(lambda r, w: answer(name, r, w), "0.0.0.0", 8080)
    await loop.create_datagram_endpoint(lambda: NameServer(address), local_addr=("0.0.0.0", 53))
    print("READY", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
