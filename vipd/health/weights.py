"""Which share a healthy backend takes: its declared weight, what it says itself, and the slow start. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from vipd.health.result import SaidWeight
from vipd.model.service import MAX_WEIGHT

STEPS = 10
"""A share grows in so many steps: each of them is a change of rules."""


class Ramp(NamedTuple):
    """How far a slow start has come."""

    step: int
    """1..STEPS: so many tenths of the full share."""
    next_step: float | None
    """When it goes on; None when it has its full share."""


FULL = Ramp(STEPS, None)


def ramp(healthy_since: float | None, slow_start: float, now: float) -> Ramp:
    """How far a backend is that is healthy (again) since then; None: no slow start.

    One tenth at once, the full share after nine tenths of `slow_start` seconds: the last tenth of the time is
    that of the last step.
    """
    if healthy_since is None or slow_start <= 0 or now >= healthy_since + slow_start:
        return FULL
    starts = [healthy_since + slow_start * step / STEPS for step in range(1, STEPS)]
    later = [start for start in starts if start > now]
    return Ramp(STEPS - len(later), later[0]) if later else FULL


class Claim(NamedTuple):
    """What decides on one backend's share."""

    declared: int
    """Its declared weight, or an operator's."""
    said: SaidWeight | None = None
    """What it says itself, where its service listens to that."""
    healthy_since: float | None = None
    """`Verdict.serves_since`."""


def weights(claims: Sequence[Claim], slow_start: float, now: float) -> tuple[tuple[int, ...], float | None]:
    """The weights of all backends of a service, in order, and when they change by themselves.

    Weights mean something beside each other alone. So that a tenth of a weight of 1 is a tenth, all are made
    larger alike while some backend has a part of its weight only; else they are as declared. Each is
    0..65535, and 0 only for a weight that was declared or said to be 0.
    """
    ramps = [ramp(claim.healthy_since, slow_start, now) for claim in claims]
    exact = [_wanted(claim) * r.step / STEPS for claim, r in zip(claims, ramps, strict=True)]
    steps = [r.next_step for r in ramps if r.next_step is not None]
    return _whole(exact), min(steps, default=None)


def full_weight(claim: Claim) -> int:
    """The weight of a backend that has its full share, whatever scale `weights` has to use."""
    return _at_least_one(_wanted(claim))


def _wanted(claim: Claim) -> Fraction:
    if claim.said is None:
        return Fraction(claim.declared)
    return (
        Fraction(claim.declared * claim.said.value, 100) if claim.said.percent else Fraction(claim.said.value)
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
