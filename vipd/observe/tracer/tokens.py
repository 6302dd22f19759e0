"""A place in the words of an iptables-restore line."""

from __future__ import annotations


class Cursor:
    """Reads words one after the other."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._words)

    def take(self, after: str = "") -> str:
        """The next word.

        Raises:
            ValueError: there is none; `after` names the option that wants it.
        """
        if not self:
            raise ValueError(f"{after} wants a value" if after else "the line ends too early")
        self._next += 1
        return self._words[self._next - 1]
