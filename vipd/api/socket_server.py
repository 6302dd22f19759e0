"""Serves the API's application on its UNIX socket, within limits by user."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler

from vipd.api.messages import API_VERSION
from vipd.api.peers import credentials_of
from vipd.api.server import HTTP_STATUS
from vipd.host.connections.connections import Connections
from vipd.host.connections.http import SERVER_OPTIONS
from vipd.host.connections.limits import ClientSource, ConnectionLimits
from vipd.host.descriptors import raise_limit

LIMITS = ConnectionLimits(
    connections=256, per_client=64, head_seconds=30.0, body_seconds=60.0, send_seconds=30.0, privileged=64
)
STOP_SECONDS = 5.0
"""Time for requests in progress when vipd stops."""


@contextlib.asynccontextmanager
async def serving(
    app: web.Application, listener: socket.socket, limits: ConnectionLimits = LIMITS
) -> AsyncIterator[Connections]:
    """Answers on a listening UNIX socket, which is closed in the end."""
    connections = Connections(limits.within(raise_limit().clients), _source_of, _refusal)

    @web.middleware
    async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await connections.answer(request, partial(handler, request))

    app.middlewares.insert(0, limited)
    runner = web.AppRunner(app, shutdown_timeout=STOP_SECONDS, **SERVER_OPTIONS)
    try:
        await runner.setup()
        if runner.server:  # always, once it is set up
            connections.listen(listener, runner.server)
        yield connections
    finally:
        connections.stop_listening_all()
        listener.close()
        await runner.cleanup()
        connections.end_all()


def _source_of(end: socket.socket, _: object) -> ClientSource:
    """A user. Root and vipd's own are never kept out by others."""
    _, uid, _ = credentials_of(end)
    return ClientSource(f"uid {uid}", privileged=uid in (0, os.geteuid()))


def _refusal(source: ClientSource, limits: ConnectionLimits, own: bool) -> bytes:
    """An answer before any request is read."""
    what = f"vipd takes no more connections of {source}" if own else "vipd takes no more connections"
    count = limits.privileged if source.privileged else limits.per_client if own else limits.connections
    whose = "of that user " if own else "of root's " if source.privileged else ""
    why = f"{count} {whose}are open, and vipd works on each of them"
    hint = "ss -xp shows whose they are: end some of them, or try again later"
    error = {"kind": "busy", "what": what, "why": why, "hint": hint, "problems": []}
    body = json.dumps({"apiVersion": API_VERSION, "error": error}).encode()
    head = [
        f"HTTP/1.1 {HTTP_STATUS['busy']} Service Unavailable",
        "Server: vipd",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
