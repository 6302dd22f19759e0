"""Weights as a number of equal slots, of which a flow takes one at random or in turn. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import gcd

LARGEST_ERROR = 0.01
"""Maximum deviation of a share from its weight, as a part of all flows."""
LARGEST_RELATIVE_ERROR = 0.25
"""Maximum deviation as a part of the share itself, so that a backend of little weight gets little."""
EXACT_UP_TO = 100
"""Weights that add up to so many slots, once a common divisor is out, are met exactly."""
LADDER = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Other numbers of slots that are tried, few so that services share chains. The last is the limit: no share
is below 1/1024. With more backends than that there are four slots for each."""


@lru_cache(maxsize=4096)
def slot_counts(weights: tuple[int, ...]) -> tuple[int, ...]:
    """The number of slots for each of these weights (each >= 1), at least one.

    Equal weights get one slot each. Others are exact if 100 slots suffice; else no share deviates by more
    than 0.01, nor by more than a quarter of itself, or 1/1024 if that is more.
    """
    divisor = gcd(*weights)
    reduced = tuple(weight // divisor for weight in weights)
    if sum(reduced) <= max(EXACT_UP_TO, len(weights)):
        return reduced
    sizes = [size for size in LADDER if size >= len(weights)] or [4 * len(weights)]
    candidates = [_largest_remainder(reduced, size) for size in sizes]
    return next((found for found in candidates if _close(found, reduced)), candidates[-1])


@lru_cache(maxsize=1024)
def slots(weights: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the weight for each slot."""
    counts = slot_counts(weights)
    return tuple(index for index, count in enumerate(counts) for _ in range(count))


def interleaved(counts: Sequence[int]) -> tuple[int, ...]:
    """The slots of one round, as indices, each index's spread as evenly as whole slots can be."""
    places = [((turn + 0.5) / count, index) for index, count in enumerate(counts) for turn in range(count)]
    return tuple(index for _, index in sorted(places))


def _largest_remainder(weights: tuple[int, ...], size: int) -> tuple[int, ...]:
    """`size` slots, one for each weight and the others by largest remainder of the whole."""
    total = sum(weights)
    exact = [weight * size / total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    missing = size - sum(counts)
    for step in range(missing):
        counts[order[step % len(order)]] += 1
    # Slots that the smallest got beyond their share are taken where they are missed least.
    richest = [(exact[i] - count, i) for i, count in enumerate(counts) if count > 1] if missing < 0 else []
    heapify(richest)
    for _ in range(-missing):
        _, i = heappop(richest)
        counts[i] -= 1
        if counts[i] > 1:
            heappush(richest, (exact[i] - counts[i], i))
    return tuple(counts)


def _close(counts: tuple[int, ...], weights: tuple[int, ...]) -> bool:
    size, total = sum(counts), sum(weights)
    return all(
        abs(count / size - weight / total) <= min(LARGEST_ERROR, LARGEST_RELATIVE_ERROR * weight / total)
        for count, weight in zip(counts, weights, strict=True)
    )
