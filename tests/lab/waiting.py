"""How a test waits: for a condition, never for a time. For code inside an event loop see `simulated_time`."""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_SECONDS = 90.0
"""Limit for what takes a moment on an idle machine; a busy one may need this long."""


def wait_until(
    condition: Callable[[], object], what: str | Callable[[], str], timeout: float = SOON_SECONDS
) -> float:
    """Return once `condition()` is true, with the seconds that took.

    Raises AssertionError with `what` after `timeout` seconds. A callable `what` is called only then, to show
    the last state.
    """
    start, pause = time.monotonic(), 0.02
    while not condition():
        if time.monotonic() - start >= timeout:
            raise AssertionError(f"not within {timeout:g} s: {what() if callable(what) else what}")
        time.sleep(pause)
        pause = min(1.25 * pause, 0.1)  # to ask all the time costs more than what is waited for
    return time.monotonic() - start
