"""The time in which a change of the store must be confirmed: it holds however the time of day is set.

While this host runs, its uptime counts, which nobody sets. After a reboot only the time of day is left; where
it cannot be right, the time counts as over, because an unconfirmed change must not stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from vipd.model.formatting import time_text

MAX_SECONDS = 86400
"""Longest time to confirm a change: until then the store accepts no other."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _time_of_day() -> datetime:
    return datetime.now(UTC)


def _uptime() -> float:
    """Seconds since this host was booted, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Clocks:
    """This host's clocks."""

    time_of_day: Callable[[], datetime] = _time_of_day
    """In UTC; it may be set forward and back."""
    uptime: Callable[[], float] = _uptime
    """Seconds since the boot."""
    boot_id: Callable[[], str] = _boot_id
    """The boot that `uptime` counts from; empty: unknown."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A change that is taken back unless it is confirmed in time."""

    revision: int
    """The change, in the history."""
    seconds: int
    """The time that was given for it."""
    until: datetime
    """The end of that time, by the time of day when the change was accepted."""
    boot_id: str
    deadline: float
    """The end of that time, by the uptime of that boot."""

    @staticmethod
    def begin(revision: int, seconds: int, clocks: Clocks) -> Confirmation:
        """The time begins now."""
        until = clocks.time_of_day() + timedelta(seconds=seconds)
        return Confirmation(revision, seconds, until, clocks.boot_id(), clocks.uptime() + seconds)

    def seconds_left(self, clocks: Clocks) -> float:
        """Seconds until its end; 0 when it is over."""
        return min(max(self.deadline - clocks.uptime(), 0.0), self.seconds)

    def in_this_boot(self, clocks: Clocks) -> Confirmation:
        """The same with a deadline by the uptime of the current boot. After a reboot the time of day decides
        what is left: nothing, if it is before the acceptance, since then it is wrong."""
        boot_id = clocks.boot_id()
        if boot_id and boot_id == self.boot_id:
            return self
        left = (self.until - clocks.time_of_day()).total_seconds()
        if left > self.seconds:
            left = 0.0
        return replace(self, boot_id=boot_id, deadline=clocks.uptime() + left)

    def view(self, clocks: Clocks) -> dict[str, object]:
        """As JSON for the API: `until` is by the current time of day."""
        left = self.seconds_left(clocks)
        until = time_text(clocks.time_of_day() + timedelta(seconds=left))
        return {"revision": self.revision, "until": until, "seconds_left": math.ceil(left)}

    def to_json(self) -> dict[str, object]:
        """As JSON for the file."""
        return {
            "revision": self.revision,
            "seconds": self.seconds,
            "until": self.until.isoformat(),
            "boot_id": self.boot_id,
            "deadline": self.deadline,
        }

    @staticmethod
    def from_json(value: Mapping[str, object]) -> Confirmation:
        """Reads the output of `to_json`. Raises ValueError."""
        try:
            revision, seconds = int(str(value["revision"])), int(str(value["seconds"]))
            until = datetime.fromisoformat(str(value["until"])).astimezone(UTC)
            deadline = float(str(value["deadline"]))
        except (KeyError, OverflowError) as error:
            raise ValueError(f"the confirmation has no usable {error}") from None
        if not (0 < seconds <= MAX_SECONDS and deadline == deadline):  # not NaN
            raise ValueError("the confirmation has no usable time")
        return Confirmation(revision, seconds, until, str(value.get("boot_id", "")), deadline)
