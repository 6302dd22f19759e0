"""Which known word a mistyped one means. Pure.

A suggestion that shares most letters with a word but is another word misleads: `import` is no `export`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

MAX_COMPARED = 500
"""Known words that are compared with one; there may be 100,000 names of services."""
MAX_LENGTH = 64
_LONG = 9
"""Characters of a word in which two slips are likely."""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The known words that differ from a word by one slip, or by two in a long word: a letter missing,
    too many, wrong, or swapped with the next one. The nearest ones, two at most."""
    text = word[:MAX_LENGTH].lower()
    most = 1 if len(text) < _LONG else 2
    kept = max(1, len(text) // 2 - 1)
    likely = (
        each
        for each in known
        if abs(len(each) - len(text)) <= most
        # One slip leaves so much of the begin or the end as it is.
        and (each[:kept].lower() == text[:kept] or each[-kept:].lower() == text[-kept:])
    )
    slips = {each: _slips(text, each.lower(), most) for each in islice(likely, MAX_COMPARED)}
    least = min(slips.values(), default=most + 1)
    return [each for each, number in slips.items() if number == least <= most][:2]


def _slips(one: str, other: str, most: int) -> int:
    """The optimal string alignment distance of two words, or any number beyond `most`."""
    before, row = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, above, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            steps = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                steps = min(steps, above[j - 2] + 1)
            row.append(steps)
        if min(row) > most and min(before) > most:
            break  # the distance never falls again
    return max(row[-1], min(row))
