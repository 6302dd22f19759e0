"""The status of a backend beside its declaration: results of checks, and overrides of operators. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class AdminState(StrEnum):
    """The override that an operator set."""

    ACTIVE = "active"
    DRAINING = "draining"
    """No new flows; existing flows continue."""
    DISABLED = "disabled"
    """No new flows; existing flows end as if the backend were removed."""


UNCHECKED = "unchecked"
"""The health of a backend that no check asks: nothing is known of it."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The status of one backend in one service. Fields that only people read do not count in comparisons."""

    healthy: bool = True
    """Whether no check has found it unhealthy, so that it may serve."""
    admin: AdminState = AdminState.ACTIVE
    weight: int | None = None
    """Wins over the declared weight."""
    shown_weight: int | None = field(default=None, compare=False)
    """The weight shown to people, which may be on the scale of the backends' own weights; None: `weight`."""
    full: bool = False
    """It has its maximum of live flows, and gets no new ones until some of them end."""
    keeps_affinity: bool = False
    """While draining: clients with affinity to it still get to it."""
    reason: str = field(default="", compare=False)
    """Why it takes no new flows, or another share than declared; empty if there is no reason to report."""
    health: str = field(default=UNCHECKED, compare=False)
    """`healthy`, `unhealthy`, `unknown` (checked, but no verdict yet) or `unchecked`."""
    probe_result: str = field(default="", compare=False)
    """Last result of its check."""


BackendStatuses = Mapping[str, BackendStatus]
"""By the backend's text (`ADDR` or `ADDR:PORT`); a backend without an entry is active and unchecked."""

DEFAULT_STATUS = BackendStatus()
