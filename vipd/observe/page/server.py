"""Serves the status page over TCP: GET and HEAD alone, to a browser only under this host's own addresses and
names: a foreign name may resolve to this host, too (DNS rebinding). The page loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Mapping
from importlib.resources import files

from aiohttp import web

from vipd.host.connections.limits import ConnectionLimits
from vipd.observe.browsers import NOT_OUR_NAME, foreign_browser
from vipd.observe.listeners import ListenAddress, Listeners
from vipd.observe.page.page_state import PageState

LIMITS = ConnectionLimits(
    connections=128, per_client=64, head_seconds=10.0, body_seconds=5.0, send_seconds=10.0, life_seconds=15.0
)

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
        return _short(404, "there is nothing here")

    def _refused(self, request: web.BaseRequest) -> web.Response | None:
        if request.method not in ("GET", "HEAD"):
            return _short(405, "the status page changes nothing", {"Allow": "GET, HEAD"})
        if foreign_browser(request, self._names):
            return _short(421, NOT_OUR_NAME)
        return None

    async def _state(self, request: web.BaseRequest) -> web.Response:
        await self._page_state.wait_fresh()
        headers = dict(HEADERS)
        compressed = "gzip" in request.headers.get("Accept-Encoding", "")
        body = await self._page_state.answer(compressed=compressed)
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, content_type="application/json", headers=headers)


def content_policy(html: str) -> str:
    """A policy under which only scripts in the page run, and only this server is contacted."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    inline = "; ".join(f"{kind}-src {' '.join(found)}" for kind, found in hashes.items())
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; {inline}; {rest}"


def _short(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers={**HEADERS, **(headers or {})})
