"""Weights become slots: each backend has one, and shares are as the weights say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipd.dataplane.slots import LADDER, LARGEST_ERROR, slot_counts, slots
from vipd.model.service import MAX_WEIGHT

weights = st.lists(st.integers(1, MAX_WEIGHT), min_size=1, max_size=60).map(tuple)


@given(weights)
def test_no_share_is_off_by_more_than_one_percent(given_weights: tuple[int, ...]) -> None:
    counts = slot_counts(given_weights)
    for count, weight in zip(counts, given_weights, strict=True):
        assert count >= 1
        assert abs(count / sum(counts) - weight / sum(given_weights)) <= LARGEST_ERROR


@given(weights)
def test_small_shares_stay_small(given_weights: tuple[int, ...]) -> None:
    counts = slot_counts(given_weights)
    total = sum(given_weights)
    for count, weight in zip(counts, given_weights, strict=True):
        assert count / sum(counts) <= max(1.25 * weight / total, weight / total + 1 / LADDER[-1]) + 1e-9


@given(st.integers(1, 3000), st.integers(1, MAX_WEIGHT))
def test_equal_weights_get_a_slot_each(backends: int, weight: int) -> None:
    assert slot_counts((weight,) * backends) == (1,) * backends


@pytest.mark.parametrize(
    ("given_weights", "counts"),
    [((3, 1), (3, 1)), ((100, 50, 50), (2, 1, 1)), ((1, 99), (1, 99)), ((7, 11, 13), (7, 11, 13))],
)
def test_simple_ratios_are_exact(given_weights: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert slot_counts(given_weights) == counts


@given(weights)
def test_slots_are_never_more_than_needed(given_weights: tuple[int, ...]) -> None:
    assert len(slots(given_weights)) <= max(LADDER[-1], len(given_weights))


def test_many_backends_of_unlike_weight_each_get_a_slot() -> None:
    counts = slot_counts((*(1,) * 2000, 500))
    assert min(counts) >= 1
    assert abs(counts[-1] / sum(counts) - 500 / 2500) <= LARGEST_ERROR
