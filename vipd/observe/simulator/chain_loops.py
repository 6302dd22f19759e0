"""Chains that lead back to themselves, which the kernel refuses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

N = TypeVar("N", bound=str | tuple[str, str])


def chains_in_loops(next_of: Mapping[N, Collection[N]]) -> list[N]:
    """The chains that form a loop or hang from one. `next_of` tells of every chain where it leads."""
    callers = dict.fromkeys(next_of, 0)
    for names in next_of.values():
        for name in names:
            callers[name] += 1
    free = [chain for chain, count in callers.items() if not count]
    for chain in free:
        for name in next_of[chain]:
            callers[name] -= 1
            if not callers[name]:
                free.append(name)
    return sorted(set(next_of) - set(free)) if len(free) < len(next_of) else []
