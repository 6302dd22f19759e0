"""The keys and types of the real API's answers, to which the fake daemon's documents are held.

They are derived from answers that the real server gives in this process to `REQUESTS`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

from tests.api.serving import DNS, PATIENCE_SECONDS, WEB, Api, served
from tests.control.reconciling import IsolatedReconciler
from tests.dataplane.fake_dataplane import FakeDataplane
from vipd.dataplane.iptables.options import RuleOptions
from vipd.model.service import Family
from vipd.observe.events.event import EventRecord, encode
from vipd.observe.views import status_view

Json = dict[str, Any]


@dataclass(slots=True)
class Explained(FakeDataplane):
    """A fake whose rules would be vipd's defaults."""

    def options_of(self, family: Family) -> RuleOptions:
        return RuleOptions(family)

    def host_addresses(self) -> frozenset[str]:
        return frozenset({"192.0.2.1"})


OPEN = frozenset({"spec", "settings", "quarantined", "before", "after", "actions"})
"""Members whose own keys are no matter of the API: declarations, settings, names and actions."""
ELSEWHERE = frozenset({"GET /v1/fleet", "POST /v1/dataplane", "GET /v1/stats", "GET /v1/conntrack"})
"""Requests that need etcd or a kernel; what is answered to them is not compared."""
ONLY_WITH_ETCD = frozenset({"etcd"})
"""Members of the status."""

_TARGETS = (
    (re.compile("/v1/services/.+/backends"), "/v1/services/TARGET/backends"),
    (re.compile("/v1/services/.+"), "/v1/services/TARGET"),
    (re.compile("/v1/history/.+"), "/v1/history/REVISION"),
)


@dataclass
class Shape:
    """What values of one place have in common."""

    types: set[str] = field(default_factory=set)
    members: dict[str, Shape] = field(default_factory=lambda: defaultdict(Shape))
    always: set[str] | None = None
    """Members that each object had; None: there was no object."""
    items: Shape | None = None

    def learn(self, value: Any, name: str) -> None:
        """One more value that the real API gave."""
        self.types.add(_type(value))
        if isinstance(value, dict) and name not in OPEN:
            self.always = set(value) if self.always is None else self.always & set(value)
            for key, item in value.items():
                self.members[key].learn(item, key)
        if isinstance(value, list):
            self.items = self.items or Shape()
            for item in value:
                self.items.learn(item, name)

    def differences(self, value: Any, at: str) -> Iterator[str]:
        """How a value is unlike those that the real API gave."""
        if self.types and _type(value) not in self.types:
            yield f"{at}: {_type(value)} instead of {' or '.join(sorted(self.types))}"
        elif isinstance(value, dict) and self.always is not None:
            yield from (f"{at}.{key}: is missing" for key in sorted(self.always - value.keys()))
            for key, item in value.items():
                if key in self.members:
                    yield from self.members[key].differences(item, f"{at}.{key}")
                elif key not in ONLY_WITH_ETCD:
                    yield f"{at}.{key}: the API has none"
        elif isinstance(value, list) and self.items is not None:
            for item in value:
                yield from self.items.differences(item, f"{at}[]")


def differences(request: str, document: Json) -> list[str]:
    """Where a document is not what the real API answers to `METHOD /path`, percent-decoded."""
    kind = _kind(request)
    if kind in ELSEWHERE:
        return []
    shapes = real_shapes()
    if kind not in shapes:
        return [f"{kind}: the contract has no answer of the real API to it; see REQUESTS"]
    return list(dict.fromkeys(shapes[kind].differences(document, kind)))


def _kind(request: str) -> str:
    method, _, path = request.partition(" ")
    for pattern, name in _TARGETS:
        if pattern.fullmatch(path):
            return f"{method} {name}"
    return request


def _type(value: Any) -> str:
    if value is None:
        return "null"
    # JSON has one kind of number.
    return "number" if type(value) in (int, float) else type(value).__name__


@cache
def real_shapes() -> Mapping[str, Shape]:
    """What the real API answers, by the request."""
    shapes: defaultdict[str, Shape] = defaultdict(Shape)
    for request, document in _answers():
        # Specs are declarations: what they may hold is no matter of the API.
        known = {**document, "services": []} if request == "GET /v1/export" else document
        shapes[request].learn(known, "")
    return dict(shapes)


FULL: Json = {
    **DNS,
    "name": "full",
    "address": "10.96.0.30",
    "ports": [{"port": 80, "node_port": 30080}],
    "backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 0}],
    "load_balancer_addresses": ["203.0.113.7"],
    "traffic_policy": {"external": "local"},
    "health_port": 30081,
    "affinity": {"by": "client-ip", "timeout": "10m"},
}
ORDER: Json = {"service": "full", "backend": "10.244.0.5", "admin": "draining", "reason": "disk", "for": 60}
REQUESTS: tuple[tuple[str, Json | None], ...] = (
    *(("POST /v1/services", {"service": spec}) for spec in (WEB, DNS, FULL)),
    ("POST /v1/apply", {"services": [WEB]}),
    ("PATCH /v1/services/web", {"service": {"affinity": "client-ip"}}),
    ("POST /v1/services/web/backends", {"backends": ["10.244.0.8"]}),
    ("DELETE /v1/services/web/backends", {"backends": ["10.244.0.8"]}),
    ("POST /v1/reload", None),
    ("GET /v1/history", None),
    ("POST /v1/rollback", {}),
    ("POST /v1/apply?confirm=60", {"services": [WEB, {**WEB, "name": "new", "address": "10.96.0.12"}]}),
    ("GET /v1/status", None),
    ("GET /v1/services/web", None),
    ("GET /v1/history", None),
    ("POST /v1/confirm", None),
    ("POST /v1/apply?confirm=60", {"services": [], "prune": True}),
    ("POST /v1/rollback", {}),
    ("POST /v1/rollback?confirm=60", {"revision": 5}),
    ("POST /v1/confirm", None),
    ("POST /v1/apply", {"services": [WEB, DNS, FULL]}),
    *(
        request
        for confirmed in (
            ("POST /v1/services?confirm=60", {"service": {**WEB, "name": "new", "address": "10.96.0.12"}}),
            ("PATCH /v1/services/new?confirm=60", {"service": {"affinity": "client-ip"}}),
            ("POST /v1/services/new/backends?confirm=60", {"backends": ["10.244.0.8"]}),
            ("PATCH /v1/services/new/backends/10.244.0.8?confirm=60", {"weight": 2}),
            ("DELETE /v1/services/new/backends?confirm=60", {"backends": ["10.244.0.8"]}),
            ("DELETE /v1/services/new?confirm=60", None),
        )
        for request in (confirmed, ("POST /v1/confirm", None))
    ),
    *((f"GET /v1/history/{revision}", None) for revision in (1, 9)),
    ("POST /v1/overrides", ORDER),
    ("POST /v1/overrides", {"address": "10.244.0.7", "weight": 3}),
    ("GET /v1/overrides", None),
    ("GET /v1/flows?service=full&backend=10.244.0.5", None),
    *((f"GET /v1/{path}", None) for path in ("version", "services", "export", "diff", "status")),
    *((f"GET /v1/services/{name}", None) for name in ("full", "web", "kube-system%2Fkube-dns")),
    ("GET /v1/explain?from=10.10.0.9&target=web", None),
    ("GET /v1/explain?from=10.10.0.9&target=10.96.0.99%3A1%2Ftcp", None),
    ("DELETE /v1/overrides", {"all": True}),
    ("DELETE /v1/services/full", None),
)
"""Such that each member of an answer is there with every type that it may have."""


def _answers() -> list[tuple[str, Json]]:
    """Requests with what the real API answers."""
    found: list[tuple[str, Json]] = []

    async def flows(*_: object) -> int:
        return 3

    async def ask(api: Api, request: str, body: Json | None = None) -> None:
        method, path = request.split()
        answer = await api.ask(method, path, body)
        assert answer.status == 200, answer.body
        found.append((_kind(unquote(request.partition("?")[0])), answer.body))

    async def story(api: Api) -> None:
        for request, body in REQUESTS:
            await ask(api, request, body)
        api.declare("bad.yaml", "  - {address: 10.96.0.300}\n")
        await api.rescan()
        await api.reconciler.wait_synced(api.reconciler.request_sync(), PATIENCE_SECONDS)
        await ask(api, "GET /v1/status")

    def prepare(api: Api) -> None:
        api.dataplane = Explained()

    with patch("vipd.api.override_routes.live_flows", flows):
        served(story, prepare)
    return [*found, ("GET /v1/status", _first_status()), ("GET /v1/events", _events())]


def _first_status() -> Json:
    """Of a daemon that has not written yet."""
    isolated = IsolatedReconciler()
    about = {"version": "0", "pid": 1, "started": "", "settings": {}, "warnings": ()}
    view = status_view(isolated.reconciler, isolated.dataplane, [isolated.source], about)
    return {"apiVersion": "vipd/v1", **json.loads(json.dumps(view))}


def _events() -> Json:
    event = EventRecord(7, datetime(2026, 1, 1, tzinfo=UTC), "started", services=("a",), backends=("b",))
    return {"apiVersion": "vipd/v1", "events": [json.loads(encode(event))]}
