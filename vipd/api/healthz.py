"""Answers GET /healthz and /livez, for probes of vipd itself (contract 6).

Both are judged alike: vipd has no state in which it works but should get no traffic. The status is about vipd
alone; `serving` says whether the services can serve, which a restart of vipd does not change.
"""

from __future__ import annotations

import json
from datetime import datetime

from aiohttp import web

from vipd.api.messages import route
from vipd.control.progress import Progress, healthy
from vipd.control.reconciler import Reconciler
from vipd.declaration.bounded_json import Json
from vipd.model.formatting import time_text
from vipd.observe.listeners import ListenAddress, Listeners
from vipd.observe.views import serving_summary

PATHS = ("/healthz", "/livez")


def healthz_view(progress: Progress, now: datetime) -> tuple[int, Json]:
    """HTTP status and body, but for `serving`: 200 when vipd is healthy, else 503."""
    well, message = healthy(progress, now)
    return 200 if well else 503, {
        "lastUpdated": time_text(progress.last_apply),
        "currentTime": time_text(now),
        "state": progress.state,
        "message": message or _degraded(progress),
    }


def _degraded(progress: Progress) -> str:
    """Names what does not work although vipd does; vipd counts as healthy, as a restart would not repair
    it."""
    names = ", ".join(sorted(progress.quarantined))
    return f"quarantined: {names}; hint: vipctl describe says why" if names else ""


def healthz_routes(reconciler: Reconciler) -> list[web.RouteDef]:
    """The routes of the API's socket."""

    async def answer(_: web.Request) -> web.Response:
        return _answer(reconciler)

    return [route("GET", path, answer) for path in PATHS]


def healthz_listener(reconciler: Reconciler, place: ListenAddress | None) -> Listeners:
    """Serves the same over TCP, and nothing else. None: no listener."""

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.path not in PATHS:
            return web.Response(status=404)
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        return _answer(reconciler)

    listeners = Listeners(answer)
    if place:
        listeners.set_addresses({place: "health_address"})
    return listeners


def _answer(reconciler: Reconciler) -> web.Response:
    status, view = healthz_view(reconciler.progress, reconciler.clock())
    body = json.dumps({**view, "serving": serving_summary(reconciler)}).encode()
    headers = {"X-Content-Type-Options": "nosniff"}
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
