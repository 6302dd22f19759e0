"""Passes log records with an event's fields to the recorder as events.

So the log call is the only place that reports an event, and journal and ring agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from vipd.host.systemd.fields import ATTRIBUTE, Event, Fields
from vipd.observe.events.event import MAX_NAMES, EventRecord, Level, clean
from vipd.observe.events.event_log import EventLog
from vipd.observe.events.recorder import Recorder, utc_time
from vipd.sources.cache import Cache

NOT_RECORDED = frozenset({Event.CHANGE_STORED, Event.RULES_APPLIED, Event.FLOWS_ENDED, Event.START_FAILED})
"""Steps of a change that has an event itself; and events from before the recorder exists."""


class EventHandler(logging.Handler):
    """Passes log records that are events to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Record an event; ignores other records."""
        carried: Fields = getattr(record, ATTRIBUTE, {})
        event = _one(carried, "VIPD_EVENT")
        if not event or event in NOT_RECORDED:
            return
        try:
            self._recorder.record(_event_record(event, carried, record))
        except Exception as error:
            self._recorder.failed(error)


def _event_record(event: str, carried: Fields, record: logging.LogRecord) -> EventRecord:
    return EventRecord(
        id=0,
        at=utc_time(record.created),
        event=event,
        level=_level(record.levelno),
        services=_names(carried, "VIPD_SERVICE"),
        backends=_names(carried, "VIPD_BACKEND"),
        unit=clean(_one(carried, "VIPD_UNIT")),
        cause=clean(_one(carried, "VIPD_CAUSE")),
        reason=clean(_one(carried, "VIPD_REASON") or record.getMessage()),
    )


def _one(carried: Fields, name: str) -> str:
    return next(iter(carried.get(name, ())), "")


def _names(carried: Fields, name: str) -> tuple[str, ...]:
    return tuple(map(clean, carried.get(name, ())[:MAX_NAMES]))


def _level(number: int) -> Level:
    if number >= logging.ERROR:
        return "error"
    return "warning" if number >= logging.WARNING else "info"


@contextlib.contextmanager
def recording(cache: Cache) -> Iterator[Recorder]:
    """Record vipd's log as events, until the end; then the cache is closed. Must run in an event loop."""
    recorder = Recorder(EventLog(cache), asyncio.get_running_loop())
    handler, logger = EventHandler(recorder), logging.getLogger("vipd")
    before = logger.level
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)  # a record below the log's level is an event all the same
    logger.addHandler(handler)
    try:
        yield recorder
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        recorder.close()
        cache.close()
