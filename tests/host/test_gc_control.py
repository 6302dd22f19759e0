"""The search for garbage pauses while something large is loaded, and leaves out afterwards what is none."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import run

import pytest

from vipd.host import gc_control as collecting
from vipd.host.gc_control import FREEZE_THRESHOLD, freeze_objects, gc_paused, use_one_heap


class Cycle:
    """Garbage, once nobody else knows it, that only a search finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_loaded_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As at the start of a daemon. What a test leaves out of searches stays out, or each search of the tests
    after it would walk all that they have imported."""
    monkeypatch.setattr(collecting, "_frozen", 0)
    monkeypatch.setattr(collecting, "_excluded", 0)
    yield
    assert gc.isenabled()


def in_new_process(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a process where few objects are left out of searches. In that of all tests it is a
    million, and the test makes as many new ones."""
    code = f"from {test.__module__} import {test.__name__} as test; test.__wrapped__()"

    @functools.wraps(test)
    def wrapper() -> None:
        done = run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return wrapper


def test_nothing_is_searched_while_something_is_loaded() -> None:
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled(), "the outer load goes on"
    assert gc.isenabled()


def test_a_load_in_another_thread_goes_on_when_one_ends() -> None:
    ends, begun = threading.Event(), threading.Event()

    def other() -> None:
        with gc_paused():
            begun.set()
            ends.wait(10)

    thread = threading.Thread(target=other)
    with gc_paused():
        thread.start()
        assert begun.wait(10)
    assert not gc.isenabled()
    ends.set()
    thread.join(10)
    assert gc.isenabled()


def test_it_is_searched_again_after_a_load_that_failed() -> None:
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize("many", [False, True])
def test_only_what_is_large_is_left_out_of_later_searches(many: bool) -> None:
    gc.collect()
    before = gc.get_freeze_count()
    with gc_paused():
        loaded = [[number] for number in range(2 * FREEZE_THRESHOLD if many else 100)]
    assert (gc.get_freeze_count() - before > len(loaded)) is many


def load(extra: int = 100) -> list[list[int]]:
    """Something large."""
    with gc_paused():
        return [[number] for number in range(FREEZE_THRESHOLD + extra)]


def test_garbage_that_a_load_finds_or_makes_is_not_kept() -> None:
    with gc_off():
        old = weakref.ref(Cycle())
        with gc_paused():
            new = weakref.ref(Cycle())
            loaded = load()
    assert (old(), new()) == (None, None)
    assert loaded


@in_new_process
def test_much_that_becomes_garbage_is_found_when_as_much_is_loaded_again() -> None:
    load()
    most = gc.get_freeze_count()
    for _ in range(30):
        cycles = [Cycle() for _ in range(most // 2)]
        load()
        cycles.clear()
        assert gc.get_freeze_count() < 8 * most, "of 15 times as many, were it never found"


@in_new_process
def test_one_large_load_is_searched_once() -> None:
    freeze_objects()
    searches: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: searches.append(None))
        loaded = [load(gc.get_freeze_count() + FREEZE_THRESHOLD), load()]
    assert searches == []
    assert all(loaded)


def test_loads_that_overlap_for_ever_let_no_garbage_grow() -> None:
    with gc_paused(), gc_paused():
        seen = weakref.ref(Cycle())
        load()
        assert seen() is None


def test_the_start_of_the_daemon_leaves_out_no_garbage() -> None:
    with gc_off():
        seen = weakref.ref(Cycle())
        freeze_objects()
    assert seen() is None
    assert gc.get_freeze_count()


@contextmanager
def gc_off() -> Iterator[None]:
    """No search by itself."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("many", [False, True])
def test_what_a_large_load_freed_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    kept: list[int] = []
    monkeypatch.setattr(collecting, "_malloc_trim", kept.append)
    loaded = load(100 if many else 100 - FREEZE_THRESHOLD)
    assert kept == ([0] if many else [])
    assert loaded


def test_without_glibc_the_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "_malloc_trim", None)
    monkeypatch.setattr(collecting, "_mallopt", None)
    use_one_heap()
    assert load()


def test_threads_allocate_from_one_heap() -> None:
    """In a process of its own: the setting is for good."""
    code = """
import ctypes, threading
from vipd.host.gc_control import use_one_heap
def allocate():
    global kept
    kept = [bytes(1000) for _ in range(1000)]
if {used}:
    use_one_heap()
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
ctypes.CDLL(None).malloc_stats()
"""
    heaps = [
        run([sys.executable, "-c", code.format(used=used)], capture_output=True, text=True, check=True)
        for used in (True, False)
    ]
    assert [found.stderr.count("Arena ") for found in heaps] == [1, 2]
