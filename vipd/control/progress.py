"""The state of reconciling, and whether it is healthy. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from vipd.model.service import Family

OVERDUE_SECONDS = 60.0
"""A request that waits longer is overdue: something hangs (kube-proxy: twice its period of 30 s)."""


@dataclass(slots=True)
class Progress:
    """Progress of reconciliation."""

    applies: int = 0
    failures: int = 0
    last_apply: datetime | None = None
    last_seconds: float = 0.0
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Services of which the kernel does not take a part, and why."""
    fault: str = ""
    """Why the last step failed; empty when it did not."""
    warnings: tuple[str, ...] = ()
    requested: int = 0
    """Generation: the number of the last request for a step."""
    applied: int = 0
    """The last generation that a step has brought into the kernel."""
    begun: frozenset[Family] = frozenset()
    """The address families whose rules a step has written that failed for the other one."""
    behind: frozenset[Family] = frozenset(Family)
    """The address families for which the last step failed, while there is a fault."""
    attempted: int = 0
    """The last generation that any step has tried to."""
    waiting_since: datetime | None = None
    """Time of the oldest request that is not applied; None while there is none."""
    unattempted_since: datetime | None = None
    """Time of the oldest request that no step has begun with; None while there is none."""
    postponed: frozenset[str] = frozenset()
    """Services of which a part is left for a later step, so that small changes need not wait for it."""
    postponed_request: int = 0
    """The request for these alone; 0: none."""
    stopping: bool = False
    """Whether vipd stops: no further step begins."""

    @property
    def state(self) -> str:
        """`starting`, `in-sync`, `degraded` (but for quarantined services), `pending` or `failed`."""
        if self.fault:
            return "failed"
        if not self.applied:
            return "starting"
        if self.applied != self.requested:
            return "pending"
        return "degraded" if self.quarantined else "in-sync"

    def is_pending(self, service: str, families: Collection[Family] = tuple(Family)) -> bool:
        """Whether the kernel may lack a service's wanted rules, which are of these address families."""
        if self.state in ("in-sync", "degraded"):
            return False
        if self.has_written(self.requested, families):
            return service in self.postponed
        others_are_done = self.state == "pending" and self.requested == self.postponed_request
        return not others_are_done or service in self.postponed

    def has_written(self, generation: int, families: Collection[Family]) -> bool:
        """Whether a step that failed has brought a generation into the kernel for these address families."""
        return bool(
            self.fault and families and self.attempted >= generation and self.behind.isdisjoint(families)
        )

    @property
    def revision(self) -> tuple[int, ...]:
        """Differs after each request and each step, and so after whatever changes services or verdicts."""
        return self.requested, self.attempted, self.applied, self.failures, self.applies

    @property
    def written(self) -> bool:
        """Whether any step has written all rules of an address family."""
        return bool(self.applied or self.begun)

    def is_current(self, family: Family) -> bool:
        """Whether the kernel has an address family's rules as of the last step."""
        if self.fault and family in self.behind:
            return False
        return bool(self.applied) or family in self.begun

    def why_pending(self, waited: float) -> str:
        """Why a request is not applied after so many seconds."""
        if self.stopping:
            return "vipd is stopping: it is in the kernel when vipd has started again"
        return self.fault or f"not in the kernel after {waited:.0f} s; vipd goes on trying"

    def request(self, now: datetime) -> int:
        """Note a request for a step; returns its generation."""
        self.requested += 1
        self.waiting_since = self.waiting_since or now
        self.unattempted_since = self.unattempted_since or now
        return self.requested

    def begin(self) -> int:
        """A step begins, for all requests so far; returns the generation of the last one."""
        self.unattempted_since = None
        return self.requested

    def succeed(self, generation: int) -> None:
        """The step for the requests up to this one has succeeded."""
        self.fault, self.applied, self.attempted = "", generation, generation
        self.waiting_since = self.unattempted_since

    def postpone(self, services: frozenset[str], now: datetime) -> None:
        """That step left a part of these services for the next one."""
        alone = self.applied == self.requested
        self.postponed = services
        request = self.request(now) if services else 0
        self.postponed_request = request if alone else 0


def healthy(progress: Progress, now: datetime) -> tuple[bool, str]:
    """Whether the kernel is kept as declared, and if not, why. Without work the answer is healthy.

    A fault counts until a step has succeeded, however many are tried before; a request counts as overdue
    whoever made it, also the very first one (contract 7.23).
    """
    if progress.fault:
        return False, progress.fault
    waited = (now - progress.waiting_since).total_seconds() if progress.waiting_since else 0.0
    if waited <= OVERDUE_SECONDS:
        return True, ""
    what = (
        "a change is not in the kernel" if progress.applied else "no rules are in the kernel since the start"
    )
    return False, f"{what} after {waited:.0f} s; hint: a step hangs, the log says after what"
