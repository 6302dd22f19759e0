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
LONGEST = timedelta(hours=1)
"""After this time a repeated event is reported again."""
TOLD_APART = 5
"""Number of equal events of these kinds that are reported singly: each was intended, or changed a state.
Other events are folded from the second on."""
SINGLE = frozenset(
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
MOST_KINDS = 1000
"""Maximum number of kinds that are remembered."""

_PID = re.compile(r" ?\(pid \d+\)|:\d+$")
"""The variable part of the same culprit: its pid; for a file, the line."""
_NUMBER = re.compile(r"\d+(\.\d+)?")
"""The variable part of the same reason: durations and counts."""

Kind = tuple[str, str, tuple[str, ...], tuple[str, ...], str, str, str]


@dataclass(slots=True)
class _Fold:
    told: EventRecord
    """The event as last reported."""
    apart: int = 1
    """Number of events reported singly."""


class Folds:
    """Takes events in order, and returns what to report about each."""

    def __init__(self) -> None:
        self._folds: OrderedDict[Kind, _Fold] = OrderedDict()

    def take_in(self, occurrence: EventRecord) -> EventRecord:
        """The event itself, or, with its id, the event that it and some before it are reported as."""
        kind = _kind(occurrence)
        fold = self._folds.get(kind)
        if fold is None or _over(fold.told, occurrence):
            fold = self._folds[kind] = _Fold(occurrence)
        elif fold.apart < (TOLD_APART if occurrence.event in SINGLE else 1):
            fold.told, fold.apart = occurrence, fold.apart + 1
        else:
            before = fold.told
            since = min(before.since or before.at, occurrence.at)
            fold.told = replace(occurrence, count=before.count + 1, first=before.place, since=since)
        self._folds.move_to_end(kind)
        if len(self._folds) > MOST_KINDS:
            self._folds.popitem(last=False)
        return fold.told


def _kind(o: EventRecord) -> Kind:
    cause, reason = _PID.sub("", o.cause), _NUMBER.sub("#", o.reason)
    return o.event, o.level, o.services, o.backends, o.unit, cause, reason


def _over(before: EventRecord, now: EventRecord) -> bool:
    """True also if the clock was set back by more than that."""
    return abs(now.at - before.at) > WINDOW or abs(now.at - (before.since or before.at)) > LONGEST
