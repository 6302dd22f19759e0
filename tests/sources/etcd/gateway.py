"""A server in the place of etcd's gateway: it says what a test wants, or what a real one says but altered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from tests.sources.etcd.relay import beside


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


@contextmanager
def gateway(real: str = "") -> Iterator[Gateway]:
    """One on a free port, before a real server or none, in a thread of its own."""
    made = Gateway(real)
    with beside() as run:
        runner = run(_started(made))
        try:
            yield made
        finally:
            run(runner.cleanup())


async def _started(made: Gateway) -> web.AppRunner:
    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{any:.*}", made.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner
