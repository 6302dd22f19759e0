"""Objects that are created quickly are those that the class creates."""

from __future__ import annotations

import copy
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Any

import pytest

from vipd.model.forwarding import Forwarding
from vipd.model.frozen import quick
from vipd.model.service import Backend, Service

VALUES = (Backend, Service, Forwarding)


@pytest.mark.parametrize("cls", VALUES)
def test_they_are_equal_and_of_the_same_class(cls: type[Any]) -> None:
    needed = {each.name: (each.name,) for each in fields(cls) if each.default is MISSING}
    everything = {each.name: (each.name,) for each in fields(cls)}
    for values in (needed, everything):
        made, same = quick(cls)(**values), cls(**values)
        assert type(made) is cls
        assert (made, hash(made), repr(made)) == (same, hash(same), repr(same))
        assert copy.deepcopy(made) == same


@pytest.mark.parametrize("cls", VALUES)
def test_they_are_as_frozen_and_take_the_same_arguments(cls: type[Any]) -> None:
    names = [each.name for each in fields(cls)]
    made = quick(cls)(*names)
    for name in names:
        assert getattr(made, name) == name
        with pytest.raises(FrozenInstanceError):
            setattr(made, name, "other")
    with pytest.raises(TypeError):
        quick(cls)()
    with pytest.raises(TypeError):
        quick(cls)(*names, unknown=1)
