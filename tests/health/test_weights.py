"""The arithmetic of shares: they grow in steps and end at the full one, and what a backend says counts."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from vipd.health.result import ReportedWeight
from vipd.health.weights import WeightInputs, weights
from vipd.model.service import MAX_WEIGHT

said = st.none() | st.builds(ReportedWeight, st.integers(0, 100), st.just(True))
said |= st.builds(ReportedWeight, st.integers(0, MAX_WEIGHT), st.just(False))
factors = st.integers(1, 32).map(lambda part: Fraction(part, 32))
claims = st.lists(
    st.builds(WeightInputs, st.integers(0, MAX_WEIGHT), said, st.none() | st.floats(0, 100), factors),
    min_size=1,
    max_size=6,
)


def test_shares_of_two_backends() -> None:
    one, three, four = WeightInputs(1), WeightInputs(3), WeightInputs(4)
    young = WeightInputs(1, healthy_since=100.0)
    half, none = ReportedWeight(50, percent=True), ReportedWeight(0, percent=True)
    cases = [
        # A tenth of a weight of one is a tenth.
        ((one, young), 100.0, (10, 1), 106.0),
        ((one, young), 131.0, (5, 3), 136.0),
        ((one, young), 160.0, (1, 1), None),
        # What is said replaces or divides what is declared.
        ((four._replace(reported=ReportedWeight(7)), four), 0.0, (7, 4), None),
        ((three._replace(reported=half), three), 0.0, (1, 2), None),
        ((three._replace(reported=none), three), 0.0, (0, 3), None),
        ((three._replace(reported=ReportedWeight(0)),), 0.0, (0,), None),
        ((three._replace(reported=half), WeightInputs(60_000)), 0.0, (1, 40_000), None),
        ((), 0.0, (), None),
    ]
    wrong = [case for case in cases if weights(case[0], 60, case[1]) != case[2:]]
    assert wrong == []
    assert weights((one, young), 0, 100.0) == ((1, 1), None), "without a slow start"


@given(claims, st.integers(0, 60), st.floats(0, 200))
def test_weights_stay_in_range_and_zero_only_for_zero(
    all_claims: list[WeightInputs], slow_start: int, now: float
) -> None:
    found, _ = weights(all_claims, slow_start, now)
    for claim, weight in zip(all_claims, found, strict=True):
        assert 0 <= weight <= MAX_WEIGHT
        zero = (
            claim.reported.value == 0
            if claim.reported and not claim.reported.percent
            else claim.declared == 0
        )
        if claim.reported and claim.reported.percent:
            zero = zero or claim.reported.value == 0
        assert (weight == 0) == zero
