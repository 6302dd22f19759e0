"""Exceptions that nobody expected: what is told of them, and one traceback in the log for each place."""

from __future__ import annotations

import logging
import traceback

log = logging.getLogger(__name__)

_MOST_PLACES = 256
_logged: set[tuple[type[BaseException], str, int]] = set()


def internal_error(where: str, error: Exception) -> str:
    """`internal error: ...; please report it`. Its traceback is logged, but once for each place."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    place = (type(error), frames[0].filename, frames[0].lineno or 0) if frames else (type(error), "", 0)
    if place not in _logged:
        if len(_logged) >= _MOST_PLACES:
            _logged.clear()
        _logged.add(place)
        log.error("%s: this is a fault in vipd; please report it", where, exc_info=error)
    return f"internal error: {type(error).__name__}: {error}"[:200] + "; please report it"
