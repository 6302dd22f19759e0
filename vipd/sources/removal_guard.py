"""Holds back the removal of many services at once, which is more often an accident than intended. Pure.

Rules:
- Removals within the last ten seconds count as one. If they are at least five, and more than the
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
FEWEST = 5
"""Fewer removals than this are never too many."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision about removals."""

    go: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    back: frozenset[str] = frozenset()
    """Removed a moment ago, and now restored."""


class RemovalGuard:
    """Judges removals. Times are seconds of one monotonic clock."""

    def __init__(self, percent: int) -> None:
        self._percent = percent
        self._recent: dict[str, float] = {}
        self.held: set[str] = set()

    def judge(self, removed: Collection[str], known: int, now: float, foreign: bool = False) -> Verdict:
        """`known`: number of services, including those to be removed, without held ones.

        `foreign`: the store is not the same.
        """
        asked = frozenset(removed) - self.held
        self._forget(now)
        if not asked:
            return Verdict()
        together = len(asked) + len(self._recent)
        too_many = together >= FEWEST and together * 100 > self._percent * (known + len(self._recent))
        if not (foreign or self.held or too_many):
            self._recent.update(dict.fromkeys(asked, now))
            return Verdict(go=asked)
        back = frozenset(self._recent)
        self._recent.clear()
        self.held |= asked | back
        return Verdict(held=asked, back=back)

    def written(self, key: str) -> None:
        """A key is there again."""
        self.held.discard(key)
        self._recent.pop(key, None)

    def remembers(self, key: str) -> bool:
        """Whether a verdict may still restore a removed key."""
        return key in self._recent

    def accept(self) -> frozenset[str]:
        """Release everything; returns what was held. Recent removals become final as well."""
        held = frozenset(self.held)
        self.held.clear()
        self._recent.clear()
        return held

    def _forget(self, now: float) -> None:
        self._recent = {key: at for key, at in self._recent.items() if now - at < WINDOW_SECONDS}
