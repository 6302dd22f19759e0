"""Serves the status page over TCP: GET and HEAD alone, to a browser only under this host's own addresses and
names: a foreign name may resolve to this host, too (DNS rebinding). The page loads nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Collection, Mapping
from importlib.resources import files

from aiohttp import web

from vipd.host.connections.http import CHUNK_BYTES
from vipd.host.connections.limits import ConnectionLimits
from vipd.observe.browsers import NOT_OUR_NAME, foreign_browser
from vipd.observe.listeners import ListenAddress, Listeners
from vipd.observe.page.page_state import PageState

LIMITS = ConnectionLimits(
    connections=128, per_client=64, head_seconds=10.0, body_seconds=5.0, send_seconds=10.0, life_seconds=15.0
)
MAX_STREAMS = 32
"""Further viewers poll instead."""
STREAM_SECONDS = 600.0
"""Then a stream ends, and the page opens another."""
HEARTBEAT_SECONDS = 5.0
STUCK_SECONDS = 10.0
"""A viewer that reads nothing for this long is disconnected."""

HEADERS: Mapping[str, str] = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class StatusPage:
    """The page's answers. `listener` opens nothing by itself."""

    def __init__(
        self, page_state: PageState, address: ListenAddress | None, names: Collection[str] = ()
    ) -> None:
        """`names` are this host's own, in lower case."""
        self._page_state, self._names = page_state, names
        self._html = (files(__package__) / "status.html").read_text(encoding="utf-8")
        self._policy = content_policy(self._html)
        self._streams = 0
        self.listener = Listeners(self._answer, LIMITS)
        if address:
            self.listener.set_addresses({address: "status_page"})

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        refused = self._refused(request)
        if refused:
            return refused
        match request.path:
            case "/":
                headers = {**HEADERS, "Content-Security-Policy": self._policy}
                return web.Response(text=self._html, content_type="text/html", headers=headers)
            case "/state":
                return await self._state(request)
            case "/stream" if request.method == "GET":
                return await self._stream(request)
        return _short(404, "there is nothing here")

    def _refused(self, request: web.BaseRequest) -> web.Response | None:
        if request.method not in ("GET", "HEAD"):
            return _short(405, "the status page changes nothing", {"Allow": "GET, HEAD"})
        if foreign_browser(request, self._names):
            return _short(421, NOT_OUR_NAME)
        return None

    async def _state(self, request: web.BaseRequest) -> web.Response:
        await self._page_state.wait_fresh()
        seen, headers = request.query.get("after", ""), dict(HEADERS)
        compressed = "gzip" in request.headers.get("Accept-Encoding", "")
        _, body = await self._page_state.changes_since(seen, compressed=compressed)
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._streams >= MAX_STREAMS:
            return _short(503, "enough others watch; hint: ask /state from time to time")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        response.force_close()
        self._streams += 1
        self.listener.connections.extend_lifetime(request, STREAM_SECONDS + STUCK_SECONDS)
        try:
            await response.prepare(request)
            await self._send_changes(request, response)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # it has disconnected
        finally:
            self._streams -= 1
            self.listener.connections.extend_lifetime(request, STUCK_SECONDS)
        return response

    async def _send_changes(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        board, clock = self._page_state, asyncio.get_running_loop().time
        seen = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        await _send(response, b"retry: 2000\n\n")
        await board.wait_fresh()
        until = clock() + STREAM_SECONDS
        while clock() < until and not board.ended:
            if await board.wait_newer(seen, HEARTBEAT_SECONDS):
                seen, news = await board.changes_since(seen)
                self.listener.connections.hold(request, news)
                await _send(response, f"id: {seen}\ndata: ".encode())
                for start in range(0, len(news), CHUNK_BYTES):
                    await _send(response, news[start : start + CHUNK_BYTES])
                self.listener.connections.hold(request, b"")
                await _send(response, b"\n\n")
            else:
                await _send(response, b"event: still\ndata:\n\n")


def content_policy(html: str) -> str:
    """A policy under which only scripts in the page run, and only this server is contacted."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    inline = "; ".join(f"{kind}-src {' '.join(found)}" for kind, found in hashes.items())
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {inline}; {rest}"


async def _send(response: web.StreamResponse, part: bytes) -> None:
    async with asyncio.timeout(STUCK_SECONDS):
        await response.write(part)


def _short(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers={**HEADERS, **(headers or {})})
