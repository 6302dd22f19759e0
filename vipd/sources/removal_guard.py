"""Holds back the removal of many services at once, which is more often an accident than intended. Pure.

It guards services in etcd, and files. Rules:
- Removals within the last ten seconds count as one. If they are at least five (files: two), and more than the
  permitted share of the services before them, all of them are held: pending removals are not carried
  out, and those of the ten seconds are undone.
- While any is held, every further removal is held too.
- A store that is another one than before, or an older state of itself, may remove nothing: missing keys
  are held, however few.
- A held key is released when it is written again, alone. Writes of other keys release nothing:
  whoever deleted by mistake may well continue to write. Only `accept` releases everything.
"""

from __future__ import annotations

from collections.abc import Collection
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

    def __init__(self, percent: float, least: int = MIN_REMOVALS) -> None:
        """More removals than `percent` of the services are held, if they are at `least` so many."""
        self._percent, self._least = percent, least
        self._recent: dict[str, float] = {}
        self.held: set[str] = set()

    def decide(
        self, removed: Collection[str], service_count: int, now: float, store_replaced: bool = False
    ) -> RemovalDecision:
        """`service_count`: number of services, including those to be removed, without held ones.

        `store_replaced`: the store is not the same.
        """
        new_removals = frozenset(removed) - self.held
        self._expire(now)
        if not new_removals:
            return RemovalDecision()
        total = len(new_removals) + len(self._recent)
        too_many = total >= self._least and total * 100 > self._percent * (service_count + len(self._recent))
        if not (store_replaced or self.held or too_many):
            self._recent.update(dict.fromkeys(new_removals, now))
            return RemovalDecision(allowed=new_removals)
        restore = frozenset(self._recent)
        self._recent.clear()
        self.held |= new_removals | restore
        return RemovalDecision(held=new_removals, restore=restore)

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
