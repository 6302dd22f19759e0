"""Frozen sets that a load has by the ten thousand, in less memory. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from vipd.model.service import Family

C = TypeVar("C", tuple[str, int], tuple[Family, str])
FEW = 16
"""Items up to which a search through all of them is as fast as a lookup."""


def compact_set(items: Collection[C]) -> Collection[C]:
    """These items, each once; equal for equal items. A set of five takes seven times the memory of a sorted
    tuple, and there is one for each frontend."""
    once = frozenset(items)
    return once if len(once) > FEW else tuple(sorted(once))
