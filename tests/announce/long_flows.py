"""Many TCP connections that stay open: both of their ends.

Stand-alone program, standard library only.

    long_flows.py serve PORT                     prints READY; ends when standard input closes
    long_flows.py open ADDRESS PORT SOURCE...    opens COUNT connections from these sources, prints READY,
                                                 then for each line of standard input, a number of seconds,
                                                 asks on every connection, and prints how many answered

A third of the connections is idle, on a third the client sends a line each 0.3 s, which the server returns,
and on a third the server sends a line each 0.3 s.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import sys

KINDS = ("idle", "client", "server")
PAUSE_SECONDS = 0.3
COUNT = 1000
CONNECT_SECONDS = 10


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The server's end: returns each line; on connections of the kind `server` it also speaks by itself."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        kind = (await reader.readline()).decode().strip()
        writer.write(b"hello\n")
        speaking = asyncio.create_task(speak(writer)) if kind == "server" else None
        try:
            while line := await reader.readline():
                writer.write(line)
                await writer.drain()
        finally:
            if speaking:
                speaking.cancel()
    writer.close()


async def speak(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"tick\n")
        await asyncio.sleep(PAUSE_SECONDS)


class Connection:
    def __init__(self, kind: str) -> None:
        self.kind, self.failure = kind, ""
        self._seen = asyncio.Event()
        self._wanted = b""
        self._lines = 0
        self._writer: asyncio.StreamWriter

    async def open(self, address: str, port: int, source: str) -> None:
        opening = asyncio.open_connection(address, port, local_addr=(source, 0))
        reader, self._writer = await asyncio.wait_for(opening, CONNECT_SECONDS)
        self._writer.write(f"{self.kind}\n".encode())
        await asyncio.wait_for(reader.readline(), CONNECT_SECONDS)
        self._tasks = [asyncio.create_task(self._read(reader))]
        if self.kind == "client":
            self._tasks.append(asyncio.create_task(speak(self._writer)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._lines += 1
                if line == self._wanted:
                    self._seen.set()
            self.failure = "closed"
        except OSError as error:
            self.failure = type(error).__name__

    async def ask(self, number: int, seconds: float) -> str:
        """Wait for a line where lines should come by themselves, then exchange one; returns what failed, or
        `only when asked` if no line came before."""
        lines, end = self._lines, asyncio.get_running_loop().time() + seconds
        silent = False
        while self.kind != "idle" and self._lines == lines and not self.failure and not silent:
            await asyncio.sleep(0.05)
            silent = asyncio.get_running_loop().time() > end
        self._seen.clear()
        self._wanted = f"question {number}\n".encode()
        self._writer.write(self._wanted)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._seen.wait(), seconds)
            return "only when asked" if silent else ""
        return self.failure or "no answer"


async def serve(port: int) -> None:
    await asyncio.start_server(answer, "0.0.0.0", port, backlog=COUNT)
    print("READY", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def ask_all(address: str, port: int, sources: list[str]) -> None:
    connections = [Connection(KINDS[number % len(KINDS)]) for number in range(COUNT)]
    gate = asyncio.Semaphore(50)

    async def open_one(number: int, connection: Connection) -> None:
        async with gate:
            await connection.open(address, port, sources[number % len(sources)])

    await asyncio.gather(*(open_one(number, each) for number, each in enumerate(connections)))
    print("READY", flush=True)
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        number += 1
        outcomes = await asyncio.gather(*(each.ask(number, float(line)) for each in connections))
        told: dict[str, dict[str, int]] = {}
        for kind in KINDS:
            found = collections.Counter(
                o for c, o in zip(connections, outcomes, strict=True) if c.kind == kind
            )
            told[kind] = {outcome or "alive": count for outcome, count in found.items()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve(int(sys.argv[2])))
    else:
        asyncio.run(ask_all(sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
