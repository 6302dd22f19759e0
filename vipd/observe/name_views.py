"""The API's views of backends' DNS names, as JSON values. Pure but for reading the resolver's state."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from vipd.declaration.bounded_json import Json
from vipd.model.formatting import time_text
from vipd.model.service import NamedBackend, Service
from vipd.resolver.answers import NameState, Question
from vipd.resolver.resolver import Resolver

WARNINGS_SHOWN = 20
"""Names that a status names as failing; it counts the rest."""


def name_views(service: Service, resolver: Resolver | None) -> list[Json]:
    """A NameView of docs/api.md for each name among a service's backends and its fallback's."""
    return [
        {**_name_view(named, resolver), "fallback": fallback}
        for fallback, names in ((False, service.named_backends), (True, service.named_fallback))
        for named in names
    ]


def _name_view(named: NamedBackend, resolver: Resolver | None) -> Json:
    question = Question.of(named)
    state = resolver.states.get(question) if resolver else None
    if resolver is None or state is None:
        fault = "it is not looked up: there are more names than dns_max_names"
        return _view(named, NameState(fault=fault), None)
    return _view(named, state, round(resolver.seconds_until(state), 1))


def _view(named: NamedBackend, state: NameState, next_seconds: float | None) -> Json:
    answered = state.answered_at
    return {
        "backend": str(named),
        "addresses": list(map(str, state.serving)),
        "held": [str(target) for target in state.serving if target.endpoint in state.held],
        "left_out": state.left_out,
        "answered": time_text(datetime.fromtimestamp(answered, UTC)) if answered is not None else None,
        "ttl": state.ttl,
        "next_seconds": next_seconds,
        "fault": state.fault,
    }


def names_summary(resolver: Resolver) -> Json | None:
    """The names in a Status of docs/api.md; None while no service has one."""
    states = resolver.states
    if not states:
        return None
    failing = [(question, state) for question, state in states.items() if state.fault]
    return {
        "names": len(states),
        "failing": len(failing),
        "held": sum(1 for state in states.values() if state.held),
        "lookups": dict(resolver.lookups),
        "faults": [
            {"name": str(question), "fault": state.fault, "serves": bool(state.serving)}
            for question, state in failing[:WARNINGS_SHOWN]
        ],
    }


def name_warnings(resolver: Resolver) -> list[str]:
    """A line for each name that fails, that is held, or whose answer is too large, up to a limit."""
    found = [text for question, state in resolver.states.items() for text in _warnings_of(question, state)]
    shown = found[:WARNINGS_SHOWN]
    if more := len(found) - len(shown):
        shown.append(f"and {more} more warnings of names; hint: vipctl describe SERVICE shows its names")
    if resolver.beyond_limit:
        what = f"{resolver.beyond_limit} names are not looked up, because there are too many"
        shown.append(f"{what}; hint: raise dns_max_names in vipd's settings")
    return shown


def _warnings_of(question: Question, state: NameState) -> Iterator[str]:
    if state.fault:
        if state.answered_at is None:
            kept = "it has had no answer yet"
        else:
            kept = f"its answer of {time_text(datetime.fromtimestamp(state.answered_at, UTC))} serves on"
        yield f"{question}: {state.fault}; {kept}; hint: vipctl doctor says what helps"
    if state.held:
        number = f"{len(state.held)} of {len(state.serving)}"
        what = f"{number} addresses serve on, although the last answer lacks them"
        yield f"{question}: {what}; hint: they are removed when answers have lacked them for dns_hold"
    if state.left_out:
        what = f"{state.left_out} of its addresses are left out"
        yield f"{question}: {what}; hint: raise dns_max_addresses in vipd's settings"
