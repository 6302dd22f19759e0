"""When Python looks for garbage that only a search finds.

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
"""New objects above which what there is after a load is left out of later searches. A cycle there is kept
for ever, so that it is not done after every small change."""

_loading = 0
_guard = threading.Lock()


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
            if not _loading:
                if gc.get_count()[0] > WORTH_KEEPING:
                    gc.freeze()
                gc.enable()
