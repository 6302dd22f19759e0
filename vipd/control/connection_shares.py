"""Computes the shares of `balance: least-connections` from the live flows of each backend. Pure.

A dataplane chooses a backend at random by weight. This controller multiplies each weight by a factor, which
falls as the backend has more live flows than its weight entitles it to. The factor that a number of flows
leads to is the `EXPONENT`th power of expected flows by live flows. Each step goes a `SMOOTHING`th part of the
way there, on a logarithmic scale. Where flows are shorter than a step, live flows follow the factor at once,
and these two numbers together lead to the balance in one step; they do not oscillate:
log f' = (1 - SMOOTHING) log f - SMOOTHING * EXPONENT * log f = 0 * log f. Where flows are long, the factor
approaches its goal, and no sum of past errors has to be worked off.

Rules are written only for a change that matters. Live flows vary by chance, by the square root of their
number, and so do the factors. A change that is larger than chance is published at once. A smaller one has to
last: it is published when the mean of the last steps has moved, and as that mean, which varies less.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import copysign, exp, log, sqrt
from types import MappingProxyType
from typing import NamedTuple

EXPONENT = 3.0
"""A backend that takes k times as long for a flow gets k ** (1 / (1 + EXPONENT)) times the flows at once."""
SMOOTHING = 1 / (1 + EXPONENT)
MAX_STEP = 2.0
"""Maximum change of a factor in one step."""
RESOLUTION = 32
"""Factors are whole parts of this; the smallest is one part, so that no backend is left without flows."""
DAMPING = 4.0
"""Flows that are added to each side of a ratio, so that single flows change little."""
MIN_CHANGE = 0.15
"""A lasting change of shares below this part of each share is not worth writing rules."""
MEMORY = 1 / 16
"""Weight of one step in the mean of a factor."""
LASTING, SUDDEN = 1.0, 2.5
"""What a change of the mean, and of one step, must exceed: in parts of the root of a backend's flows."""
MIN_SUDDEN_CHANGE = 0.5
"""A change of shares below this part of each share is not published before it lasts."""

Factors = Mapping[str, Fraction]
"""By the backend's text. A backend without an entry has its full weight."""


class BackendLoad(NamedTuple):
    """The measure of one backend that may get new flows."""

    weight: float
    """Its weight before the factor, with slow start; more than 0. Only the ratio to others matters."""
    flows: int
    """Its live flows."""


class ShareState(NamedTuple):
    """The controller's memory for one service."""

    exact: Mapping[str, float] = MappingProxyType({})
    """Factors as computed; the largest is 1."""
    mean: Mapping[str, float] = MappingProxyType({})
    """Logarithms of the means of these over some steps."""
    factors: Factors = MappingProxyType({})
    """Factors as last published."""


def full_backends(
    before: frozenset[str], limits: Mapping[str, int], flows: Mapping[str, int]
) -> frozenset[str]:
    """The backends that have their maximum of flows. One that was full is so until a twentieth of them has
    ended: else its rules would be written anew for each flow. `limits`: by the backend's text."""
    return frozenset(
        name
        for name, most in limits.items()
        if flows.get(name, 0) >= (most - max(1, most // 20) + 1 if name in before else most)
    )


def next_state(state: ShareState, loads: Mapping[str, BackendLoad]) -> ShareState:
    """The state one step later. `factors` is the same object unless the shares change enough to be written.

    A backend that was not measured before starts at its full weight. One that is not measured any more is
    dropped.
    """
    if len(loads) < 2:
        return ShareState(factors={} if state.factors else state.factors)
    exact = _normalized({name: _approach(state.exact.get(name, 1.0), goal) for name, goal in _goals(loads)})
    mean = {name: _mean(state.mean.get(name), log(factor)) for name, factor in exact.items()}
    sudden, lasting = _rounded(exact), _rounded(_normalized({name: exp(each) for name, each in mean.items()}))
    other_backends = bool(state.factors) and state.factors.keys() != exact.keys()
    if other_backends or _worth_writing(state.factors, sudden, loads, MIN_SUDDEN_CHANGE, SUDDEN):
        return ShareState(exact, {name: log(factor) for name, factor in exact.items()}, sudden)
    if _worth_writing(state.factors, lasting, loads, MIN_CHANGE, LASTING):
        return ShareState(exact, mean, lasting)
    return ShareState(exact, mean, state.factors)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + MEMORY * (now - before)


def _rounded(factors: Mapping[str, float]) -> Factors:
    return {
        name: Fraction(max(1, round(RESOLUTION * factor)), RESOLUTION) for name, factor in factors.items()
    }


def _goals(loads: Mapping[str, BackendLoad]) -> list[tuple[str, float]]:
    flows, weights = sum(load.flows for load in loads.values()), sum(load.weight for load in loads.values())
    goals = []
    for name, load in loads.items():
        expected = flows * load.weight / weights
        goals.append(
            (name, ((expected + DAMPING) / (_without_noise(load.flows, expected) + DAMPING)) ** EXPONENT)
        )
    return goals


def _without_noise(flows: int, expected: float) -> float:
    """The flows, nearer to the expected number by its standard deviation: so much is chance."""
    deviation = flows - expected
    return expected + copysign(max(0.0, abs(deviation) - sqrt(expected)), deviation)


def _approach(factor: float, goal: float) -> float:
    step: float = (goal / factor) ** SMOOTHING
    return factor * min(max(step, 1 / MAX_STEP), MAX_STEP)


def _normalized(factors: dict[str, float]) -> dict[str, float]:
    largest = max(factors.values())
    return {name: max(factor / largest, 1 / RESOLUTION) for name, factor in factors.items()}


def _worth_writing(
    before: Factors, after: Factors, loads: Mapping[str, BackendLoad], least: float, chance: float
) -> bool:
    old, new = _shares(before, loads), _shares(after, loads)
    total = sum(load.flows for load in loads.values())

    def matters(name: str) -> bool:
        flows = total * old[name]
        return abs(new[name] / old[name] - 1) > max(least, chance * sqrt(flows) / (flows + DAMPING))

    return any(map(matters, loads))


def _shares(factors: Factors, loads: Mapping[str, BackendLoad]) -> dict[str, float]:
    parts = {name: load.weight * float(factors.get(name, 1)) for name, load in loads.items()}
    total = sum(parts.values())
    return {name: part / total for name, part in parts.items()}
