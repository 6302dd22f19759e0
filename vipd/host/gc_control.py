"""Controls when Python's cyclic garbage collector runs, and when freed memory goes back to the system.

Each collection walks all objects: with ten thousand services a tenth of a second to half a second, in
which nothing else runs, and loading them starts a dozen. Loaded objects contain no cycles, so they are freed
without a collection when they are no longer used.

The texts and tables of a load leave holes among what stays, which the C library keeps.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FREEZE_THRESHOLD = 50_000
"""New objects above which all objects after a load are excluded from later collections."""

_libc = ctypes.CDLL(None)
_malloc_trim = getattr(_libc, "malloc_trim", None)
_mallopt = getattr(_libc, "mallopt", None)
"""Only of glibc."""
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
"""Of glibc's malloc.h."""
_LARGE_BYTES = 256 * 1024

_guard = threading.Lock()
_pauses = 0
_frozen = 0
"""Number of excluded objects that are known to have been no garbage: those of the last full collection, and
of loads that were larger."""
_excluded = 0
"""Number of excluded objects after the last freeze."""


@contextmanager
def gc_paused(*, temporary: bool = False) -> Iterator[None]:
    """No collection while something large is loaded; afterwards all objects are excluded from later ones, and
    the memory that the load has freed is returned. In any thread, also in several at a time. `temporary`: the
    caller drops what was loaded within a pause of its own, so that it need not be excluded."""
    global _pauses
    with _guard:
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _guard:
            _pauses -= 1
            if not temporary and gc.get_count()[0] > FREEZE_THRESHOLD:
                _freeze()
                return_freed_memory()
            if not _pauses:
                gc.enable()


def use_one_heap() -> None:
    """Let all threads allocate from one heap. The C library makes one for each thread, with holes of its own;
    Python's lock keeps threads from allocating at the same time anyway. Call it before they start."""
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)
        # Long answers and bodies get pages of their own, which go back as they are freed. By itself the
        # library would soon take up to 32 MiB from the heap, where what lies above keeps the pages.
        _mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_freed_memory() -> None:
    """Return the pages that contain nothing any more to the system. A few milliseconds; other threads run."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def freeze_objects() -> None:
    """Exclude current objects from later collections, except for garbage. Once, before large loads: the
    first of those counts them."""
    with _guard:
        gc.collect()
        gc.freeze()


def _freeze() -> None:
    """A collection runs first: excluded garbage would stay for ever. It costs the objects that are new since
    the last time. Excluded objects may become garbage later: when their number has doubled, all are collected
    again. A single load that doubles it is no reason: its objects have just been seen to be no garbage."""
    global _frozen, _excluded
    if not _frozen:  # all that has been excluded so far was seen to be no garbage
        _frozen = _excluded = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    count = gc.get_freeze_count()  # walks them all: 25 ms for 10,000 services
    loaded = count - _excluded
    if _excluded > 2 * _frozen + FREEZE_THRESHOLD:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _frozen = count = gc.get_freeze_count()
    elif loaded > _frozen:
        _frozen += loaded
    _excluded = count
