"""Exceptions that nobody expected, each caught where it belongs: logged once, named in status until it is
over.

For what belongs to a part of vipd. What belongs to a unit is a problem of it (`declaration.problems`), what
belongs to a service is a quarantine of it (`reconciler`), and a loop that fails is `supervisor`'s.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.systemd.fields import Event, fields

log = logging.getLogger(__name__)

_MOST_PLACES = 256
_logged: set[tuple[type[BaseException], str, int]] = set()


class Containment:
    """What fails now in a way that nobody expected."""

    def __init__(self) -> None:
        self._faults: dict[tuple[str, str], str] = {}
        self.failures = 0
        """How many such exceptions there were."""

    @contextmanager
    def around(self, part: str, doing: str) -> Iterator[None]:
        """An unexpected exception in the block is a fault of this part of vipd, and ends nothing else. The
        fault is over when a later block of the same name ends well. Both names come from the program, not
        from input."""
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
    """What `internal_error` says of it. Its traceback is logged, but once for each place in the program."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    place = (type(error), frames[0].filename, frames[0].lineno or 0) if frames else (type(error), "", 0)
    found = internal_error(error, doing)
    if place not in _logged:
        if len(_logged) >= _MOST_PLACES:
            _logged.clear()
        _logged.add(place)
        log.error("%s; %s", found, PLEASE_REPORT, exc_info=error)
    return found
