"""Pearson's chi-square test, exactly and without a library."""

from __future__ import annotations

from collections.abc import Mapping
from math import erfc, exp, factorial, gamma, pow, sqrt


def chi_square_p(observed: Mapping[str, int], weights: Mapping[str, int]) -> float:
    """How likely a split at least this far from the weights is by chance, 0..1.

    0 when a backend outside `weights` was observed. Weights of 0 are impossible outcomes too.
    """
    possible = {name: weight for name, weight in weights.items() if weight}
    if any(times and name not in possible for name, times in observed.items()):
        return 0.0
    flows, total = sum(observed.values()), sum(possible.values())
    statistic = 0.0
    for name, weight in possible.items():
        expected = flows * weight / total
        statistic += (observed.get(name, 0) - expected) ** 2 / expected
    return upper_tail(statistic, len(possible) - 1)


def upper_tail(statistic: float, degrees: int) -> float:
    """P(X >= statistic) for chi-square with this many degrees of freedom (closed form for whole degrees)."""
    if degrees == 0:
        return 1.0
    half = statistic / 2
    if degrees % 2 == 0:
        return exp(-half) * sum(half**i / factorial(i) for i in range(degrees // 2))
    series = sum(pow(half, i + 0.5) / gamma(i + 1.5) for i in range((degrees - 1) // 2))
    return erfc(sqrt(half)) + exp(-half) * series
