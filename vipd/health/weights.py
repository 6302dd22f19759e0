"""Computes the weight of a healthy backend: declared weight, reported weight, and slow start. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from vipd.health.result import ReportedWeight
from vipd.model.service import MAX_WEIGHT

SLOW_START_STEPS = 10
"""Number of steps in which a slow start raises a share. Each step changes rules."""


class Ramp(NamedTuple):
    """Progress of a slow start."""

    step: int
    """1..`SLOW_START_STEPS`: tenths of the full share."""
    next_step: float | None
    """Time of the next step; None at the full share."""


FULL_SHARE = Ramp(SLOW_START_STEPS, None)


def ramp(healthy_since: float | None, slow_start: float, now: float) -> Ramp:
    """The slow start's progress for a backend that became healthy at `healthy_since`; None: no slow start.

    The backend gets one tenth of its share at once, and one more tenth after each tenth of `slow_start`
    seconds. So it has its full share after nine tenths of that time.
    """
    if healthy_since is None or slow_start <= 0 or now >= healthy_since + slow_start:
        return FULL_SHARE
    starts = [healthy_since + slow_start * step / SLOW_START_STEPS for step in range(1, SLOW_START_STEPS)]
    later = [start for start in starts if start > now]
    return Ramp(SLOW_START_STEPS - len(later), later[0]) if later else FULL_SHARE


class WeightInputs(NamedTuple):
    """What the weight of one backend is computed from."""

    declared: int
    """Its declared weight, or that of an operator's override."""
    reported: ReportedWeight | None = None
    """The weight that it reports, if its service accepts that."""
    healthy_since: float | None = None
    """`HealthRecord.serves_since`."""
    factor: Fraction = Fraction(1)
    """The part of its weight that its live flows leave it, more than 0."""


def weights(
    inputs: Sequence[WeightInputs], slow_start: float, now: float
) -> tuple[tuple[int, ...], float | None]:
    """The weights of all backends of a service, in order, and the time of the next step of a slow start.

    Only the ratio of weights matters. While some backend has only a part of its weight, all weights are
    multiplied by the same factor, so that even a tenth of the weight 1 is a whole number. Otherwise they are
    as declared. Each is 0..65535, and 0 only for a declared or reported weight of 0.
    """
    ramps = [ramp(each.healthy_since, slow_start, now) for each in inputs]
    exact = [
        _exact_weight(each) * each.factor * r.step / SLOW_START_STEPS
        for each, r in zip(inputs, ramps, strict=True)
    ]
    steps = [r.next_step for r in ramps if r.next_step is not None]
    return _whole(exact), min(steps, default=None)


def full_weight(inputs: WeightInputs) -> int:
    """The weight of a backend with its full share, without the factor that `weights` may multiply by."""
    return _at_least_one(_exact_weight(inputs))


def _exact_weight(inputs: WeightInputs) -> Fraction:
    if inputs.reported is None:
        return Fraction(inputs.declared)
    return (
        Fraction(inputs.declared * inputs.reported.value, 100)
        if inputs.reported.percent
        else Fraction(inputs.reported.value)
    )


def _whole(exact: Sequence[Fraction]) -> tuple[int, ...]:
    scale = lcm(*(weight.denominator for weight in exact))
    if scale == 1:
        return tuple(int(weight) for weight in exact)
    whole = [int(weight * scale) for weight in exact]
    divisor = gcd(*whole) or 1
    largest = max(whole) // divisor
    if largest <= MAX_WEIGHT:
        return tuple(weight // divisor for weight in whole)
    return tuple(_at_least_one(Fraction(weight * MAX_WEIGHT, largest * divisor)) for weight in whole)


def _at_least_one(weight: Fraction) -> int:
    return max(round(weight), 1) if weight else 0
