"""When to repair, and when to complain."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from vipd.dataplane.iptables.watch.external_change import Actor
from vipd.dataplane.iptables.watch.repair_backoff import (
    MAX_PAUSE_SECONDS,
    REPAIRS_WITHOUT_PAUSE,
    WINDOW_SECONDS,
    RepairBackoff,
)

FIREWALLD = Actor("firewalld", 812)


def undo_at_once(peace: RepairBackoff, times: int, start: float = 0.0) -> tuple[list[float], float]:
    """Somebody undoes each repair at once: the pauses that came of it, and the time after the last."""
    now, pauses = start, []
    for _ in range(times):
        due = peace.record_change([FIREWALLD], now)
        pauses.append(due - now)
        now = due
        peace.record_repair(True, now)
    return pauses, now


def test_the_first_repairs_are_made_at_once_then_pauses_double() -> None:
    pauses, _ = undo_at_once(RepairBackoff(), 12)
    assert pauses == [0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 30, 30]
    for times in (REPAIRS_WITHOUT_PAUSE - 1, REPAIRS_WITHOUT_PAUSE):
        peace = RepairBackoff()
        _, now = undo_at_once(peace, times)
        assert bool(peace.warnings(now)) is (times == REPAIRS_WITHOUT_PAUSE), "it comes with the pauses"


def test_the_warning_says_who_how_often_and_what_to_do() -> None:
    peace = RepairBackoff("KUBE")
    _, now = undo_at_once(peace, 8)
    (warning,) = peace.warnings(now)
    expected = (
        "firewalld (pid 812) has undone vipd's rules 8 times in 7 s; repairing after 8 s each time; hint: "
    )
    assert warning.startswith(expected)
    assert "FlushAllOnReload" in warning
    for number in range(REPAIRS_WITHOUT_PAUSE):
        peace.record_change([], now + number)
        peace.record_repair(True, now + number)
    unknown = peace.warnings(now + 5)[1]
    assert unknown.startswith("another program has undone")
    assert unknown.endswith("hint: make it leave the chains KUBE-* and the jumps to them alone")


def test_quiet_makes_peace() -> None:
    peace = RepairBackoff()
    _, now = undo_at_once(peace, 20)
    assert peace.warnings(now + WINDOW_SECONDS - 0.1)
    assert peace.warnings(now + WINDOW_SECONDS) == ()
    assert peace.record_change([FIREWALLD], now + WINDOW_SECONDS) == now + WINDOW_SECONDS


def test_a_quarrel_of_a_day_is_kept_in_little_room() -> None:
    """Pauses last although they make repairs rare: at 30 s fewer than five are within the window."""
    tracemalloc.start()
    try:
        peace = RepairBackoff()
        pauses, now = undo_at_once(peace, 2880)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert set(pauses[11:]) == {MAX_PAUSE_SECONDS}
    assert kept < 200_000, "one number for each pause is the test's own"
    assert "firewalld (pid 812) has undone vipd's rules 2880 times in " in peace.warnings(now)[0]


def test_culprits_by_ever_new_names_are_few() -> None:
    peace = RepairBackoff()
    for number in range(10_000):
        peace.record_change([Actor(f"p{number}", number)], 0.001 * number)
        if not number % 3:
            peace.record_repair(True, 0.001 * number)
    warnings = peace.warnings(10.0)
    assert len(warnings) < 100
    assert "another program has undone" in " ".join(warnings)


def test_now_and_then_is_no_quarrel() -> None:
    peace = RepairBackoff()
    for number in range(100):
        now = number * WINDOW_SECONDS / (REPAIRS_WITHOUT_PAUSE - 1)
        assert peace.record_change([FIREWALLD], now) == now
        peace.record_repair(True, now)
    assert peace.warnings(now) == ()


def test_harmless_disturbances_blame_nobody() -> None:
    peace = RepairBackoff()
    for number in range(100):
        assert peace.record_change([FIREWALLD], number / 10) == number / 10
        peace.record_repair(False, number / 10)
    assert peace.warnings(10.0) == ()
    assert peace.due is None


def test_more_disturbances_do_not_put_a_repair_off() -> None:
    peace = RepairBackoff()
    _, now = undo_at_once(peace, 9)
    due = peace.record_change([FIREWALLD], now)
    assert due == now + 16
    assert peace.record_change([FIREWALLD], now + 10) == due == peace.due


def test_a_newcomer_is_repaired_at_once_during_anothers_pause() -> None:
    peace = RepairBackoff()
    _, now = undo_at_once(peace, 9)
    assert peace.record_change([FIREWALLD], now) > now
    assert peace.record_change([Actor("bash", 5)], now + 1) == now + 1


_steps = st.lists(
    st.tuples(
        st.sampled_from(["wait", "disturb", "repair"]),
        st.sampled_from(["a", "b", ""]),
        st.one_of(st.floats(0, 3), st.floats(0, 100)),
        st.booleans(),
    ),
    max_size=80,
)


@given(_steps)
def test_however_it_goes(steps: list[tuple[str, str, float, bool]]) -> None:
    """Never later than the longest pause, never before it happened, and always peace after quiet."""
    peace, now, wrote_after = RepairBackoff(), 0.0, dict[str, list[float]]()
    waiting: set[str] = set()
    for verb, name, seconds, wrote in steps:
        now += seconds
        if verb == "disturb":
            fresh = peace.due is None
            due = peace.record_change([Actor(name, 1)] if name else [], now)
            waiting.add(name)
            assert due == peace.due
            assert due <= now + MAX_PAUSE_SECONDS
            if fresh:
                assert due >= now
            recent = [at for at in wrote_after.get(name, ()) if now - at < WINDOW_SECONDS]
            if not recent:
                assert due <= now, "nobody without a record is made to wait"
        elif verb == "repair" and peace.due is not None and peace.due <= now:
            peace.record_repair(wrote, now)
            for each in waiting if wrote else ():
                wrote_after.setdefault(each, []).append(now)
            waiting.clear()
            assert peace.due is None
    if peace.due is not None:
        peace.record_repair(False, now)
    assert peace.warnings(now + WINDOW_SECONDS) == ()
