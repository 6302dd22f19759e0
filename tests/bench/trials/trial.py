"""One trial: some way of programming services is given many of them, and then changes. As values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.bench.trials.usage import Usage


@dataclass(frozen=True, slots=True)
class Trial:
    """The parameters of a trial."""

    subject: str
    services: int
    backends: int = 5
    changes: int = 5
    """How often one backend of one service is replaced by another."""
    count: bool = False
    """Count the kernel's objects after the load. Listing a large table takes long."""
    limit: float = 60.0
    """Seconds after which a load, or a change, is stopped."""

    def view(self) -> dict[str, object]:
        """The JSON form."""
        return asdict(self)

    @classmethod
    def read(cls, view: Mapping[str, Any]) -> Trial:
        """The trial that `view` gave. Raises TypeError."""
        return cls(**view)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result."""

    loads: tuple[Usage, ...] = ()
    """One, or none if it exceeded the limit."""
    changes: tuple[Usage, ...] = ()
    """None too if they exceeded the limit."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """`chains`, `rules` and `elements` in the kernel."""
    problem: str = ""
    """Why it failed, but for its limit."""

    def view(self) -> dict[str, object]:
        """The JSON form."""
        return asdict(self)

    @classmethod
    def read(cls, view: Mapping[str, Any]) -> Outcome:
        """The outcome that `view` gave. Raises KeyError and TypeError."""
        return cls(
            loads=_usages(view["loads"]),
            changes=_usages(view["changes"]),
            counts=view["counts"],
            problem=view["problem"],
        )


def _usages(views: Iterable[Mapping[str, Any]]) -> tuple[Usage, ...]:
    return tuple(Usage(**view) for view in views)
