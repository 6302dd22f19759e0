"""When removals go, when they are held, and what lets them go."""

from __future__ import annotations

import pytest

from vipd.sources.removal_guard import RemovalDecision, RemovalGuard


def names(first: int, last: int) -> set[str]:
    return {f"s{n}" for n in range(first, last + 1)}


@pytest.mark.parametrize(
    ("percent", "known", "removed", "held"),
    [
        (50, 10, 5, False),
        (50, 10, 6, True),
        (50, 4, 4, False),  # fewer than five are never too many
        (50, 5, 5, True),
        (20, 100, 20, False),
        (20, 100, 21, True),
        (100, 100, 100, False),
        (0, 1000, 5, True),
    ],
)
def test_the_share_that_may_go_at_once(percent: int, known: int, removed: int, held: bool) -> None:
    guard = RemovalGuard(percent)
    asked = frozenset(names(1, removed))
    expected = RemovalDecision(held=asked) if held else RemovalDecision(allowed=asked)
    assert guard.decide(asked, known, 0.0) == expected
    assert guard.held == (asked if held else set())


@pytest.mark.parametrize(("later", "held"), [(9.9, True), (10.0, False)])
def test_removals_count_as_one_for_ten_seconds(later: float, held: bool) -> None:
    guard = RemovalGuard(50)
    guard.decide(names(1, 3), 10, 1000.0)
    assert guard.may_restore("s1")
    assert bool(guard.decide(names(4, 6), 7, 1000.0 + later).held) is held
    assert not guard.may_restore("s1"), "it is held, or gone for good"
    assert guard.may_restore("s4") is not held


def test_what_came_back_comes_back_once() -> None:
    guard = RemovalGuard(50)
    assert guard.decide(names(1, 5), 10, 0.0).allowed
    both = RemovalDecision(held=frozenset({"s6"}), restore=frozenset(names(1, 5)))
    assert guard.decide({"s6"}, 5, 1.0) == both
    assert guard.held == names(1, 6)
    assert guard.decide({"s7"}, 9, 2.0) == RemovalDecision(held=frozenset({"s7"}))


def test_what_went_before_it_was_accepted_counts_no_more() -> None:
    guard = RemovalGuard(50)
    guard.decide(names(1, 5), 10, 0.0)
    guard.accept()
    assert guard.decide(names(6, 7), 5, 1.0).allowed == names(6, 7)


def test_while_something_is_held_everything_else_is_too() -> None:
    guard = RemovalGuard(50)
    guard.decide(names(1, 9), 10, 0.0)
    assert guard.decide({"s10"}, 1, 1000.0).held == {"s10"}
    for n in range(1, 10):
        guard.key_written(f"s{n}")
    assert guard.held == {"s10"}, "other keys that are written let nothing go"
    assert guard.accept() == {"s10"}
    assert guard.decide({"s1"}, 9, 1000.0).allowed == {"s1"}, "a new account begins"


def test_a_key_written_again_does_not_count_as_removed() -> None:
    guard = RemovalGuard(50)
    for n in range(1, 30):
        assert guard.decide({"s1"}, 10, float(n) / 10).allowed == {"s1"}
        guard.key_written("s1")
    strict = RemovalGuard(0)
    strict.decide(names(1, 4), 10, 0.0)
    for n in range(1, 5):
        strict.key_written(f"s{n}")
    assert strict.decide(names(5, 8), 10, 1.0).allowed == names(5, 8)


def test_what_is_held_already_is_not_judged_again() -> None:
    guard = RemovalGuard(50)
    guard.decide(names(1, 9), 10, 0.0)
    assert guard.decide(names(1, 9), 1, 1.0) == RemovalDecision()


def folders(**sizes: int) -> set[str]:
    return {f"{folder}/s{n}" for folder, size in sizes.items() for n in range(size)}


def folder_guard() -> RemovalGuard:
    return RemovalGuard(50, author_of=lambda key: key.rpartition("/")[0])


def test_removals_of_one_folder_restore_none_of_another() -> None:
    guard = folder_guard()
    assert guard.decide({"b/s0"}, {"a": 10, "b": 8}, 0.0).allowed
    assert guard.decide(folders(a=4), {"a": 10, "b": 7}, 1.0).allowed
    later = guard.decide({"a/s4", "a/s5"}, {"a": 6, "b": 7}, 2.0)
    assert (later.held, later.restore) == (frozenset({"a/s4", "a/s5"}), frozenset(folders(a=4)))
    assert guard.may_restore("b/s0")


@pytest.mark.parametrize(
    "sizes",
    [
        {"a": 4, "b": 4, "c": 1},
        {"a": 90, "b": 2},  # the large one is held by itself
        {f"f{n}": 1 for n in range(5)},
    ],
)
def test_a_wipe_of_everything_holds_small_folders_too(sizes: dict[str, int]) -> None:
    assert folder_guard().decide(folders(**sizes), sizes, 0.0).held == folders(**sizes)


def test_a_wipe_key_by_key_holds_small_folders() -> None:
    guard, left = folder_guard(), {f"f{n}": 2 for n in range(6)}
    for key in sorted(folders(**left)):
        guard.decide({key}, {**left}, 0.0)
        if key not in guard.held:
            left[key[:2]] -= 1
    assert guard.held == folders(**{f"f{n}": 2 for n in range(6)})


def test_small_folders_may_vanish_beside_many_that_stay() -> None:
    guard = folder_guard()
    assert guard.decide(folders(a=4, b=4), {"a": 4, "b": 4, "c": 100}, 0.0).allowed == folders(a=4, b=4)
