"""Contains unexpected exceptions in the part that they belong to: each is logged once, and named in status
until it is over.

For parts of vipd. An exception of a unit becomes a problem of it (`declaration.problems`), one of a
service quarantines it (`reconciler`), and `supervisor` handles failing loops.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.systemd.fields import Event, fields

log = logging.getLogger(__name__)

_MAX_LOGGED = 256
_logged: set[tuple[type[BaseException], str, int]] = set()


class Containment:
    """Current unexpected failures."""

    def __init__(self) -> None:
        self._faults: dict[tuple[str, str], str] = {}
        self.failures = 0
        """Total number of such exceptions."""

    @contextmanager
    def contain(self, part: str, doing: str) -> Iterator[None]:
        """An unexpected exception in the block is a fault of this part of vipd, and ends nothing else. The
        fault is over when a later block of the same name succeeds. Both names are constants of the program,
        not input."""
        try:
            yield
        except Exception as error:
            self.failures += 1
            self._failed((part, doing), error)
        else:
            if self._faults.pop((part, doing), ""):
                recovered = fields(Event.TASK_RECOVERED, cause=part, reason=f"{doing} works again")
                log.info("%s: %s works again", part, doing, extra=recovered)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each part that fails now."""
        return tuple(self._faults.values())

    def _failed(self, place: tuple[str, str], error: Exception) -> None:
        part, doing = place
        reason = internal_error(error, doing)
        fault = f"{part}: {reason}; {PLEASE_REPORT}"
        if self._faults.get(place) != fault:
            extra = fields(Event.TASK_FAILED, cause=part, reason=reason)
            log.error("%s", fault, extra=extra, exc_info=error)
        self._faults[place] = fault


def log_once(error: Exception, doing: str) -> str:
    """The text of `internal_error`. Logs its traceback, but once for each place in the program."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    place = (type(error), frames[0].filename, frames[0].lineno or 0) if frames else (type(error), "", 0)
    found = internal_error(error, doing)
    if place not in _logged:
        if len(_logged) >= _MAX_LOGGED:
            _logged.clear()
        _logged.add(place)
        log.error("%s; %s", found, PLEASE_REPORT, exc_info=error)
    return found
