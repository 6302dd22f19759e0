"""The bystander's programs: a backend that fails when it is told to, and an administrator's HTTP client.

Stand-alone, standard library only.

    neighbour.py backend NAME                  greets on 8080 with its name; a line such as `close 9101` or
                                               `open 9101` on its standard input is about a port for checks
    neighbour.py pace                          prints, some times a second, by how much others who use the
                                               processors slow it down
    neighbour.py admin SOCKET UID GID GROUP    sends a request to a UNIX socket for each line of JSON, as that
                                               user, and prints the answer
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import sys
import time

GREETING_PORT = 8080
BACKENDS = 12
"""Each fails for itself: one that failed often would be held down."""
TCP_PORTS, HTTP_PORTS = range(9100, 9100 + BACKENDS), range(9200, 9200 + BACKENDS)
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def _backend(name: str) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{name}\n".encode())
        writer.close()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(4096)
            writer.write(_OK)
        writer.close()

    handlers = {GREETING_PORT: greet, **dict.fromkeys(TCP_PORTS, accept), **dict.fromkeys(HTTP_PORTS, answer)}

    async def start(port: int) -> asyncio.Server:
        return await asyncio.start_server(handlers[port], "0.0.0.0", port, backlog=1024)

    servers = {port: await start(port) for port in handlers}
    loop = asyncio.get_running_loop()
    print("READY", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        word, port = line.split()
        if word == "close":
            servers.pop(int(port)).close()
        else:
            servers[int(port)] = await start(int(port))
        print("DONE", flush=True)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("vipd", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _pace() -> None:
    print("READY", flush=True)
    while True:
        began, until = time.perf_counter(), time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        print((time.perf_counter() - began) / 0.01, flush=True)
        time.sleep(0.15)


def _admin(path: str, uid: int, gid: int, group: int) -> None:
    os.setgroups([group])
    os.setgid(gid)
    os.setuid(uid)
    print("READY", flush=True)
    for line in sys.stdin:
        method, target, body = json.loads(line)
        connection = _UnixConnection(path)
        try:
            connection.request(method, target, json.dumps(body))
            answer = connection.getresponse()
            print(json.dumps([answer.status, answer.read(2000).decode()]), flush=True)
        except OSError as error:
            print(json.dumps([0, str(error)]), flush=True)
        finally:
            connection.close()


if __name__ == "__main__":
    if sys.argv[1] == "backend":
        asyncio.run(_backend(sys.argv[2]))
    elif sys.argv[1] == "pace":
        with contextlib.suppress(BrokenPipeError):
            _pace()
    else:
        _admin(sys.argv[2], *map(int, sys.argv[3:6]))
