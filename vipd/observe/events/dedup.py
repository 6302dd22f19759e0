"""Folds events that repeat into one: `x17`. Pure; time is that of the events.

Only equal events are folded into one: a change of the same backend for another reason is another event. So a
failure and the recovery from it are always reported separately, however often they alternate.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import timedelta

from vipd.observe.events.event import EventRecord

WINDOW = timedelta(seconds=60)
"""An event later than this after the last of its kind is a separate event."""
MAX_DURATION = timedelta(hours=1)
"""After this time a repeated event is reported again."""
MAX_SEPARATE = 5
"""Number of equal events of these kinds that are reported singly: each was intended, or changed a state.
Other events are folded from the second on."""
SEPARATE_EVENTS = frozenset(
    {
        "backend-health",
        "service-quarantined",
        "service-readmitted",
        "declaration-refused",
        "declaration-accepted",
        "source-failed",
        "source-mended",
        "apply-failed",
        "apply-recovered",
        "service-added",
        "service-changed",
        "service-removed",
        "services-changed",
        "override-given",
        "override-taken-back",
        "reloaded",
    }
)
MAX_KEYS = 1000
"""Maximum number of kinds that are remembered."""

_PID = re.compile(r" ?\(pid \d+\)|:\d+$")
"""The variable part of the same culprit: its pid; for a file, the line."""
_NUMBER = re.compile(r"\d+(\.\d+)?")
"""The variable part of the same reason: durations and counts."""

DedupKey = tuple[str, str, tuple[str, ...], tuple[str, ...], str, str, str]


@dataclass(slots=True)
class _Group:
    reported: EventRecord
    """The event as last reported."""
    separate: int = 1
    """Number of events reported singly."""


class Deduplicator:
    """Takes events in order, and returns what to report about each."""

    def __init__(self) -> None:
        self._folds: OrderedDict[DedupKey, _Group] = OrderedDict()

    def deduplicate(self, event: EventRecord) -> EventRecord:
        """The event itself, or, with its id, the event that it and some before it are reported as."""
        kind = _dedup_key(event)
        fold = self._folds.get(kind)
        if fold is None or _is_over(fold.reported, event):
            fold = self._folds[kind] = _Group(event)
        elif fold.separate < (MAX_SEPARATE if event.event in SEPARATE_EVENTS else 1):
            fold.reported, fold.separate = event, fold.separate + 1
        else:
            before = fold.reported
            since = min(before.since or before.at, event.at)
            fold.reported = replace(event, count=before.count + 1, first=before.group_id, since=since)
        self._folds.move_to_end(kind)
        if len(self._folds) > MAX_KEYS:
            self._folds.popitem(last=False)
        return fold.reported


def _dedup_key(o: EventRecord) -> DedupKey:
    cause, reason = _PID.sub("", o.cause), _NUMBER.sub("#", o.reason)
    return o.event, o.level, o.services, o.backends, o.unit, cause, reason


def _is_over(before: EventRecord, now: EventRecord) -> bool:
    """True also if the clock was set back by more than that."""
    return abs(now.at - before.at) > WINDOW or abs(now.at - (before.since or before.at)) > MAX_DURATION
