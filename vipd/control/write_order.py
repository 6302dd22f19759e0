"""Decides which changes a later step writes, so that small changes do not wait for large ones, nor those of
an author for a load of another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Frontend, Protocol, Service

LARGE = 1000
"""A forwarding whose `Forwarding.compile_cost` is above this is large: the time of iptables-nft-restore is
quadratic in the jumps of a chain."""

MAX_WORK_PER_STEP = 5000
"""Maximum sum of `compile_cost` of the large forwardings that one step writes. A step may write a single
forwarding above it."""

MAX_SMALL_PER_STEP = 2000
"""Maximum sum of the work of the other forwardings that one step writes, as far as it can divide them. A
forwarding is 1, and each four endpoints are one more, as measured with iptables."""

MIN_SMALL_PER_STEP = 250
STEP_SECONDS = 0.5
"""What a step should take while services wait for their turn."""

GetService = Callable[[str], Service | None]
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
            change = _Change(wanted, cost, 1 + cost // 4, frontends)
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


class Backlog:
    """Services that have changed, and are selected and written by a later step.

    Of very many that change at once a step takes a share of each author, and none of whoever has more than
    that, if it has changes of others; the next step takes some then. A change is never separated from another
    one of the same frontend, before or after.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, int]] = {}
        """By author the services, each with its work."""
        self._frontends: dict[str, tuple[Frontend, ...]] = {}
        """Of each waiting service, before and after its change."""
        self._holders: dict[Frontend, str] = {}
        """The waiting service that has a frontend."""
        self._authors: dict[str, str] = {}
        self._gave_way = False
        self._most = MAX_SMALL_PER_STEP

    @property
    def services(self) -> Collection[str]:
        """Those that wait."""
        return self._authors.keys()

    def stepped(self, seconds: float) -> None:
        """A step has taken so long: while services wait, the next ones take more or less work."""
        if self._authors:
            factor = min(2.0, max(0.5, STEP_SECONDS / max(seconds, 0.001)))
            self._most = round(min(MAX_SMALL_PER_STEP, max(MIN_SMALL_PER_STEP, self._most * factor)))

    def clear(self) -> list[str]:
        """All that wait, which wait no longer."""
        services = list(self._authors)
        for name in services:
            self._leave(name)
        return services

    def divide(
        self,
        changed: Collection[str],
        before: GetService,
        after: GetService,
        author: Callable[[Service], str] = lambda service: service.origin.author,
    ) -> list[str]:
        """The services that this step is to select, of those that have changed and those that wait. `before`
        and `after` return a service as the dataplane has it, and as it is declared."""
        if not changed:
            return self._take(False)
        versions = {name: (before(name), after(name)) for name in changed}
        if not self._authors and sum(_work(two) for two in versions.values()) <= self._most:
            return list(changed)
        fresh = {
            name: tuple({f for version in two if version for f in version.frontends()})
            for name, two in versions.items()
        }
        count = Counter(frontend for frontends in fresh.values() for frontend in frontends)
        now = dict[str, None]()
        for name, frontends in fresh.items():
            self._leave(name)
            for holder in {self._holders[f] for f in frontends if f in self._holders}:
                self._leave(holder)
                now.update(dict.fromkeys((holder, name)))
            if any(count[frontend] > 1 for frontend in frontends):
                now[name] = None
        for name, frontends in fresh.items():
            service = versions[name][1] or versions[name][0]
            if service is None or name in now:
                now[name] = None
            else:
                self._add(name, frontends, author(service), _work(versions[name]))
        return [*now, *self._take(bool(now))]

    def _add(self, name: str, frontends: tuple[Frontend, ...], author: str, work: int) -> None:
        self._authors[name], self._frontends[name] = author, frontends
        self._waiting.setdefault(author, {})[name] = work
        self._holders.update(dict.fromkeys(frontends, name))

    def _leave(self, name: str) -> None:
        author = self._authors.pop(name, None)
        if author is not None:
            waiting = self._waiting[author]
            del waiting[name]
            if not waiting:
                del self._waiting[author]
            for frontend in self._frontends.pop(name):
                self._holders.pop(frontend, None)

    def _take(self, others: bool) -> list[str]:
        """The turn of some; `others`: the step has changes that do not wait."""
        works = {author: sum(waiting.values()) for author, waiting in self._waiting.items()}
        order, room, taken = sorted(works, key=lambda author: works[author]), self._most, list[str]()
        shares = dict[str, int]()
        for position, author in enumerate(order):
            shares[author] = min(works[author], max(1, room // (len(order) - position)))
            room -= shares[author]
        large = [author for author in order if shares[author] < works[author]]
        self._gave_way = bool(large) and (others or len(large) < len(order)) and not self._gave_way
        for author in order:
            if author in large and self._gave_way:
                continue
            names = list(islice(self._waiting[author], shares[author]))
            taken += names[: _count_within_limit([self._waiting[author][n] for n in names], shares[author])]
        for name in taken:
            self._leave(name)
        return taken


def _work(versions: Iterable[Service | None]) -> int:
    """What it takes to select and write a service that changes from one version to the other. Of a large one
    the forwardings have turns of their own."""
    sizes = ((len(s.frontends()), len(s.backends)) for s in versions if s is not None)
    work = max((frontends + frontends * backends // 4 for frontends, backends in sizes), default=0)
    return min(LARGE // 4, max(1, work))


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
