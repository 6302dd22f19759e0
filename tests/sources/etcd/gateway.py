"""A server in the place of etcd's gateway: it says what a test wants, or what a real one says but altered."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

Json = object

REPLACEMENTS: tuple[Json, ...] = (
    None,
    [],
    {},
    "",
    "x",
    "\u00ff\n",
    "/w==",
    True,
    -1,
    0,
    1.5,
    2**70,
    "9" * 30,
    ["ID"],
    {"a": [{}]},
)

BODIES: tuple[bytes, ...] = (
    b"",
    b"null",
    b'["ID"]',
    b"7",
    b"{",
    b'{"header"',
    b"\xff\xfe\x00",
    b'{"header": "\xff"}',
    b"[" * 100_000,
    b'{"result":' * 100_000,
    b'{"result": {"header": ' + b"9" * 10_000 + b"}}",
    b"<html>it works</html>",
    b"{}",
    b'{"result": null}',
    b'{"error": null}',
    b'{"error": ["x"], "code": "x"}',
    b'{"error": {"grpc_code": {}, "message": 7}}',
)
"""In the place of a whole answer."""


def broken(answer: Json) -> Iterator[tuple[str, Json]]:
    """Every way to take one field of an answer away, or to replace it; each with its name."""
    for path in _paths(answer):
        gone = copy.deepcopy(answer)
        holder = _at(gone, path[:-1])
        del holder[path[-1]]
        yield f"without {path}", gone
        for value in REPLACEMENTS:
            other = copy.deepcopy(answer)
            _at(other, path[:-1])[path[-1]] = value
            yield f"{path} = {value!r}", other


def bodies(answer: bytes) -> Iterator[tuple[str, bytes]]:
    """Every broken form of an answer as it comes."""
    yield from ((f"body {body[:20]!r}", body) for body in BODIES)
    for name, value in broken(json.loads(answer)):
        yield name, json.dumps(value).encode()


def _paths(value: Json, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*at, key)
        yield from _paths(inner, (*at, key))


def _at(value: object, path: tuple[str | int, ...]) -> dict[str | int, Json]:
    for key in path:
        value = value[key]  # type: ignore[index]
    return value  # type: ignore[return-value]


class Gateway:
    """Its answers by path: what it is told to say, else what the real server says, `altered`."""

    def __init__(self, real: str = "") -> None:
        self.real = real
        self.url = ""
        self.says: dict[str, bytes] = {}
        self.status: dict[str, int] = {}
        self.altered: Callable[[str, bytes], bytes] = lambda path, line: line
        """Called with each answer, and with each line of a watch."""
        self.authorization: dict[str, str] = {}
        """The token that the last request to a path carried."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.authorization[request.path] = request.headers.get("Authorization", "")
        said = self.says.get(request.path)
        if said is not None:
            return web.Response(body=said, status=self.status.get(request.path, 200))
        response = web.StreamResponse()
        with contextlib.suppress(aiohttp.ClientError):  # its client has gone
            await self._passed_on(request, response)
        return response

    async def _passed_on(self, request: web.Request, response: web.StreamResponse) -> None:
        async with aiohttp.ClientSession() as session:
            data = await request.read()
            headers = {k: v for k, v in request.headers.items() if k == "Authorization"}
            async with session.request(
                request.method, self.real + request.path, data=data, headers=headers
            ) as got:
                response.set_status(got.status)
                await response.prepare(request)
                async for line in got.content:
                    await response.write(self.altered(request.path, line))


@asynccontextmanager
async def gateway(real: str = "") -> AsyncIterator[Gateway]:
    """One on a free port, before a real server or none."""
    made = Gateway(real)
    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{any:.*}", made.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()
