"""Chooses the next endpoint. Pure: random numbers are arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random


class Endpoints:
    """The endpoints in a random order, so that a fleet spreads; a working one is kept."""

    def __init__(self, urls: Sequence[str], random: Random) -> None:
        self._order = [url.rstrip("/") for url in dict.fromkeys(urls)]
        random.shuffle(self._order)
        self._at = 0

    @property
    def current(self) -> str:
        """The endpoint to try first."""
        return self._order[self._at]

    def round(self) -> Iterator[str]:
        """Each endpoint once, beginning with the current one."""
        start = self._at
        for step in range(len(self._order)):
            yield self._order[(start + step) % len(self._order)]

    def mark_failed(self, endpoint: str) -> None:
        """Try another one first from now on, unless that has been done."""
        if self.current == endpoint:
            self._at = (self._at + 1) % len(self._order)
