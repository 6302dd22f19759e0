"""How many endpoints all units may have together: what there is already stays, newcomers wait. Pure."""

from __future__ import annotations

from dataclasses import replace

from vipd.declaration.problems import Declaration, Problem
from vipd.declaration.unit import NOTHING, Unit
from vipd.model import limits


class EndpointBudget:
    """Counts the endpoints of units by their names, each in the version that serves."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._size = 0

    def drop(self, name: str) -> None:
        """A unit is gone."""
        self._size -= self._sizes.pop(name, 0)

    def take(self, name: str, unit: Unit) -> Unit:
        """The unit as far as there is room for it: a candidate beyond the limit has a problem.

        What was accepted was so within the limit. Should it be of a time without one, there is room for as
        much again; beyond that it does not serve.
        """
        self.drop(name)
        chosen = unit.candidate if unit.candidate.ok else unit.accepted
        size, most = _size(chosen), limits.ALL_ENDPOINTS
        if self._size + size > most and chosen is not unit.accepted:
            unit = Unit(_refused(name, unit.candidate, size, most - self._size), unit.accepted)
            chosen, size = unit.accepted, _size(unit.accepted)
        if self._size + size > 2 * most:
            unit = Unit(_refused(name, unit.candidate, size, 0), NOTHING)
            size = 0
        self._sizes[name] = size
        self._size += size
        return unit


def _size(declaration: Declaration) -> int:
    return sum(map(limits.size_of, declaration.services))


def _refused(name: str, candidate: Declaration, size: int, room: int) -> Declaration:
    what = f"its services have {size} endpoints, and there is room for {max(0, room)} beside all others"
    hint = f"{limits.ALL_ENDPOINTS} are the most: remove services, or backends"
    problem = Problem(name.removeprefix("file:"), 0, "", what, hint)
    return replace(candidate, problems=(*candidate.problems, problem))
