"""Shares grow in steps and end at the full one; what a backend says counts beside what is declared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dataplane.fake_dataplane import FakeDataplane
from tests.model.samples import service
from vipd.control.backend_status_tracker import BackendStatusTracker, TargetHealth
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.health.result import ReportedWeight, parse_weight
from vipd.health.weights import SLOW_START_STEPS, WeightInputs, ramp, weights
from vipd.model.check import Check, TcpProbe
from vipd.model.check_target import CheckTarget
from vipd.model.service import MAX_WEIGHT, Backend, Family, Masquerade, Protocol, ServicePort
from vipd.observe.endpoint_views import backend_status_by_address, forwarding_view

TCP = Protocol.TCP

said = st.none() | st.builds(ReportedWeight, st.integers(0, 100), st.just(True))
said |= st.builds(ReportedWeight, st.integers(0, MAX_WEIGHT), st.just(False))
factors = st.integers(1, 32).map(lambda part: Fraction(part, 32))
claims = st.lists(
    st.builds(WeightInputs, st.integers(0, MAX_WEIGHT), said, st.none() | st.floats(0, 100), factors),
    min_size=1,
    max_size=6,
)


@given(st.integers(0, MAX_WEIGHT), st.floats(0, 1e6), st.integers(1, 3600))
def test_a_share_grows_step_by_step_to_its_full(weight: int, since: float, slow_start: int) -> None:
    both = (WeightInputs(weight), WeightInputs(weight, healthy_since=since))
    now, seen = since, []
    while True:
        found, next_step = weights(both, slow_start, now)
        seen.append(found)
        if next_step is None:
            break
        assert now < next_step < since + slow_start
        assert weights(both, slow_start, (now + next_step) / 2)[0] == found
        now = next_step
    steps = range(1, SLOW_START_STEPS + 1)
    assert [young * SLOW_START_STEPS for _, young in seen] == [
        old * step for (old, _), step in zip(seen, steps, strict=True)
    ]
    assert all(young >= 1 for _, young in seen) or weight == 0
    assert weights(both, slow_start, since + slow_start) == ((weight, weight), None)


def test_without_slow_start_the_share_is_full_at_once() -> None:
    assert ramp(None, 60, 5.0) == (SLOW_START_STEPS, None)
    assert ramp(5.0, 0, 5.0) == (SLOW_START_STEPS, None)
    assert ramp(5.0, 60, 5.0) == (1, 11.0)


def test_a_tenth_of_a_weight_of_one_is_a_tenth() -> None:
    both = (WeightInputs(1), WeightInputs(1, healthy_since=100.0))
    assert weights(both, 60, 100.0) == ((10, 1), 106.0)
    assert weights(both, 60, 131.0) == ((5, 3), 136.0)
    assert weights(both, 60, 160.0) == ((1, 1), None)


def test_what_is_said_replaces_or_divides_what_is_declared() -> None:
    assert weights((WeightInputs(4, ReportedWeight(7)), WeightInputs(4)), 0, 0.0) == ((7, 4), None)
    assert weights((WeightInputs(3, ReportedWeight(50, True)), WeightInputs(3)), 0, 0.0) == ((1, 2), None)
    assert weights((WeightInputs(3, ReportedWeight(0, True)), WeightInputs(3)), 0, 0.0) == ((0, 3), None)
    assert weights((WeightInputs(3, ReportedWeight(0)),), 0, 0.0) == ((0,), None)
    assert weights((), 0, 0.0) == ((), None)
    assert weights((WeightInputs(3, ReportedWeight(50, True)), WeightInputs(60_000)), 0, 0.0) == (
        (1, 40_000),
        None,
    )


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


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", ReportedWeight(0)),
        (" 65535 ", ReportedWeight(65535)),
        ("50%", ReportedWeight(50, True)),
        ("100%", ReportedWeight(100, True)),
        ("65536", None),
        ("101%", None),
        ("-1", None),
        ("1.5", None),
        ("", None),
        ("٣", None),
        ("²", None),
        ("00004", ReportedWeight(4)),
        ("000000000004", ReportedWeight(4)),
        ("0065536", None),
        ("007%", ReportedWeight(7, True)),
        ("0" * 100, ReportedWeight(0)),
        ("\t5 ", ReportedWeight(5)),
        ("\N{NO-BREAK SPACE}5", None),
        ("+5", None),
        ("1_0", None),
    ],
)
def test_a_weight_is_read_or_refused(text: str, wanted: ReportedWeight | None) -> None:
    assert parse_weight(text) == wanted


@dataclass
class Asked:
    """Checks that all say the same but for when a backend came back and what it says itself."""

    since: dict[str, float]
    says: dict[str, ReportedWeight]

    def follow(self, service: str, targets: Collection[CheckTarget], author: str = "") -> None:
        pass

    def status(self, target: CheckTarget) -> TargetHealth:
        weight = self.says.get(target.address)
        return SimpleNamespace(
            state="healthy",
            counts_healthy=True,
            reason="",
            weight=weight,
            serves_since=self.since.get(target.address),
        )


def shown(
    since: dict[str, float], says: dict[str, ReportedWeight] | None = None
) -> dict[str, tuple[object, ...]]:
    """The weight, the share in percent and the reason that the API shows of each backend, at 106 seconds."""
    checking = Asked(since, says or {})
    backends = tuple(Backend(address, 80, weight) for address, weight in (("b1", 1), ("b2", 1), ("b3", 3)))
    backends = tuple(replace(b, address=f"10.0.0.{b.address[1]}") for b in backends)
    made = service("web", "10.96.0.1")
    made = replace(made, ports=(ServicePort(80, TCP),), backends=backends, check=Check(TcpProbe()))
    made = replace(made, slow_start=60, weight_from_check=bool(says))
    fitness = BackendStatusTracker((), checking, lambda: 106.0)
    fitness.follow({"web": made})
    backend_statuses = fitness.backend_statuses(made)
    (forwarding,) = select_backends(made, SelectionPolicy({Family.IPV4: Masquerade.ALWAYS}), backend_statuses)
    view = forwarding_view(
        forwarding, FakeDataplane(), backend_status_by_address(made, forwarding, backend_statuses)
    )
    endpoints = cast("list[dict[str, object]]", view["endpoints"])
    return {
        str(e["address"]): (e["weight"], round(100 * cast("float", e["share"])), e["reason"])
        for e in endpoints
    }


def test_a_slow_start_shows_the_declared_weights_of_all_and_is_the_reason_of_its_own_alone() -> None:
    everyone = {"10.0.0.1": (1, 20, ""), "10.0.0.2": (1, 20, ""), "10.0.0.3": (3, 60, "")}
    assert shown({}) == everyone
    assert shown({"10.0.0.2": 100.0}) == {
        "10.0.0.1": (1, 24, ""),
        "10.0.0.2": (1, 5, "slow start"),
        "10.0.0.3": (3, 71, ""),
    }
    assert shown({"10.0.0.2": 0.0}) == everyone


def test_a_weight_that_a_backend_says_is_shown_as_it_says_it() -> None:
    found = shown({}, {"10.0.0.3": ReportedWeight(50, True), "10.0.0.1": ReportedWeight(7)})
    assert found == {
        "10.0.0.1": (7, 74, "weight 7 said by its check"),
        "10.0.0.2": (1, 11, ""),
        "10.0.0.3": (2, 16, "weight 50% said by its check"),
    }
