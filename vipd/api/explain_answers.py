"""The answers of the API's requests to explain. Imported with the first request: the simulator takes long to
import."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vipd.control.announcer import Announcer
from vipd.control.reconciler import Reconciler
from vipd.dataplane.base import Dataplane
from vipd.dataplane.refusals import ForwardedFlow
from vipd.dataplane.switching import SwitchableDataplane
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import RefusedError
from vipd.model.backend_status import UNCHECKED
from vipd.model.forwarding import Forwarding
from vipd.model.service import Family, socket_text
from vipd.observe.announcement_views import announcement_notes
from vipd.observe.endpoint_views import backend_status_by_address
from vipd.observe.explain.explanation import Compiled, explain, related
from vipd.observe.explain.query import ask
from vipd.observe.explain.rule_words import Options
from vipd.observe.simulator import Arrival, Packet


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """Input of an explanation: values, all of one moment."""

    forwardings: Sequence[Forwarding]
    options: Mapping[Family, Options]
    host_addresses: frozenset[str]
    announced: Mapping[str, str] = field(default_factory=dict)
    """For each address that is to be announced, a note whether it is."""
    refusals: Callable[[ForwardedFlow], tuple[str, ...]] = lambda flow: ()
    """The rules of other programs that may refuse a flow that vipd translates."""


def rule_inputs(reconciler: Reconciler, dataplane: Dataplane, announcer: Announcer | None) -> RuleInputs:
    """The input as of now. Raises RefusedError."""
    if not isinstance(dataplane, Compiled):
        raise RefusedError("invalid", "this dataplane has no rules that could be explained")
    return RuleInputs(
        [f for part in reconciler.forwardings.values() for f in part],
        {family: dataplane.options_of(family) for family in Family},
        dataplane.host_addresses(),
        announcement_notes(announcer.state) if announcer else {},
        dataplane.accepts.notes_on if isinstance(dataplane, SwitchableDataplane) else lambda flow: (),
    )


def answer(source: str, target: str, inputs: RuleInputs) -> Json:
    """The Explanation, without the health of its backends. Raises QueryError."""
    question = ask(source, target, inputs.forwardings, inputs.host_addresses)
    options = inputs.options[question.packet.family]
    explanation = explain(question, inputs.forwardings, options, inputs.host_addresses)
    announced = inputs.announced.get(str(question.packet.destination))
    notes = [*explanation.notes, *filter(None, (announced,)), *_refusals(question.packet, inputs)]
    return {**explanation.view(), "notes": notes}


def add_health(view: Json, reconciler: Reconciler) -> None:
    """Give the backends of an Explanation the `health` that the daemon knows."""
    name, backends = str(view["service_port"] or ""), view["backends"]
    service = reconciler.services.get(name) or reconciler.services.get(name.rpartition(":")[0])
    if service is None or not isinstance(backends, list):
        return
    statuses = reconciler.backend_statuses(service)
    health = {
        socket_text(*address): standing.health
        for forwarding in reconciler.forwardings.get(service.name, ())
        for address, standing in backend_status_by_address(service, forwarding, statuses).items()
    }
    for backend in backends:
        backend["health"] = health.get(backend["endpoint"], UNCHECKED)


def encoded(view: Json) -> bytes:
    """The members of the answer's JSON object, encoded."""
    return f'"explanation": {_encoded(view)}'.encode()


def _refusals(packet: Packet, inputs: RuleInputs) -> Iterator[str]:
    """Notes on rules of other programs in chains that a forwarded packet passes once it is translated."""
    if packet.arriving is Arrival.FORWARDED:
        for forwarding in related(packet, inputs.forwardings):
            yield from inputs.refusals(replace(ForwardedFlow.of(forwarding), source=packet.source))


def _encoded(view: Json) -> str:
    """As JSON, list item by list item: encoding a large value at once would block all other threads."""
    parts = [f"{json.dumps(key)}: {_encoded_member(value)}" for key, value in view.items()]
    return f"{{{', '.join(parts)}}}"


def _encoded_member(value: object) -> str:
    return f"[{', '.join(map(json.dumps, value))}]" if isinstance(value, list) else json.dumps(value)
