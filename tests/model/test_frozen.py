"""A compact set is the set of its items."""

from __future__ import annotations

import pytest

from vipd.model.frozen import FEW, compact_set


@pytest.mark.parametrize("number", [0, 1, FEW, FEW + 1])
def test_few_items_take_little_memory_and_equal_ones_are_equal(number: int) -> None:
    places = [(f"10.0.0.{each}", 80) for each in range(number)]
    found = compact_set(places)
    assert found == compact_set([*reversed(places), *places])
    assert (sorted(found), hash(found)) == (sorted(places), hash(compact_set(places)))
    assert isinstance(found, frozenset) is (number > FEW)
