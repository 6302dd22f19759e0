"""What the daemon asks of a source of declarations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vipd.declaration.problems import Declaration
from vipd.declaration.unit import Unit


class Source(Protocol):
    """A place that declares services."""

    name: str
    """`files` or `store`: how status calls it."""
    writes: bool
    """`accepted` writes to disk, and so is called in a thread."""

    @property
    def location(self) -> str:
        """Where it is, for people."""

    def units(self) -> Mapping[str, Unit]:
        """What it declares now. Names are unique among all sources."""

    def faults(self) -> tuple[str, ...]:
        """What keeps the source itself from being read, as against a fault in one declaration."""

    def accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """The versions that serve from now on; a source keeps them so that they outlive a bad edit."""
