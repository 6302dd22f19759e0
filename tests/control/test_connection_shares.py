"""Shares follow live flows: bounded in each step, steady in balance, and no backend is left without any."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipd.control.connection_shares import (
    MIN_CHANGE,
    RESOLUTION,
    BackendLoad,
    ShareState,
    next_state,
)

NAMES = "abcdef"
loads = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(BackendLoad, st.integers(1, 65535), st.integers(0, 10**6)),
    max_size=len(NAMES),
)


@given(st.lists(loads, max_size=12))
def test_every_factor_is_a_part_of_the_weight_and_at_least_one_part(
    history: list[dict[str, BackendLoad]],
) -> None:
    state = ShareState()
    for each in history:
        before, state = state, next_state(state, each)
        if state.factors is not before.factors:
            assert state.factors.keys() == (each.keys() if len(each) > 1 else set())
        assert all(Fraction(1, RESOLUTION) <= factor <= 1 for factor in state.factors.values())


@given(st.lists(loads.filter(lambda each: len(each) > 1), min_size=2, max_size=8))
def test_a_step_changes_the_ratio_of_two_backends_four_times_at_most(
    history: list[dict[str, BackendLoad]],
) -> None:
    state = ShareState()
    for each in history:
        before, state = state, next_state(state, each)
        common = before.exact.keys() & state.exact.keys()
        for one in common:
            for other in common:
                ratio = state.exact[one] / state.exact[other] * before.exact[other] / before.exact[one]
                assert ratio <= 4.0001, "one is doubled and the other halved"


@given(loads.filter(lambda each: len(each) > 1))
def test_of_equal_weights_the_backend_with_more_flows_gets_no_larger_share(
    each: dict[str, BackendLoad],
) -> None:
    equal = {name: load._replace(weight=1) for name, load in each.items()}
    exact = next_state(ShareState(), equal).exact
    order = sorted(equal, key=lambda name: equal[name].flows)
    assert all(exact[fewer] >= exact[more] - 1e-9 for fewer, more in pairwise(order))


def simulate(
    seconds: dict[str, float], arrivals: int, steps: int, *, controlled: bool
) -> tuple[dict[str, float], int]:
    """Mean live flows of each backend, and how often shares were written, in the last half of the steps.
    Flows arrive 20 times a step of one second, and last as long as their backend takes."""
    dice, state, ends, writes = Random(7), ShareState(), {name: list[float]() for name in seconds}, 0
    sums = dict.fromkeys(seconds, 0.0)
    for step in range(steps):
        names = list(seconds)
        shares = [float(state.factors.get(name, 1)) for name in names]
        for tick in range(20):
            now = step + tick / 20
            for name in dice.choices(names, shares, k=arrivals // 20):
                ends[name].append(now + seconds[name])
        ends = {name: [end for end in found if end > step + 1] for name, found in ends.items()}
        live = {name: len(found) for name, found in ends.items()}
        if step >= steps // 2:
            sums = {name: sums[name] + live[name] for name in names}
        if controlled:
            before = state.factors
            state = next_state(state, {name: BackendLoad(1, live[name]) for name in names})
            writes += step >= steps // 2 and state.factors is not before
    return {name: total / (steps - steps // 2) for name, total in sums.items()}, writes


@pytest.mark.parametrize(("fast", "ratio"), [(0.1, 5.0), (1.0, 2.5), (8.0, 2.5)])
def test_a_slow_backend_gets_fewer_flows_at_once(fast: float, ratio: float) -> None:
    """Of few flows much is chance, so that they are balanced less."""
    seconds = {"slow": fast * 10, "b": fast, "c": fast, "d": fast}
    arrivals = 1000 if fast < 1 else 200
    alone, _ = simulate(seconds, arrivals, int(60 + 5 * seconds["slow"]), controlled=False)
    found, _ = simulate(seconds, arrivals, int(60 + 5 * seconds["slow"]), controlled=True)
    assert alone["slow"] / alone["b"] > 8
    assert found["slow"] / found["b"] < ratio


def test_equal_backends_are_seldom_written() -> None:
    found, writes = simulate(dict.fromkeys("abc", 1.0), 1000, 100, controlled=True)
    assert max(found.values()) < 1.1 * min(found.values())
    assert writes <= 10


@pytest.mark.parametrize(("fast", "arrivals"), [(1.0, 60), (1.0, 300), (0.2, 1000)])
def test_a_steady_uneven_load_is_seldom_written(fast: float, arrivals: int) -> None:
    """Ten backends, two of them slower. Chance varies the flows all the time, and changes no rules."""
    seconds = {name: fast * (3 if name in "ab" else 1) for name in "abcdefghij"}
    alone, _ = simulate(seconds, arrivals, 240, controlled=False)
    found, writes = simulate(seconds, arrivals, 240, controlled=True)
    assert found["a"] / found["c"] < 0.9 * alone["a"] / alone["c"]
    assert writes <= 30  # of 120 steps


def test_what_chance_does_not_explain_is_written_at_once() -> None:
    even = {"a": BackendLoad(1, 100), "b": BackendLoad(1, 100)}
    state = ShareState()
    for _ in range(5):
        state = next_state(state, even)
    assert not state.factors
    for _ in range(2):
        state = next_state(state, {"a": BackendLoad(1, 500), "b": BackendLoad(1, 100)})
    assert state.factors["a"] <= Fraction(1, 2)


def test_a_slow_backend_among_few_flows_is_found_in_seconds() -> None:
    """Fifteen flows are few, and chance explains much of their number, but not for long that most of them
    wait in one line."""
    waiting = {"slow": BackendLoad(1, 12)} | {name: BackendLoad(1, 1) for name in "abc"}
    state = ShareState()
    for _ in range(6):
        state = next_state(state, waiting)
    assert state.factors["slow"] < Fraction(1, 4)


def test_a_small_change_that_lasts_is_written_once() -> None:
    uneven = {"a": BackendLoad(1, 1200), "b": BackendLoad(1, 1000)}
    states = [ShareState()]
    for _ in range(120):
        states.append(next_state(states[-1], uneven))
    written = [after.factors for before, after in pairwise(states) if after.factors is not before.factors]
    assert len(written) == 1
    assert states[3].factors == {}


def test_a_backend_that_recovers_gets_its_share_back() -> None:
    state = ShareState()
    for _ in range(20):
        state = next_state(state, {"a": BackendLoad(1, 900), "b": BackendLoad(1, 10)})
    assert state.factors == {"a": Fraction(1, RESOLUTION), "b": 1}
    for _ in range(30):
        state = next_state(state, {"a": BackendLoad(1, 0), "b": BackendLoad(1, 0)})
    share = state.factors["a"] / sum(state.factors.values())
    assert share > (1 - MIN_CHANGE) / 2


@pytest.mark.parametrize(("times", "flows"), [(16, 2.0), (81, 3.0)])
def test_a_slower_backend_has_the_promised_ratio_of_flows(times: int, flows: float) -> None:
    """One that takes k times as long for a flow gets the 1 / (1 + EXPONENT)th power of k times the flows."""
    state, share = ShareState(), {"slow": 0.5, "fast": 0.5}
    for _ in range(100):
        live = {"slow": share["slow"] * times * 10**6, "fast": share["fast"] * 10**6}
        loads = {name: BackendLoad(1, round(number)) for name, number in live.items()}
        state = next_state(state, loads)
        total = sum(state.exact.values())
        share = {name: factor / total for name, factor in state.exact.items()}
    assert live["slow"] / live["fast"] == pytest.approx(flows, rel=0.02)


def test_factors_that_changed_little_are_not_written_but_others_of_another_backend_are() -> None:
    loads = {"a": BackendLoad(1, 900), "b": BackendLoad(1, 100), "c": BackendLoad(1, 100)}
    state = ShareState()
    for _ in range(20):
        state = next_state(state, loads)
    assert next_state(state, loads).factors is state.factors
    fewer = next_state(state, {name: loads[name] for name in "ab"})
    assert fewer.factors.keys() == {"a", "b"}
