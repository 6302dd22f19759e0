"""The log of names: what an answer changed, which names fail, and which removals wait."""

from __future__ import annotations

import logging
from collections.abc import Collection

from vipd.host.systemd.fields import Event, fields
from vipd.model.service import socket_text
from vipd.resolver.answers import NameState, Question, Target

log = logging.getLogger(__name__)

MAX_NAMED = 5


def log_change(question: Question, services: Collection[str], before: NameState, after: NameState) -> None:
    """Log what a lookup changed. A fault is logged when it begins, when its reason is another one, and when
    it is over."""
    if after.fault and after.fault != before.fault:
        kept = "its last good answer serves" if after.serving else "it has no answer yet: no backend of it"
        log.warning(
            "%s: %s; %s",
            question,
            after.fault,
            kept,
            extra=fields(Event.NAME_FAILED, service=services, cause=str(question), reason=after.fault),
        )
    elif before.fault and not after.fault:
        log.info(
            "%s is resolved again",
            question,
            extra=fields(Event.NAME_RECOVERED, service=services, cause=str(question)),
        )
    if after.held and not before.held:
        what = f"an answer lacks {_named(after, after.held)}; they serve on until answers have lacked them"
        what = f"{what} for a while"
        log.warning(
            "%s: %s",
            question,
            what,
            extra=fields(Event.NAME_HELD, service=services, cause=str(question), reason=what),
        )
    if after.serving != before.serving:
        what = _difference(before, after)
        log.info(
            "%s: %s",
            question,
            what,
            extra=fields(Event.NAME_CHANGED, service=services, cause=str(question), reason=what),
        )


def _difference(before: NameState, after: NameState) -> str:
    old, new = {t.place for t in before.serving}, {t.place for t in after.serving}
    parts = [
        f"{word} {_named(state, places)}"
        for word, state, places in (("new:", after, new - old), ("gone:", before, old - new))
        if places
    ]
    return ", ".join(parts) or "other weights or priorities"


def _named(state: NameState, places: Collection[tuple[str, int]]) -> str:
    found = [_text(target) for target in state.serving if target.place in places]
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return " ".join(found[:MAX_NAMED]) + more


def _text(target: Target) -> str:
    return socket_text(target.address, target.port) if target.port else target.address
