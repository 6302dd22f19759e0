"""Holds back the removal of many services at once, which is more often an accident than intended. Pure.

It guards services in etcd, and files. Rules:
- Each author's removals are judged by themselves, so that nobody's hold up another's.
- An author's removals within the last ten seconds count as one. If they are at least five (files: two), and
  more than the permitted share of the author's services before them, all of them are held: pending removals
  are not carried out, and those of the ten seconds are undone.
- While any of an author is held, every further removal of that author is held too.
- Authors who lose more than that share, but fewer than five, are held if so many vanish together: at least
  five, and more than the permitted share, of the services of all such authors and of those who lose fewer; or
  of all services, if they are removed in one change.
- A store that is another one than before, or an older state of itself, may remove nothing: missing keys
  are held, however few.
- A held key is released when it is written again, alone. Writes of other keys release nothing:
  whoever deleted by mistake may well continue to write. Only `accept` releases everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

WINDOW_SECONDS = 10.0
MIN_REMOVALS = 5
"""Fewer removals than this never trigger a hold of services in etcd."""


@dataclass(frozen=True, slots=True)
class RemovalDecision:
    """What is done with a set of removals."""

    allowed: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    restore: frozenset[str] = frozenset()
    """Removed within the window already: to be restored."""


class RemovalGuard:
    """Decides about removals. Times are seconds of one monotonic clock."""

    def __init__(
        self, percent: float, least: int = MIN_REMOVALS, author_of: Callable[[str], str] = lambda key: ""
    ) -> None:
        """More removals of an author than `percent` of the author's services are held, if they are at `least`
        so many. `author_of`: whose a key is."""
        self._percent, self._least, self._author_of = percent, least, author_of
        self._recent: dict[str, float] = {}
        self.held: set[str] = set()

    def decide(
        self,
        removed: Collection[str],
        service_count: int | Mapping[str, int],
        now: float,
        store_replaced: bool = False,
    ) -> RemovalDecision:
        """`service_count`: number of services, including those to be removed, without held ones; a mapping
        has those of each author.

        `store_replaced`: the store is not the same.
        """
        new_removals = frozenset(removed) - self.held
        self._expire(now)
        if not new_removals:
            return RemovalDecision()
        if store_replaced:
            held, restore = new_removals, frozenset(self._recent)
        else:
            counts = service_count if isinstance(service_count, Mapping) else {"": service_count}
            authors = self._authors_to_hold(new_removals, counts)
            held = frozenset(key for key in new_removals if self._author_of(key) in authors)
            restore = frozenset(key for key in self._recent if self._author_of(key) in authors)
        allowed = new_removals - held
        for key in restore:
            del self._recent[key]
        self._recent.update(dict.fromkeys(allowed, now))
        self.held |= held | restore
        return RemovalDecision(allowed, held, restore)

    def _authors_to_hold(self, new_removals: Collection[str], counts: Mapping[str, int]) -> set[str]:
        """The authors whose removals are held."""
        new = Counter(map(self._author_of, new_removals))
        held = Counter(map(self._author_of, self.held))
        removals = new + Counter(map(self._author_of, self._recent))
        before = Counter(counts) + removals - new
        alone = {author for author, number in held.items() if number >= self._least}
        alone |= {author for author in new if self._too_many(removals[author], before[author])}
        vanished = sum(number for author, number in (removals + held).items() if author not in alone)
        total = sum(number for author, number in (before + held).items() if author not in alone)
        # One change with the keys of several authors is none of theirs.
        at_once = len(new) > 1 and self._too_many(new.total(), before.total())
        together = set[str]()
        if at_once or self._too_many(vanished, total):
            together = {a for a, number in removals.items() if self._beyond_share(number, before[a])}
        return alone | held.keys() | together

    def _too_many(self, removals: int, before: int) -> bool:
        return removals >= self._least and self._beyond_share(removals, before)

    def _beyond_share(self, removals: int, before: int) -> bool:
        return removals * 100 > self._percent * before

    def key_written(self, key: str) -> None:
        """A key was written again: releases it."""
        self.held.discard(key)
        self._recent.pop(key, None)

    def make_final(self) -> None:
        """What was removed so far counts no longer with what follows."""
        self._recent.clear()

    def may_restore(self, key: str) -> bool:
        """Whether a later decision may still restore a removed key."""
        return key in self._recent

    def accept(self) -> frozenset[str]:
        """Releases every held removal; returns them. Recent removals become final."""
        held = frozenset(self.held)
        self.held.clear()
        self._recent.clear()
        return held

    def _expire(self, now: float) -> None:
        self._recent = {key: at for key, at in self._recent.items() if now - at < WINDOW_SECONDS}
