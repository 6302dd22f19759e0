"""The interface of a source of declarations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from vipd.declaration.problems import Declaration
from vipd.declaration.unit import Unit


class Source(Protocol):
    """A place that declares services."""

    name: str
    """`files` or `store`: its name in status."""
    writes: bool
    """Whether `accepted` writes to disk, and so must be called in a thread."""

    @property
    def location(self) -> str:
        """Its location, for people."""

    def units(self) -> Mapping[str, Unit]:
        """Its current units. Names are unique among all sources."""

    def faults(self) -> tuple[str, ...]:
        """Why the source itself cannot be read, as against a fault in one declaration."""

    def held(self) -> Mapping[str, str]:
        """What serves on although the source no longer has it, as owners of services, each with the
        reason."""

    def accept_removal(self) -> object:
        """Let go of what is held. It blocks if `writes` is set, and must then be called in a thread."""

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Sets the versions that serve from now on; a source keeps them so that they outlive a bad edit."""
