"""How many examples a property gets that says a number itself."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100
"""Examples of a property that says nothing, in the profile of every run."""


def examples(number: int) -> int:
    """So many examples in every run; more, as all others get, with the profile `fresh` of the nightly run."""
    return number * settings().max_examples // _USUAL
