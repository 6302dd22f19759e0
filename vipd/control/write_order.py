"""Decides which changes a later step writes, so that small changes do not wait for large ones, nor those of
an author for a load of another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Protocol

LARGE = 1000
"""A forwarding whose `Forwarding.compile_cost` is above this is large: the time of iptables-nft-restore is
quadratic in the jumps of a chain."""

MAX_WORK_PER_STEP = 5000
"""Maximum sum of `compile_cost` of the large forwardings that one step writes. A step may write a single
forwarding above it."""

MAX_SMALL_PER_STEP = 2000
"""Maximum sum of the work of the other forwardings that one step writes, as far as it can divide them."""

ForwardingChanges = Mapping[ForwardingKey, Forwarding | None]
Before = Callable[[ForwardingKey], Forwarding | None]
"""Returns the forwarding that the dataplane has now for the key of a change."""
FrontendTuple = tuple[str, int, Protocol]
"""An address (empty for a node port of this host), a port and its protocol."""


class _Change(NamedTuple):
    """What matters of a change."""

    wanted: Forwarding | None
    cost: int
    work: int
    frontends: tuple[FrontendTuple, ...]
    """Those before it and after it."""


class WriteOrder:
    """Divides changes among steps.

    If a step has small and large changes, it writes the small ones. Later steps write the large ones, a few
    in each, the longest waiting ones first. While new small changes arrive, every other step writes large
    ones. If there are too many small ones for a step, each author has a share of it.
    """

    def __init__(self) -> None:
        self._gave_way = False
        """Whether the last step postponed all large changes in favour of small ones."""
        self._waiting: dict[ForwardingKey, int] = {}
        """The changes that the last step postponed, each with its place in the queue."""
        self._known: dict[ForwardingKey, _Change] = {}
        """The same changes, so that tens of thousands are not examined again with each step."""

    def postponed(
        self, changes: ForwardingChanges, before: Before, author: Callable[[str], str] = lambda _: ""
    ) -> ForwardingChanges:
        """The keys of the changes to leave for a later step, each with the dataplane's current forwarding.
        `author` returns whose share a service's changes take. Takes a second for a hundred thousand changes.

        A large change is never separated from another change of the same address and port, before or after.
        So a frontend that moves from one service to another is never missing, and never in both.
        """
        known = {key: self._change(key, wanted, before) for key, wanted in changes.items()}
        large = {key: change.cost for key, change in known.items() if change.cost > LARGE}
        many = sum(change.work for key, change in known.items() if key not in large) > MAX_SMALL_PER_STEP
        shared = _shared_frontends(known.values()) if large or many else frozenset()
        movable = [key for key in large if shared.isdisjoint(known[key].frontends)]
        movable.sort(key=lambda key: self._waiting.get(key, len(self._waiting)))
        gives_way = len(movable) < len(changes) and not self._gave_way
        later = movable if gives_way else movable[_count_within_limit([large[key] for key in movable]) :]
        self._gave_way = bool(later) and gives_way
        if many:
            small = {key: known[key] for key, wanted in changes.items() if wanted and key not in large}
            later = [*later, *self._beyond_shares(small, shared, author)]
        self._waiting = {key: turn for turn, key in enumerate(later)}
        self._known = {key: known[key] for key in later}
        return {key: before(key) for key in later}

    def _change(self, key: ForwardingKey, wanted: Forwarding | None, before: Before) -> _Change:
        change = self._known.get(key)
        if change is None or change.wanted is not wanted:
            cost = wanted.compile_cost() if wanted else 0
            frontends = tuple({*_frontends(wanted, before(key))})
            change = _Change(wanted, cost, 1 + cost // 10, frontends)
        return change

    def _beyond_shares(
        self,
        small: Mapping[ForwardingKey, _Change],
        shared: frozenset[FrontendTuple],
        author: Callable[[str], str],
    ) -> list[ForwardingKey]:
        """The small changes beyond their authors' shares of a step: what an author with few leaves of an
        equal share, the others have."""
        by_author: dict[str, list[ForwardingKey]] = {}
        for key in sorted(small, key=lambda key: self._waiting.get(key, len(self._waiting))):
            if shared.isdisjoint(small[key].frontends):
                by_author.setdefault(author(key.service), []).append(key)
        works = {name: [small[key].work for key in keys] for name, keys in by_author.items()}
        later, room = list[ForwardingKey](), MAX_SMALL_PER_STEP
        order = sorted(by_author, key=lambda name: sum(works[name]))
        for position, name in enumerate(order):
            count = _count_within_limit(works[name], room // (len(order) - position))
            room -= sum(works[name][:count])
            later += by_author[name][count:]
        return later


def _count_within_limit(works: Sequence[int], limit: int = MAX_WORK_PER_STEP) -> int:
    """How many forwardings, from the first on, one step may write: at least one."""
    total = 0
    for count, work in enumerate(works):
        total += work
        if count and total > limit:
            return count
    return len(works)


def _shared_frontends(changes: Iterable[_Change]) -> frozenset[FrontendTuple]:
    """Frontends that more than one of the changes has, before or after it."""
    count = Counter(place for change in changes for place in change.frontends)
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
