"""The search for garbage pauses while something large is loaded, and leaves it out afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from vipd.collecting import WORTH_KEEPING, loading


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The process of the tests is as before."""
    yield
    gc.unfreeze()
    assert gc.isenabled()


def test_nothing_is_searched_while_something_is_loaded() -> None:
    with loading():
        assert not gc.isenabled()
        with loading():
            pass
        assert not gc.isenabled(), "the outer load goes on"
    assert gc.isenabled()


def test_a_load_in_another_thread_goes_on_when_one_ends() -> None:
    ends, begun = threading.Event(), threading.Event()

    def other() -> None:
        with loading():
            begun.set()
            ends.wait(10)

    thread = threading.Thread(target=other)
    with loading():
        thread.start()
        assert begun.wait(10)
    assert not gc.isenabled()
    ends.set()
    thread.join(10)
    assert gc.isenabled()


def test_it_is_searched_again_after_a_load_that_failed() -> None:
    with pytest.raises(KeyError), loading():
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize("many", [False, True])
def test_only_what_is_large_is_left_out_of_later_searches(many: bool) -> None:
    gc.collect()
    before = gc.get_freeze_count()
    with loading():
        loaded = [[number] for number in range(2 * WORTH_KEEPING if many else 100)]
    assert (gc.get_freeze_count() - before > len(loaded)) is many
