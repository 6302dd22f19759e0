"""Decides which changes a later step writes, so that small changes do not wait for large ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Protocol

LARGE = 1000
"""A forwarding whose `Forwarding.compile_cost` is above this is large: the time of iptables-nft-restore is
quadratic in the jumps of a chain."""

MAX_WORK_PER_STEP = 5000
"""Maximum sum of `compile_cost` of the large forwardings that one step writes. A step may write a single
forwarding above it."""

ForwardingChanges = Mapping[ForwardingKey, Forwarding | None]
Before = Callable[[ForwardingKey], Forwarding | None]
"""Returns the forwarding that the dataplane has now for the key of a change."""
FrontendTuple = tuple[str, int, Protocol]
"""An address (empty for a node port of this host), a port and its protocol."""


class WriteOrder:
    """Divides changes among steps.

    If a step has small and large changes, it writes the small ones. Later steps write the large ones, a few
    in each, the longest waiting ones first. While new small changes arrive, every other step writes large
    ones.
    """

    def __init__(self) -> None:
        self._gave_way = False
        """Whether the last step postponed all large changes in favour of small ones."""
        self._waiting: dict[ForwardingKey, int] = {}
        """The changes that the last step postponed, each with its place in the queue."""

    def postponed(self, changes: ForwardingChanges, before: Before) -> ForwardingChanges:
        """The keys of the changes to leave for a later step, each with the dataplane's current forwarding.

        A large change is never separated from another change of the same address and port, before or after.
        So a frontend that moves from one service to another is never missing, and never in both.
        """
        large = {
            key: f.compile_cost() for key, f in changes.items() if f is not None and f.compile_cost() > LARGE
        }
        shared = _shared_frontends(changes, before) if large else frozenset()
        movable = [key for key in large if shared.isdisjoint(_frontends(changes[key], before(key)))]
        movable.sort(key=lambda key: self._waiting.get(key, len(self._waiting)))
        gives_way = len(movable) < len(changes) and not self._gave_way
        later = movable if gives_way else movable[_count_within_limit([large[key] for key in movable]) :]
        self._gave_way = bool(later) and gives_way
        self._waiting = {key: turn for turn, key in enumerate(later)}
        return {key: before(key) for key in later}


def _count_within_limit(works: Sequence[int]) -> int:
    """How many forwardings, from the first on, one step may write."""
    total = 0
    for count, work in enumerate(works):
        total += work
        if count and total > MAX_WORK_PER_STEP:
            return count
    return len(works)


def _shared_frontends(changes: ForwardingChanges, before: Before) -> frozenset[FrontendTuple]:
    """Frontends that more than one of the changes has, before or after it."""
    count = Counter(place for key, f in changes.items() for place in set(_frontends(f, before(key))))
    return frozenset(place for place, changing in count.items() if changing > 1)


def _frontends(*forwardings: Forwarding | None) -> Iterator[FrontendTuple]:
    """The addresses and ports whose packets the rules send to these forwardings. A health port is not
    included, because vipd itself answers there."""
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
