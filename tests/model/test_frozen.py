"""Objects that are created fast are those that the class creates; a compact set is the set of its items."""

from __future__ import annotations

import copy
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Any

import pytest

from vipd.model.forwarding import Forwarding
from vipd.model.frozen import FEW, compact_set, fast_constructor
from vipd.model.service import Backend, Service

VALUES = (Backend, Service, Forwarding)


@pytest.mark.parametrize("cls", VALUES)
def test_they_are_equal_and_of_the_same_class(cls: type[Any]) -> None:
    needed = {each.name: (each.name,) for each in fields(cls) if each.default is MISSING}
    everything = {each.name: (each.name,) for each in fields(cls)}
    for values in (needed, everything):
        made, same = fast_constructor(cls)(**values), cls(**values)
        assert type(made) is cls
        assert (made, hash(made), repr(made)) == (same, hash(same), repr(same))
        assert copy.deepcopy(made) == same


@pytest.mark.parametrize("cls", VALUES)
def test_they_are_as_frozen_and_take_the_same_arguments(cls: type[Any]) -> None:
    names = [each.name for each in fields(cls)]
    made = fast_constructor(cls)(*names)
    for name in names:
        assert getattr(made, name) == name
        with pytest.raises(FrozenInstanceError):
            setattr(made, name, "other")
    with pytest.raises(TypeError):
        fast_constructor(cls)()
    with pytest.raises(TypeError):
        fast_constructor(cls)(*names, unknown=1)


@pytest.mark.parametrize("number", [0, 1, FEW, FEW + 1])
def test_few_items_take_little_memory_and_equal_ones_are_equal(number: int) -> None:
    places = [(f"10.0.0.{each}", 80) for each in range(number)]
    found = compact_set(places)
    assert found == compact_set([*reversed(places), *places])
    assert (sorted(found), hash(found)) == (sorted(places), hash(compact_set(places)))
    assert isinstance(found, frozenset) is (number > FEW)
