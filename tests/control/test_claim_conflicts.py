"""Who is in conflict with whom over an address in two roles, and who gives way."""

from __future__ import annotations

import pytest

from tests.model.samples import declared, service
from vipd.control.claim_conflicts import ConflictResolver, conflicts_between
from vipd.declaration.unit import EMPTY_DECLARATION, Unit

SHARED = "10.96.0.9"
NUMBERS = dict(zip("abcd", range(1, 5), strict=True))


def made(name: str, role: str, accepted: bool, rank: int = 0) -> Unit:
    """A unit of one service that uses the shared address as its VIP, or as that of a backend."""
    address, backend = f"10.96.0.{NUMBERS[name]}", f"10.0.0.{NUMBERS[name]}"
    vip, to = (SHARED, backend) if role == "vip" else (address, SHARED)
    declaration = declared(service(name, vip, f"{name}.yaml", 1, to))
    return Unit(declaration, declaration if accepted else EMPTY_DECLARATION, rank)


def conflicts_of_roles(units: dict[str, Unit]) -> list[tuple[str, str, str]]:
    """The pairs, each with who gives way, in which an address has two roles."""
    contest = ConflictResolver(units)
    found = [c for c in conflicts_between(contest, contest.claims()) if c.opposing_claim is not None]
    return [(c.first.unit, c.second.unit, contest.loser(c)) for c in found]


NEW, OLD = False, True


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ({"a": ("vip", NEW), "b": ("vip", NEW)}, []),
        (
            {"a": ("vip", NEW), "b": ("backend", NEW), "c": ("backend", NEW)},
            [("a", "b", "b"), ("a", "c", "c")],
        ),
        ({"a": ("backend", OLD), "b": ("vip", OLD), "c": ("vip", NEW)}, [("a", "b", "b"), ("a", "c", "c")]),
        ({"a": ("vip", NEW), "b": ("backend", OLD), "c": ("vip", NEW)}, [("a", "b", "a"), ("b", "c", "c")]),
        ({"a": ("vip", NEW), "b": ("vip", NEW), "c": ("backend", OLD)}, [("a", "c", "a"), ("b", "c", "b")]),
    ],
)
def test_the_first_wins_against_all_or_each_meets_the_first_of_the_others(
    units: dict[str, tuple[str, bool]], expected: list[tuple[str, str, str]]
) -> None:
    assert (
        conflicts_of_roles({name: made(name, role, old) for name, (role, old) in units.items()}) == expected
    )


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
    units = {"a": made("a", "vip", *first), "b": made("b", "backend", *second)}
    assert conflicts_of_roles(units) == [("a", "b", loser)]
