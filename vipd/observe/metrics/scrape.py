"""Answers scrapes: on the API's socket, and over TCP at `metrics_address`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial

from aiohttp import web

from vipd.control.reconciler import Reconciler
from vipd.control.shared_run import SharedRun
from vipd.dataplane.base import Dataplane
from vipd.host.connections.limits import ConnectionLimits
from vipd.observe.browsers import NOT_OUR_NAME, foreign_browser
from vipd.observe.listeners import ListenAddress, Listeners
from vipd.observe.metrics.event_counts import MetricCounters
from vipd.observe.metrics.flows import ReadFlows
from vipd.observe.metrics.snapshot import MetricsSnapshot, take_snapshot
from vipd.sources.base import Source

PATH = "/metrics"
LIMITS = ConnectionLimits(
    connections=64, per_client=16, head_seconds=10.0, body_seconds=5.0, send_seconds=15.0, life_seconds=60.0
)
"""A scrape of very many backends takes seconds, and the client times out within a minute."""


class Metrics:
    """The daemon's metrics, never older than the request. Concurrent requests share a text, so
    that many cost no more than one."""

    def __init__(
        self,
        reconciler: Reconciler,
        sources: Sequence[Source],
        counters: MetricCounters,
        dataplane: Dataplane,
        read_flows: ReadFlows | None = None,
    ) -> None:
        self._reconciler, self._sources, self._counters = reconciler, sources, counters
        self._dataplane, self._read_flows = dataplane, read_flows
        self._lock = asyncio.Lock()
        self._texts = {compressed: SharedRun(partial(self._text, compressed)) for compressed in (False, True)}

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """The text, compressed if the client accepts that."""
        compressed = "gzip" in request.headers.get("Accept-Encoding", "")
        body = await self._texts[compressed].result()
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=body, headers=headers)

    def listener(self, place: ListenAddress | None, names: Collection[str] = ()) -> Listeners:
        """Serves the same over TCP, and nothing else. None: no listener. `names` are this host's own, in
        lower case: a browser must use one of them, or an address."""

        async def answer(request: web.BaseRequest) -> web.Response:
            if request.path != PATH:
                return web.Response(status=404)
            if request.method not in ("GET", "HEAD"):
                return web.Response(status=405, headers={"Allow": "GET, HEAD"})
            if foreign_browser(request, names):
                return web.Response(status=421, text=f"{NOT_OUR_NAME}\n")
            return await self.answer(request)

        listeners = Listeners(answer, LIMITS)
        if place:
            listeners.set_addresses({place: "metrics_address"})
        return listeners

    async def _text(self, compressed: bool) -> bytes:
        async with self._lock:
            snapshot = await self._snapshot()
            return await asyncio.to_thread(self._render, snapshot, compressed)

    async def _snapshot(self) -> MetricsSnapshot:
        reading = await self._read_flows() if self._read_flows else None
        return await take_snapshot(self._reconciler, self._sources, reading)

    def _render(self, snapshot: MetricsSnapshot, compressed: bool) -> bytes:
        from vipd.observe.metrics.exposition import render  # the library is loaded when it is needed

        return render(snapshot, self._counters, self._dataplane.name, compressed=compressed)
