"""The API's request to explain. It runs beside the event loop, because large tables take long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from aiohttp import web

from vipd.api.messages import encoded_json_response
from vipd.api.user_quota import UserQuota
from vipd.control.announcer import Announcer
from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import Dataplane
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import Kind, RefusedError
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family
from vipd.observe.announcement_views import announcement_notes
from vipd.observe.explain.explanation import Compiled, explain, related
from vipd.observe.explain.host_reading import read_host
from vipd.observe.explain.host_rules import HostState
from vipd.observe.explain.query import QueryError, ask
from vipd.observe.explain.rule_words import Options

MAX_CONCURRENT = 2
"""Questions that are worked on at a time; others wait for their turn."""

MAX_QUEUED = 32

ON_HOST = "on_host"
"""The query's key for rules of other programs; who may not change services may not see them."""

ReadHost = Callable[[Family, str, Collection[str]], Awaitable[HostState]]
READ_HOST: ReadHost = read_host


@dataclass(frozen=True, slots=True)
class _RuleInputs:
    """Input of an explanation: values, all of one moment."""

    forwardings: Sequence[Forwarding]
    options: Mapping[Family, Options]
    host_addresses: frozenset[str]
    announced: Mapping[str, str] = field(default_factory=dict)
    """For each address that is to be announced, a note whether it is."""
    host: HostState | None = None
    """None: only vipd's own rules count."""


class ExplainRoutes:
    """Answers `/v1/explain`."""

    def __init__(
        self, reconciler: Reconciler, dataplane: Dataplane, announcer: Announcer | None = None
    ) -> None:
        self._reconciler, self._dataplane, self._announcer = reconciler, dataplane, announcer
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, "vipd explain")
        self._quota = UserQuota(MAX_CONCURRENT + MAX_QUEUED)

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        return [web.get("/v1/explain", self.explain)]

    async def end(self, _: web.Application) -> None:
        """Accept no further requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def explain(self, request: web.Request) -> web.Response:
        """The effect of the compiled rules on one packet."""
        dataplane = self._dataplane
        if not isinstance(dataplane, Compiled):
            raise RefusedError("invalid", "this dataplane has no rules that could be explained")
        source, target = request.query.get("from", ""), request.query.get("target", "")
        rule_inputs = _RuleInputs(
            [f for part in self._reconciler.forwardings.values() for f in part],
            {family: dataplane.options_of(family) for family in Family},
            dataplane.host_addresses(),
            announcement_notes(self._announcer.state) if self._announcer else {},
        )
        loop = asyncio.get_running_loop()
        try:
            with self._quota.acquire(request, "too many questions at once", "ask again later"):
                if request.query.get(ON_HOST) == "true":
                    rule_inputs = replace(rule_inputs, host=await self._host(source, target, rule_inputs))
                body = await loop.run_in_executor(self._threads, _answer, source, target, rule_inputs)
        except QueryError as error:
            kind: Kind = "not-found" if error.unknown else "malformed"
            raise RefusedError(kind, error.what, error.why, error.hint) from None
        return encoded_json_response(body)

    async def _host(self, source: str, target: str, rule_inputs: _RuleInputs) -> HostState:
        """The rules and routes of this host that concern a question. Raises QueryError."""
        packet = ask(source, target, rule_inputs.forwardings, rule_inputs.host_addresses).packet
        endpoints = [e.address for f in related(packet, rule_inputs.forwardings) for e in f.reachable()]
        prefix = rule_inputs.options[packet.family].prefix
        return await READ_HOST(packet.family, prefix, (packet.source, packet.destination, *endpoints))


def _answer(source: str, target: str, rule_inputs: _RuleInputs) -> bytes:
    """The members of the answer's JSON object, encoded. Raises QueryError."""
    question = ask(source, target, rule_inputs.forwardings, rule_inputs.host_addresses)
    options = rule_inputs.options[question.packet.family]
    explanation = explain(
        question, rule_inputs.forwardings, options, rule_inputs.host_addresses, rule_inputs.host
    )
    view = explanation.view()
    if note := rule_inputs.announced.get(str(question.packet.destination)):
        notes = view["notes"]
        view = {**view, "notes": [*(notes if isinstance(notes, list) else ()), note]}
    return f'"explanation": {_encoded(view)}'.encode()


def _encoded(view: Json) -> str:
    """As JSON, list item by list item: encoding a large value at once would block all other threads."""
    parts = [f"{json.dumps(key)}: {_encoded_member(value)}" for key, value in view.items()]
    return f"{{{', '.join(parts)}}}"


def _encoded_member(value: object) -> str:
    return f"[{', '.join(map(json.dumps, value))}]" if isinstance(value, list) else json.dumps(value)
