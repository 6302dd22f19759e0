"""The API's request to explain. It runs beside the event loop, because large tables take long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from aiohttp import web

from vipd.api.messages import encoded_json_response, route
from vipd.control.announcer import Announcer
from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import Dataplane
from vipd.declaration.operations import Kind, RefusedError

MAX_CONCURRENT = 2
"""Questions that are worked on at a time; others wait for their turn."""


class ExplainRoutes:
    """Answers `/v1/explain`."""

    def __init__(
        self, reconciler: Reconciler, dataplane: Dataplane, announcer: Announcer | None = None
    ) -> None:
        self._reconciler, self._dataplane, self._announcer = reconciler, dataplane, announcer
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, "vipd explain")
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        return [route("GET", "/v1/explain", self.explain, parameters=("from", "target"))]

    async def end(self, _: web.Application) -> None:
        """Accept no further requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def explain(self, request: web.Request) -> web.Response:
        """The effect of the compiled rules on one packet."""
        source, target = request.query.get("from", ""), request.query.get("target", "")
        loop = asyncio.get_running_loop()
        async with self._turns:
            # In a thread, and not when the daemon starts: the simulator is an eighth of all that it imports.
            await loop.run_in_executor(self._threads, import_module, "vipd.api.explain_answers")
            from vipd.api.explain_answers import add_health, answer, encoded, rule_inputs
            from vipd.observe.explain.query import QueryError

            inputs = rule_inputs(self._reconciler, self._dataplane, self._announcer)
            try:
                view = await loop.run_in_executor(self._threads, answer, source, target, inputs)
            except QueryError as error:
                kind: Kind = "not-found" if error.unknown else "malformed"
                raise RefusedError(kind, error.what, error.why, error.hint) from None
            add_health(view, self._reconciler)
            body = await loop.run_in_executor(self._threads, encoded, view)
        return encoded_json_response(body)
