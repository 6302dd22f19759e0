"""Which endpoint is asked next. Pure: chance comes as an argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random


class Endpoints:
    """The endpoints in an order of this host's own, so that a fleet spreads; the one that works is kept."""

    def __init__(self, urls: Sequence[str], random: Random) -> None:
        self._order = [url.rstrip("/") for url in dict.fromkeys(urls)]
        random.shuffle(self._order)
        self._at = 0

    @property
    def current(self) -> str:
        """The one that is asked first."""
        return self._order[self._at]

    def round(self) -> Iterator[str]:
        """Each endpoint once, beginning with the current one."""
        start = self._at
        for step in range(len(self._order)):
            yield self._order[(start + step) % len(self._order)]

    def failed(self, endpoint: str) -> None:
        """Ask another one first from now on, unless that has happened already."""
        if self.current == endpoint:
            self._at = (self._at + 1) % len(self._order)
