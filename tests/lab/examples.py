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
    profile takes of a hundred: ten times as many at night, and three tenths in any other run."""
    return -(-number * settings().max_examples // _FULL)


def some(values: Sequence[T], place: object, fewer: int = 1) -> list[T]:
    """Of values that a test tries in many places those for one place: three tenths, or, with `fewer`, so many
    times fewer, up to ten; all of them at night."""
    return random.Random(str(place)).sample(values, min(len(values), -(-examples(len(values)) // fewer)))
