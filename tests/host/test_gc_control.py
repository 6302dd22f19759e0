"""While something large is loaded nothing searches for garbage; memory that it freed goes back."""

from __future__ import annotations

import gc
import subprocess
import sys

PATIENCE = 120.0


def printed(code: str) -> list[str]:
    """What a process of its own prints: what is left out of searches stays out, and the heap is for good."""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return [
        *done.stdout.splitlines(),
        *(line for line in done.stderr.splitlines() if line.startswith("Arena ")),
    ]


LOADS = """
import gc, weakref
from vipd.host.gc_control import FREEZE_THRESHOLD, gc_paused
class Cycle:
    def __init__(self):
        self.itself = self
searches = []
gc.callbacks.append(lambda phase, _: searches.append(phase))
with gc_paused(), gc_paused():
    garbage = weakref.ref(Cycle())
    loaded = [[n] for n in range(2 * FREEZE_THRESHOLD)]
    print(len(searches), gc.isenabled())
print(gc.isenabled(), garbage())
most = gc.get_freeze_count()
print(most > len(loaded))
for _ in range(30):
    cycles = [Cycle() for _ in range(most // 2)]
    with gc_paused():
        loaded = [[n] for n in range(2 * FREEZE_THRESHOLD)]
    cycles.clear()
print(gc.get_freeze_count() < 8 * most)
try:
    with gc_paused():
        raise KeyError
except KeyError:
    print(gc.isenabled())
"""


def test_a_large_load_is_not_searched_meanwhile_nor_later_and_keeps_no_garbage() -> None:
    """Also where loads come again and again, of 15 times as much were it never found."""
    assert printed(LOADS) == ["0 False", "True None", "True", "True", "True"]
    assert gc.isenabled()


MEMORY = """
from pathlib import Path
from vipd.host.gc_control import gc_paused
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
before = resident()
with gc_paused():
    kept = [[n] for n in range(300_000)]
    spent = [bytes(300) for _ in range(300_000)]
    last = bytes(300)
    most = resident()
    del spent
print(resident() < before + (most - before) * 0.8)
"""
HEAPS = """
import ctypes, threading
from vipd.host.gc_control import use_one_heap
def allocate():
    global kept
    kept = [bytes(1000) for _ in range(1000)]
use_one_heap()
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
ctypes.CDLL(None).malloc_stats()
"""


def test_memory_goes_back_to_the_system_and_threads_share_one_heap() -> None:
    assert printed(MEMORY) == ["True"]
    assert len(printed(HEAPS)) == 1
    assert len(printed(HEAPS.replace("\nuse_one_heap()", ""))) == 2, "as it were without"
