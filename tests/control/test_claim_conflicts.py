"""Who gives way when two units claim the same frontend."""

from __future__ import annotations

import pytest

from tests.model.samples import declared, service
from vipd.control.claim_conflicts import ConflictResolver, conflicts_between
from vipd.declaration.unit import EMPTY_DECLARATION, Unit

SHARED = "10.96.0.9"
NEW, OLD = False, True


def made(name: str, accepted: bool, rank: int) -> Unit:
    """A unit of one service at the shared address."""
    declaration = declared(service(name, SHARED, f"{name}.yaml"))
    return Unit(declaration, declaration if accepted else EMPTY_DECLARATION, rank)


@pytest.mark.parametrize(
    ("first", "second", "loser"),
    [
        ((OLD, 5), (NEW, 1), "b"),
        ((NEW, 1), (OLD, 5), "a"),
        ((NEW, 5), (NEW, 1), "a"),
        ((OLD, 1), (OLD, 5), "b"),
        ((NEW, 5), (NEW, 0), "b"),
    ],
)
def test_newcomers_give_way_and_among_equals_the_higher_rank(
    first: tuple[bool, int], second: tuple[bool, int], loser: str
) -> None:
    contest = ConflictResolver({"a": made("a", *first), "b": made("b", *second)})
    (conflict,) = conflicts_between(contest, contest.claims())
    assert (conflict.first.unit, conflict.second.unit, contest.loser(conflict)) == ("a", "b", loser)
