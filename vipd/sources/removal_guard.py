"""Holds back the removal of many services at once, which is more often an accident than intended. Pure.

Rules:
- Removals within the last ten seconds count as one. When they come to at least five, and to more than the
  permitted share of the services there were before them, all of them are held: those still to be removed
  stay, and those removed within the ten seconds come back.
- While any is held, every further removal is held too.
- A store that is another one than before, or an older state of itself, may remove nothing: what is missing
  there is held, however little it is.
- A key is let go when it is written again, by itself alone. That other keys are written lets nothing go:
  whoever deleted by mistake may well go on writing. Only `accept` lets everything go.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

WINDOW_SECONDS = 10.0
FEWEST = 5
"""Fewer removals than this are never too many."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of removals."""

    go: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    back: frozenset[str] = frozenset()
    """Removed a moment ago, and held after all."""


class RemovalGuard:
    """Judges removals. Times are seconds of one monotonic clock."""

    def __init__(self, percent: int) -> None:
        self._percent = percent
        self._recent: dict[str, float] = {}
        self.held: set[str] = set()

    def judge(self, removed: Collection[str], known: int, now: float, foreign: bool = False) -> Verdict:
        """`known`: how many services there are, with those to be removed, without those held.

        `foreign`: the store is not what it was.
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
        """Whether a removed key may still come back by a verdict."""
        return key in self._recent

    def accept(self) -> frozenset[str]:
        """Let go of everything; what was held. What went a moment ago is settled as well."""
        held = frozenset(self.held)
        self.held.clear()
        self._recent.clear()
        return held

    def _forget(self, now: float) -> None:
        self._recent = {key: at for key, at in self._recent.items() if now - at < WINDOW_SECONDS}
