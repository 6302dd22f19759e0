"""Occurrences and recorders as tests need them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from vipd.observe.events.event import EventRecord
from vipd.observe.events.event_log import EventLog
from vipd.observe.events.recorder import Recorder

START = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """Seconds since 1970 that pass when told."""

    def __init__(self) -> None:
        self.now = START.timestamp()

    def __call__(self) -> float:
        return self.now


def occurrence(number: float = 0, event: str = "backend-health", **more: Any) -> EventRecord:
    """An event so many seconds after the start of the test's time."""
    return EventRecord(id=0, at=START + timedelta(seconds=number), event=event, **more)


def recorder(directory: Path, clock: Clock | None = None, segment_bytes: int = 1 << 20) -> Recorder:
    """A recorder in a directory, in the running loop."""
    return Recorder(EventLog(directory, segment_bytes), asyncio.get_running_loop(), clock or Clock())
