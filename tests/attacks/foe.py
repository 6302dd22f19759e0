"""The attackers' programs: hostile servers and clients. Stand-alone, standard library only.

    foe.py backend                          servers that answer in many bad ways, see `PORTS`
    foe.py tls CERTIFICATE KEY              a server whose handshakes cost the client much
    foe.py names ADDRESS-FILE               a name server: `calm.internal` has the address in the file
    foe.py requests JSON                    clients of an HTTP server, see `Requests`
    foe.py listen FIRST LAST                listens on these ports
    foe.py rewrite FILE PER-SECOND A B      a file that changes so often, between the texts of two files

Each prints READY once it works, and has the lowest priority: who gets the processors is not what is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import socket
import ssl
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

PORTS = {
    "flapping": 7001,
    "a byte a second": 7002,
    "endless body": 7003,
    "endless head": 7004,
    "large body": 7005,
    "new weights": 7006,
    "udp flood": 7007,
    "dns flood": 7008,
    "tls": 7009,
    "silent": 7010,
    "good": 7011,
}
"""The ports of the hostile backend; `silent` takes connections and datagrams and answers none."""
NAME_PORT = 53
OWN_ADDRESSES = ("10.10.0.1", "10.244.0.1", "192.0.2.2")
"""The host's, which a name leads to."""
_HEAD = b"HTTP/1.1 200 OK\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def _quiet(handler: Handler) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await handler(reader, writer)
        writer.transport.abort()

    return handle


def _answering(parts: Callable[[], Iterable[bytes]], pause: float = 0.0) -> Handler:
    """Sends these parts after a request, with a pause after each, and leaves the rest to the client."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        for part in parts():
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)

    return handle


async def _large_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(_HEAD + b"Content-Length: 65536\r\n\r\n" + b"ab" * 32768)
    await writer.drain()
    await reader.read()


async def _silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


_NO = b"HTTP/1.1 503 No\r\n"
_EMPTY = b"Content-Length: 0\r\nConnection: close\r\n\r\n"
_HANDLERS: dict[str, Handler] = {
    "a byte a second": _answering(lambda: (bytes([b]) for b in chain(_HEAD, repeat(65))), pause=1),
    "endless body": _answering(
        lambda: chain([_HEAD, b"Content-Length: 99999999999\r\n\r\n"], repeat(b"a" * 65536))
    ),
    "endless head": _answering(lambda: chain([_HEAD], repeat(b"X-Header: " + b"a" * 1000 + b"\r\n"))),
    "new weights": _answering(
        lambda: [_HEAD + f"X-Vipd-Weight: {random.randint(1, 60000)}\r\n".encode() + _EMPTY]
    ),
    "good": _answering(lambda: [_HEAD + _EMPTY]),
    # Connections fail for a second, and are answered well for the next.
    "flapping": _answering(lambda: [(_HEAD if int(time.monotonic()) % 2 else _NO) + _EMPTY]),
    "large body": _large_body,
    "silent": _silent,
}


class _Flood(asyncio.DatagramProtocol):
    """Each datagram is answered by thousands."""

    def __init__(self, dns: bool = False) -> None:
        self._dns = dns

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if self._dns:
            answer = _dns_answer(data, 2000)[:60000]
            self._transport.sendto(answer, addr)
            return
        for _ in range(2000):
            self._transport.sendto(b"x" * 1400, addr)


class _Silence(asyncio.DatagramProtocol):
    pass


async def _tls(certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    await asyncio.start_server(_quiet(_HANDLERS["good"]), "0.0.0.0", PORTS["tls"], backlog=4096, ssl=context)
    await _until_end()


async def _backend() -> None:
    for name, handler in _HANDLERS.items():
        await asyncio.start_server(_quiet(handler), "0.0.0.0", PORTS[name], backlog=4096)
    loop = asyncio.get_running_loop()
    for name, protocol in (("udp flood", _Flood()), ("dns flood", _Flood(True)), ("silent", _Silence())):
        await loop.create_datagram_endpoint(lambda p=protocol: p, local_addr=("0.0.0.0", PORTS[name]))  # type: ignore[misc]
    await _until_end()


def _name_of(question: bytes) -> tuple[str, int, int]:
    """The name, its type, and where the question ends."""
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode(errors="replace"))
        at += question[at] + 1
    return ".".join(labels).lower(), struct.unpack_from(">H", question, at + 1)[0], at + 5


def _dns_answer(question: bytes, records: int, addresses: tuple[str, ...] = ()) -> bytes:
    """An answer with these addresses and so many others."""
    _, _, end = _name_of(question)
    packed = [socket.inet_aton(address) for address in addresses]
    packed += [struct.pack(">I", 0x0A640000 + n) for n in range(records)]
    record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4)
    records_of_name = b"".join(record + address for address in packed)
    head = question[:2] + struct.pack(">HHHHH", 0x8580, 1, len(packed), 0, 0)
    return head + question[12:end] + records_of_name


def _answer(question: bytes, address_file: Path, over_tcp: bool) -> bytes | None:
    """What the name server says; None: nothing."""
    name, kind, end = _name_of(question)
    empty = question[:2] + struct.pack(">HHHHH", 0x8580, 1, 0, 0, 0) + question[12:end]
    if name.startswith("silent"):
        return None
    if kind != 1:
        return empty
    if name.startswith("huge"):
        if over_tcp:
            return _dns_answer(question, 4000)[:65000]
        return question[:2] + struct.pack(">HHHHH", 0x8780, 1, 0, 0, 0) + question[12:end]
    addresses: tuple[str, ...] = ("10.244.0.12",)
    if name == "calm.internal":
        addresses = (address_file.read_text().strip(),)
    elif name.startswith("own"):
        addresses = OWN_ADDRESSES
    elif name.startswith("restless"):
        addresses = (f"10.244.0.{random.randrange(20, 250)}",)
    return _dns_answer(question, 0, addresses)


async def _names(address_file: Path) -> None:
    class Server(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._transport: Any = transport

        def datagram_received(self, data: bytes, addr: Any) -> None:
            if (answer := _answer(data, address_file, False)) is not None:
                self._transport.sendto(answer, addr)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (size,) = struct.unpack(">H", await reader.readexactly(2))
        answer = _answer(await reader.readexactly(size), address_file, True)
        if answer is None:
            await reader.read()
            return
        writer.write(struct.pack(">H", len(answer)) + answer)
        await writer.drain()
        await reader.read()

    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(Server, local_addr=("0.0.0.0", NAME_PORT))
    await asyncio.start_server(_quiet(serve), "0.0.0.0", NAME_PORT)
    await _until_end()


@dataclass(frozen=True)
class Requests:
    """Clients of an HTTP server, each of which asks again and again."""

    to: str
    request: str
    """What is sent, `\\n` for the ends of lines."""
    connections: int = 60
    read: str = "all"
    """`all` of the answer; `nothing`: it is left in the socket; `slowly`."""
    body: str = ""
    """A file that is sent as the body."""
    body_seconds: float = 0.0
    """Time over which the body is sent, a piece a second; 0: at once."""
    sources: tuple[str, ...] = ()
    uid: int = 0
    gids: tuple[int, ...] = ()
    pause: float = 0.0


async def _request(wanted: Requests, number: int, body: bytes) -> None:
    if "/" in wanted.to:
        reader, writer = await asyncio.open_unix_connection(wanted.to)
    else:
        host, _, port = wanted.to.rpartition(":")
        source = wanted.sources[number % len(wanted.sources)] if wanted.sources else None
        local = (source, 0) if source else None
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=local)
    try:
        head = wanted.request.replace("\n", "\r\n")
        if body:
            head += f"Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode())
        step = max(1, int(len(body) / wanted.body_seconds)) if wanted.body_seconds else len(body) or 1
        for at in range(0, len(body), step):
            writer.write(body[at : at + step])
            await writer.drain()
            if wanted.body_seconds:
                await asyncio.sleep(1)
        if wanted.read == "nothing":
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(3600)
        while await reader.read(1000 if wanted.read == "slowly" else 1 << 20):
            if wanted.read == "slowly":
                await asyncio.sleep(1)
    finally:
        writer.transport.abort()


async def _requests(wanted: Requests, body: bytes) -> None:
    if wanted.uid:
        os.setgroups(wanted.gids)
        os.setgid(wanted.gids[0])
        os.setuid(wanted.uid)

    async def client(number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                await _request(wanted, number, body)
            await asyncio.sleep(wanted.pause or 0.02)

    async with asyncio.TaskGroup() as clients:
        for number in range(wanted.connections):
            clients.create_task(client(number))
        await _until_end()
        os._exit(0)


async def _listen(first: int, last: int) -> None:
    os.setgid(65534)
    os.setuid(65534)
    for port in range(first, last + 1):
        await asyncio.start_server(_quiet(_silent), "0.0.0.0", port)
    await _until_end()


async def _rewrite(file: Path, per_second: float, texts: tuple[str, ...]) -> None:
    new = file.with_name(f".{file.name}.new")

    async def write() -> None:
        for text in cycle(texts):
            shutil.copy(text, new)
            os.rename(new, file)  # noqa: PTH104 (nothing else runs here)
            await asyncio.sleep(1 / per_second)

    writing = asyncio.create_task(write())
    await _until_end()
    writing.cancel()


async def _until_end() -> None:
    print("READY", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def _main(work: str, *words: str) -> None:
    os.nice(19)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    match work:
        case "backend":
            asyncio.run(_backend())
        case "tls":
            asyncio.run(_tls(*words))
        case "names":
            asyncio.run(_names(Path(words[0])))
        case "requests":
            wanted = Requests(**json.loads(words[0]))
            asyncio.run(_requests(wanted, Path(wanted.body).read_bytes() if wanted.body else b""))
        case "listen":
            asyncio.run(_listen(int(words[0]), int(words[1])))
        case "rewrite":
            asyncio.run(_rewrite(Path(words[0]), float(words[1]), words[2:]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
