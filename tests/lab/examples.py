"""How much of all that could be tried a run tries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")

_FULL = 100
"""Examples of a property that says nothing, where each takes its full number."""


def examples(number: int) -> int:
    """How many examples a property takes for which a run of full size would take this number: what the
    profile takes of a hundred. All runs but those at night, which take ten times as many, take two fifths."""
    return -(-number * settings().max_examples // _FULL)


def some(values: Sequence[T], place: object, fewer: int = 1) -> list[T]:
    """Of values that a test tries in many places those for one place: two fifths, or, with `fewer`, up to ten
    times fewer; all of them at night."""
    return random.Random(str(place)).sample(values, min(len(values), -(-examples(len(values)) // fewer)))
