"""The chi-square test agrees with printed tables of the distribution."""

from __future__ import annotations

import pytest

from tests.lab.chi_square import chi_square_p, upper_tail


@pytest.mark.parametrize(
    ("statistic", "degrees", "probability"),
    [(3.841, 1, 0.05), (5.991, 2, 0.05), (13.816, 2, 0.001), (16.266, 3, 0.001), (18.307, 10, 0.05)],
)
def test_tail_agrees_with_the_tables(statistic: float, degrees: int, probability: float) -> None:
    assert upper_tail(statistic, degrees) == pytest.approx(probability, rel=2e-3)


def test_exact_shares_are_certain() -> None:
    assert chi_square_p({"b1": 300, "b2": 100}, {"b1": 3, "b2": 1}) == 1.0


def test_wrong_shares_are_refused() -> None:
    assert chi_square_p({"b1": 500, "b2": 500}, {"b1": 3, "b2": 1}) < 1e-9


def test_a_backend_without_weight_must_not_answer() -> None:
    assert chi_square_p({"b1": 999, "b2": 1}, {"b1": 1, "b2": 0}) == 0.0
