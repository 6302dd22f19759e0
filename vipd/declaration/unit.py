"""A unit: it is accepted or refused as a whole, such as a file, the store, or a key of etcd. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vipd.declaration.problems import Declaration

EMPTY_DECLARATION = Declaration()


@dataclass(frozen=True, slots=True)
class Unit:
    """One file, or the store: its current content and its last accepted version."""

    candidate: Declaration
    accepted: Declaration = EMPTY_DECLARATION
    rank: int = 0
    """Of two newcomers with ranks the lower one wins: so hosts of a fleet that see both at once
    decide like those that saw one after the other. 0: none."""
    part: bool = False
    """It is one object of a file, whose other objects are units of their own."""
