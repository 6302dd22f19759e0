"""Gathers messages into transactions, and bursts of those into one change. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vipd.dataplane.iptables.names import ChainId
from vipd.dataplane.iptables.watch.external_change import Actor, ChangeKind, ExternalChange, OwnershipFilter
from vipd.dataplane.iptables.watch.messages import Change, Generation, MessageKind
from vipd.model.service import Family

QUIET_SECONDS = 0.05
"""A burst is over when nothing concerned us for so long."""
MAX_SECONDS = 0.3
"""A longer burst is reported after this time; its later changes are reported again."""
MAX_CHAINS = 1000
"""With more chains touched than this, one reading of the whole family is cheaper than listing them."""

MAX_OPEN = 100
"""The kernel reports one transaction after the other: with more than these open, the ends of some are
lost."""

IsOurs = Callable[[int, int], bool]
"""Whether a transaction of this pid and netlink address is vipd's own."""


@dataclass(slots=True)
class _Burst:
    """The effect of one transaction, or one burst, on vipd's rules."""

    families: set[Family] = field(default_factory=set)
    chains: set[tuple[Family, ChainId]] = field(default_factory=set)
    kinds: set[ChangeKind] = field(default_factory=set)
    everything: bool = False

    def add(self, change: Change, kind_of_change: ChangeKind) -> None:
        self.families.add(change.family)
        self.kinds.add(kind_of_change)
        if change.kind is MessageKind.TABLE_DELETED or len(self.chains) >= MAX_CHAINS:
            self.everything = True
        elif not self.everything:
            self.chains.add((change.family, ChainId(change.table, change.chain)))

    def join(self, other: _Burst) -> None:
        self.families |= other.families
        self.chains |= other.chains
        self.kinds |= other.kinds
        self.everything = self.everything or other.everything or len(self.chains) > MAX_CHAINS


class Debouncer:
    """Collects changes until they should be reported.

    A transaction is judged at the end of its burst and not when it is read: a process of vipd's may have
    written before its pid was recorded.
    """

    def __init__(
        self, scope: OwnershipFilter, quiet: float = QUIET_SECONDS, longest: float = MAX_SECONDS
    ) -> None:
        self._scope, self._quiet, self._longest = scope, quiet, longest
        self._open: dict[int, _Burst] = {}
        self._unseen: set[int] = set()
        self._closed: list[tuple[Generation, _Burst]] = []
        self._lost = False
        self._first = self._last = 0.0

    @property
    def due(self) -> float | None:
        """When to call `collect`; None while there is nothing to report."""
        if not self._closed and not self._lost:
            return None
        return min(self._last + self._quiet, self._first + self._longest)

    def change(self, change: Change) -> None:
        """Take one message; its transaction is not complete before its Generation. ValueError: malformed."""
        kind_of_change = self._scope.classify(change)
        if kind_of_change is not None:
            self._open.setdefault(change.port, _Burst()).add(change, kind_of_change)

    def skip(self, port: int) -> None:
        """Messages of this sender were left unread, as they seem to be vipd's own; its Generation will
        show."""
        self._unseen.add(port)

    def end(self, generation: Generation, is_ours: IsOurs, now: float) -> None:
        """A transaction is complete."""
        if generation.port in self._unseen:
            self._unseen.discard(generation.port)
            if not is_ours(generation.pid, generation.port):
                self.lost(now)
        work = self._open.pop(generation.port, None)
        if len(self._open) > MAX_OPEN:
            self.lost(now)  # their ends were, long ago
        if work is not None and not is_ours(generation.pid, generation.port):
            self._touch(now)
            self._closed.append((generation, work))

    def lost(self, now: float) -> None:
        """Some messages are missing; partly read transactions will not end."""
        self._touch(now)
        self._lost = True
        self._open.clear()
        self._unseen.clear()

    def collect(self, is_ours: IsOurs) -> ExternalChange | None:
        """The burst as one disturbance; None if all of it was vipd's own."""
        burst, actors = _Burst(), dict[Actor, None]()
        for generation, work in self._closed:
            if not is_ours(generation.pid, generation.port):
                burst.join(work)
                actors[Actor.of(generation)] = None
        if self._lost:
            burst.families |= self._scope.families
            burst.kinds.add(ChangeKind.EVENTS_LOST)
            burst.everything = True
        self._closed, self._lost = [], False
        if not burst.kinds:
            return None
        chains = frozenset(burst.chains)
        deeds = frozenset(burst.kinds)
        return ExternalChange(frozenset(burst.families), chains, deeds, tuple(actors), burst.everything)

    def _touch(self, now: float) -> None:
        self._first = now if self.due is None else self._first
        self._last = now
