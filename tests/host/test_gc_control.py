"""While something large is loaded nothing searches for garbage; memory that it freed goes back."""

from __future__ import annotations

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
