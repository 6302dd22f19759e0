"""How reconciling goes, and whether that is healthy. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

OVERDUE_SECONDS = 60.0
"""A wish for a step that waits longer is overdue: something hangs (kube-proxy: twice its period of 30 s)."""


@dataclass(slots=True)
class Progress:
    """How the reconciling goes."""

    applies: int = 0
    failures: int = 0
    last_apply: datetime | None = None
    last_seconds: float = 0.0
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Services of which the kernel does not take a part, and why."""
    fault: str = ""
    """Why the last step failed; empty when it did not."""
    warnings: tuple[str, ...] = ()
    wanted: int = 0
    """Counts the wishes for a step."""
    done: int = 0
    """The last wish that a good step has fulfilled."""
    tried: int = field(default=0)
    """The last wish that any step has taken up."""
    waiting_since: datetime | None = None
    """When the oldest wish was made that no good step has fulfilled; None while there is none."""
    untaken_since: datetime | None = None
    """When the oldest wish was made that no step has taken up; None while there is none."""
    later: frozenset[str] = frozenset()
    """Services of which a part is left for a later step, so that small changes need not wait for it."""
    later_wish: int = 0
    """The wish that is for these alone; 0: none."""
    stopping: bool = False
    """Whether vipd stops: no wish is taken up any more."""

    @property
    def state(self) -> str:
        """`starting`, `in-sync`, `degraded` (but for quarantined services), `pending` or `failed`."""
        if self.fault:
            return "failed"
        if not self.done:
            return "starting"
        if self.done != self.wanted:
            return "pending"
        return "degraded" if self.quarantined else "in-sync"

    def is_pending(self, service: str) -> bool:
        """Whether the kernel may not have a service as it is wanted."""
        if self.state in ("in-sync", "degraded"):
            return False
        others_are_done = self.state == "pending" and self.wanted == self.later_wish
        return not others_are_done or service in self.later

    def unfulfilled(self, waited: float) -> str:
        """Why a wish is not fulfilled after so many seconds."""
        if self.stopping:
            return "vipd is stopping: it is in the kernel when vipd has started again"
        return self.fault or f"not in the kernel after {waited:.0f} s; vipd goes on trying"

    def wish(self, now: datetime) -> int:
        """Note a wish for a step; returns its number."""
        self.wanted += 1
        self.waiting_since = self.waiting_since or now
        self.untaken_since = self.untaken_since or now
        return self.wanted

    def take_up(self) -> int:
        """A step begins, for all wishes so far; returns the last one's number."""
        self.untaken_since = None
        return self.wanted

    def fulfilled(self, wish: int) -> None:
        """A good step has ended that took up the wishes up to this one."""
        self.fault, self.done, self.tried = "", wish, wish
        self.waiting_since = self.untaken_since

    def postponed(self, services: frozenset[str], now: datetime) -> None:
        """That step has left a part of these services for the next one."""
        alone = self.done == self.wanted
        self.later = services
        wish = self.wish(now) if services else 0
        self.later_wish = wish if alone else 0


def healthy(progress: Progress, now: datetime) -> tuple[bool, str]:
    """Whether the kernel is kept as declared, and if not, why. Having nothing to do is healthy.

    A fault counts until a step has worked, however many are tried meanwhile; a wish counts as overdue whoever
    made it, also the first one of all (contract 7.23).
    """
    if progress.fault:
        return False, progress.fault
    waited = (now - progress.waiting_since).total_seconds() if progress.waiting_since else 0.0
    if waited <= OVERDUE_SECONDS:
        return True, ""
    what = "a change is not in the kernel" if progress.done else "no rules are in the kernel since the start"
    return False, f"{what} after {waited:.0f} s; hint: a step hangs, the log says after what"
