"""The words of nftables text, and a place in them."""

from __future__ import annotations

import re

_WORD = re.compile(r'"[^"]*"|[=!<>]=|[{},;=<>&|^]|[^\s{},;=<>&|^"!]+')


def split_words(line: str) -> list[str]:
    """The words and signs of a line; a quoted text is one word, in its quotes.

    Raises:
        ValueError: there is anything else.
    """
    words = _WORD.findall(line)
    if len("".join(words)) != len("".join(line.split())) and '"' not in line:
        raise ValueError("there is a sign that is not known")
    return words


class Words:
    """Reads words one after the other."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._words)

    @property
    def next(self) -> str:
        """The next word, which stays; empty at the end."""
        return self._words[self._next] if self else ""

    def take(self, *wanted: str) -> str:
        """The next word, which must be one of `wanted`, if given.

        Raises:
            ValueError: there is none, or another one.
        """
        found = self.next
        if not self or (wanted and found not in wanted):
            expected = " or ".join(wanted) if wanted else "more"
            raise ValueError(f"{expected} is wanted" + (f", not {found}" if found else " at the end"))
        self._next += 1
        return found

    def accept(self, *wanted: str) -> str:
        """Consume the next word if it is one of these; returns it, or an empty string."""
        return self.take() if self and self.next in wanted else ""

    def after(self, *wanted: str) -> bool:
        """Consume these words if they are next."""
        end = self._next + len(wanted)
        if tuple(self._words[self._next : end]) != wanted:
            return False
        self._next = end
        return True

    def count(self, *wanted: str) -> int:
        """How many of all words are one of these."""
        return sum(word in wanted for word in self._words)

    def until(self, *ends: str) -> list[str]:
        """All words before the next of these, or all."""
        begin = self._next
        while self and self.next not in ends:
            self._next += 1
        return self._words[begin : self._next]
