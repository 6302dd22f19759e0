"""Computes the weight of a healthy backend: declared weight, reported weight, and slow start. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from vipd.health.result import ReportedWeight
from vipd.model.service import MAX_WEIGHT

STEPS = 10
"""Number of steps in which a share grows: each is a change of rules."""


class Ramp(NamedTuple):
    """Progress of a slow start."""

    step: int
    """1..STEPS: tenths of the full share."""
    next_step: float | None
    """Time of the next step; None at the full share."""


FULL_SHARE = Ramp(STEPS, None)


def ramp(healthy_since: float | None, slow_start: float, now: float) -> Ramp:
    """The progress of a backend that is healthy (again) since then; None: no slow start.

    One tenth at once, the full share after nine tenths of `slow_start` seconds: the last tenth of the time
    belongs to the last step.
    """
    if healthy_since is None or slow_start <= 0 or now >= healthy_since + slow_start:
        return FULL_SHARE
    starts = [healthy_since + slow_start * step / STEPS for step in range(1, STEPS)]
    later = [start for start in starts if start > now]
    return Ramp(STEPS - len(later), later[0]) if later else FULL_SHARE


class WeightInputs(NamedTuple):
    """Inputs of one backend's share."""

    declared: int
    """Its declared weight, or an operator's."""
    reported: ReportedWeight | None = None
    """The weight that it reports, if its service accepts that."""
    healthy_since: float | None = None
    """`HealthStatus.serves_since`."""


def weights(
    claims: Sequence[WeightInputs], slow_start: float, now: float
) -> tuple[tuple[int, ...], float | None]:
    """The weights of all backends of a service, in order, and when they next change with time.

    Only the ratio of weights matters. So that a tenth of a weight of 1 is a tenth, all are multiplied by
    the same factor while some backend has only a part of its weight; else they are as declared. Each is
    0..65535, and 0 only for a declared or reported weight of 0.
    """
    ramps = [ramp(claim.healthy_since, slow_start, now) for claim in claims]
    exact = [_wanted(claim) * r.step / STEPS for claim, r in zip(claims, ramps, strict=True)]
    steps = [r.next_step for r in ramps if r.next_step is not None]
    return _whole(exact), min(steps, default=None)


def full_weight(claim: WeightInputs) -> int:
    """The weight of a backend that has its full share, whatever scale `weights` has to use."""
    return _at_least_one(_wanted(claim))


def _wanted(claim: WeightInputs) -> Fraction:
    if claim.reported is None:
        return Fraction(claim.declared)
    return (
        Fraction(claim.declared * claim.reported.value, 100)
        if claim.reported.percent
        else Fraction(claim.reported.value)
    )


def _whole(exact: Sequence[Fraction]) -> tuple[int, ...]:
    scale = lcm(*(weight.denominator for weight in exact)) if exact else 1
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
