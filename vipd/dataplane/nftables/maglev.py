"""Maps each hash value to a backend, the same on every host: a lookup table like Maglev's. Pure.

It is filled differently from Maglev's (Eisenbud and others, NSDI 2016, section 3.4): with as few places as a
kernel map should have, that moved up to 0.09 of all clients besides those of a removed backend (measured, 5
backends, 1,021 places). Here every place proposes to the backends in its own order, and each backend keeps
those that it prefers, as many as its weight allows. Such a matching does not depend on the order of the
proposals, so the table follows from names and weights alone. Measured over 1 to 30 backends, with equal and
other weights, each one removed in turn: up to 0.015 of all clients move besides its own.

A place seldom proposes to more than a few backends. So only the nearest ones of each place are computed, and
more only for those places that all of them reject.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import shake_128
from heapq import heappush, heappushpop
from itertools import accumulate, count
from math import ceil, exp, expm1, inf, log
from operator import add
from sys import byteorder

FEW_BACKENDS = 100
SIZES = (4093, 16381)
"""Places for up to 100 backends, and for more. Few sizes, so that services share chains: when the number of
backends passes 100, most clients move."""
SLACK, RELATIVE_SLACK = 0.0005, 0.1
"""What a backend may get above its share, as a part of all places, or of its share if that is less: fewer
places are then rejected, and rejected places are those that move when another backend is removed."""

NEAREST = (4, 20)
"""Backends computed for each place at first, on average: of few backends, and of a thousand and more, where a
second round takes longer. Each round computes four times as many."""

_LARGEST = 2**32 - 1
_RANGE = 2**32 + 1
_MOST = 1 << 24
"""More backends than there ever are."""

Candidate = tuple[float, int]
"""The distance of a backend, and its index."""


def table_size(backends: int) -> int:
    """Number of places of the table for this many backends."""
    return SIZES[backends > FEW_BACKENDS]


@lru_cache(maxsize=256)
def lookup_table(names: tuple[str, ...], weights: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a backend for each place. Names are distinct; weights are >= 1.

    The order of the names has no effect on the result. A backend's part of the places is its part of
    the weights, with an error of up to 0.007 of all places as measured.

    3,000 backends take about one second of processor time (of it, hashing takes 0.4 s), too much for an
    event loop, and 30 MB.
    """
    size, total = table_size(len(names)), sum(weights)
    shares = [weight / total for weight in weights]
    quotas = [ceil(size * (share + min(SLACK, RELATIVE_SLACK * share))) for share in shares]
    held: list[list[tuple[float, int]]] = [[] for _ in names]
    orders: list[Iterator[Candidate]] = [iter(())] * size
    asking, nearest = list(range(size)), min(max(len(names) // 64, NEAREST[0]), NEAREST[1])
    alike = len(set(weights)) == 1
    while asking:
        far = _radius(weights, nearest)
        drawn = _drawn(names, [exp(-far * weight) for weight in weights], asking, size)
        for place in asking:
            # Start again from the nearest: those that rejected it do so again.
            orders[place] = _in_order(drawn[place], weights, far, alike)
        asking = [left for place in asking if (left := _ask(place, orders, held, quotas)) >= 0]
        nearest *= 4
    owner = {place: index for index, kept in enumerate(held) for _, place in kept}
    return tuple(owner[place] for place in range(size))


def _in_order(drawn: list[int], weights: Sequence[int], far: float, alike: bool) -> Iterator[Candidate]:
    """The backends up to this distance, nearest first; `alike`: all have one weight, so that the drawn
    numbers have their order. A generator: most places propose to few."""
    drawn.sort(key=None if alike else lambda each: _candidate(each, weights))
    for each in drawn:
        candidate = _candidate(each, weights)
        if candidate[0] > far:
            return
        yield candidate


def _candidate(drawn: int, weights: Sequence[int]) -> Candidate:
    """Converts a drawn number to a distance: pseudorandom and exponential, with the weight as its
    rate."""
    rest, index = divmod(drawn, _MOST)
    return -log((_LARGEST - rest + 1) / _RANGE) / weights[index], index


def _ask(
    place: int,
    orders: Sequence[Iterator[Candidate]],
    held: Sequence[list[tuple[float, int]]],
    quotas: Sequence[int],
) -> int:
    """A place proposes to backends until one keeps it; then any place that it displaced continues. Returns
    the place that has reached the end of its order, or -1."""
    while True:
        distance, index = next(orders[place], (inf, -1))
        if index < 0:
            return place
        offer = (-distance, place)
        if len(held[index]) < quotas[index]:
            heappush(held[index], offer)
            return -1
        place = heappushpop(held[index], offer)[1]


def _radius(weights: Sequence[int], nearest: int) -> float:
    """The distance within which a place has about so many backends on average; infinite for all of them."""
    if nearest >= len(weights):
        return inf
    far, numbers = nearest / sum(weights), Counter(weights)
    while sum(-expm1(-far * weight) * number for weight, number in numbers.items()) < 0.95 * nearest:
        far *= 1.2
    return far


def _drawn(names: Sequence[str], least: Sequence[float], places: Sequence[int], size: int) -> list[list[int]]:
    """Drawn numbers of the backends for these places: all above the `least` part of their range, and a few
    more. Each as its difference from the largest number, times `_MOST`, plus the index."""
    found: list[list[int]] = [[] for _ in range(size)]
    for index, name in enumerate(names):
        data = shake_128(f"vipd {name}".encode()).digest(4 * size)
        numbers = array("I", data)
        if byteorder == "little":
            numbers.byteswap()
        # Mostly the first of four bytes decides which is less.
        first = max(int(least[index] * 256 - 0.001), 0)
        lowest = int(least[index] * _RANGE) - 2
        few = len(places) * 256 < size * (256 - first)
        for place in places if few or not first else _at_least(first, data[::4]):
            if (number := numbers[place]) >= lowest:
                found[place].append((_LARGEST - number) * _MOST + index)
    return found


def _at_least(least: int, data: bytes) -> Iterable[int]:
    """Positions of the bytes that are not less."""
    parts = data.translate(bytes(least) + b"\xff" * (256 - least)).split(b"\xff")
    return map(add, accumulate(map(len, parts[:-1])), count())
