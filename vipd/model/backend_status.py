"""The status of a backend beside its declaration: results of checks, and overrides of operators. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Admin(StrEnum):
    """What an operator ordered."""

    ACTIVE = "active"
    DRAINING = "draining"
    """No new flows; those it has go on."""
    DISABLED = "disabled"
    """No new flows; those it has end as if it were removed."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend's standing in one service. What is for people does not count in comparisons."""

    healthy: bool = True
    admin: Admin = Admin.ACTIVE
    weight: int | None = None
    """Wins over the declared weight."""
    shown_weight: int | None = field(default=None, compare=False)
    """What people are shown for `weight`, which may be on a scale of all backends' own; None: `weight`."""
    pinned: bool = False
    """While draining: clients with affinity to it still get to it."""
    reason: str = field(default="", compare=False)
    """Why it takes no new flows, or another share than declared; empty when there is nothing to say."""
    health: str = field(default="", compare=False)
    """`healthy`, `unhealthy` or `unknown` (no verdict yet); empty when it is not checked."""
    answer: str = field(default="", compare=False)
    """What its check found last."""


BackendStatuses = Mapping[str, BackendStatus]
"""By the backend's text (`ADDR` or `ADDR:PORT`); one that is not there is active and healthy."""

GOOD = BackendStatus()
