"""Exceptions that nobody expected while checks run: one traceback in the log for each place."""

from __future__ import annotations

import logging
import traceback

from vipd.declaration.problems import PLEASE_REPORT, internal_error

log = logging.getLogger(__name__)

_MOST_PLACES = 256
_logged: set[tuple[type[BaseException], str, int]] = set()


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
