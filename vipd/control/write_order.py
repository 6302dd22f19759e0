"""Decides which changes wait for a later step, so that small ones do not wait for large ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Protocol

LARGE = 1000
"""Work of a forwarding (`Forwarding.work`) above which it is large: iptables-nft-restore is quadratic in the
jumps of a chain."""

MAX_WORK_PER_STEP = 5000
"""Work of the large forwardings that one step writes, unless a single one is more."""

Changes = Mapping[ForwardingKey, Forwarding | None]
Before = Callable[[ForwardingKey], Forwarding | None]
"""Returns the dataplane's current forwarding in the place of a change."""
FrontendTuple = tuple[str, int, Protocol]
"""An address, or "" for the host itself, with a port of it."""


class WriteOrder:
    """Divides changes among steps.

    If small and large changes coincide, the small ones are written first. The large ones follow some at a
    time, the longest waiting ones first; while small changes continue, every other step writes large
    ones.
    """

    def __init__(self) -> None:
        self._gave_way = False
        """The last step wrote none of the large changes."""
        self._waiting: dict[ForwardingKey, int] = {}
        """The changes that it postponed, with their turn."""

    def postponed(self, changes: Changes, before: Before) -> Changes:
        """The changes to leave for a later step, each with the dataplane's current forwarding in its place.

        A large change is never separated from one that has, or had, the same address and port: a frontend
        that moves from one service to another is never missing, and never in both.
        """
        large = {
            key: f.compile_cost() for key, f in changes.items() if f is not None and f.compile_cost() > LARGE
        }
        shared = _shared(changes, before) if large else frozenset()
        movable = [key for key in large if shared.isdisjoint(_frontends(changes[key], before(key)))]
        movable.sort(key=lambda key: self._waiting.get(key, len(self._waiting)))
        gives_way = len(movable) < len(changes) and not self._gave_way
        later = movable if gives_way else movable[_count_within_limit([large[key] for key in movable]) :]
        self._gave_way = bool(later) and gives_way
        self._waiting = {key: turn for turn, key in enumerate(later)}
        return {key: before(key) for key in later}


def _count_within_limit(works: Sequence[int]) -> int:
    """How many of the first ones a step may write."""
    total = 0
    for count, work in enumerate(works):
        total += work
        if count and total > MAX_WORK_PER_STEP:
            return count
    return len(works)


def _shared(changes: Changes, before: Before) -> frozenset[FrontendTuple]:
    """Places that more than one of the changes is about."""
    count = Counter(place for key, f in changes.items() for place in set(_frontends(f, before(key))))
    return frozenset(place for place, changing in count.items() if changing > 1)


def _frontends(*forwardings: Forwarding | None) -> Iterator[FrontendTuple]:
    """Addresses and ports from which rules lead to these. A health port is not included: vipd itself answers
    there."""
    for forwarding in forwardings:
        if forwarding is None:
            continue
        port, protocol = forwarding.port, forwarding.key.protocol
        for address in forwarding.addresses:
            yield address, port, protocol
        for external in forwarding.external_addresses:
            yield external.address, port, protocol
        if forwarding.node_port:
            yield "", forwarding.node_port, protocol
