"""When Python's cyclic garbage collector runs.

Each search walks every object there is: with ten thousand services a tenth of a second to half a second, in
which nothing else is done, and loading them starts a dozen. What is loaded holds no cycles, so that it goes
without a search when nobody needs it any more.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

WORTH_KEEPING = 50_000
"""New objects above which what there is after a load is left out of later searches."""

_guard = threading.Lock()
_loading = 0
_objects = 0
"""How many there were when all of them were searched last."""


@contextmanager
def loading() -> Iterator[None]:
    """No search while something large is loaded, and what there is then is left out of later ones. In any
    thread, also in several at a time."""
    global _loading
    with _guard:
        _loading += 1
        gc.disable()
    try:
        yield
    finally:
        with _guard:
            _loading -= 1
            if gc.get_count()[0] > WORTH_KEEPING:
                _leave_out()
            if not _loading:
                gc.enable()


def leave_out() -> None:
    """What there is now is left out of later searches, but for its garbage and some of what becomes so."""
    with _guard:
        _leave_out()


def _leave_out() -> None:
    """First it is searched itself: garbage that is left out would stay for ever. That costs what is new since
    the last time. What was left out may become garbage later: all is searched again when it has doubled."""
    global _objects
    gc.collect()
    gc.freeze()
    if gc.get_freeze_count() > 2 * _objects + WORTH_KEEPING:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _objects = gc.get_freeze_count()
