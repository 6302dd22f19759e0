"""How much has passed, from what flows had when they ended and what open ones have. Pure.

The number never falls, and is never more than what has passed: an end that nobody was told of takes from the
growth of one interval between readings what its flow had before, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from vipd.dataplane.conntrack.entries import Traffic

NOTHING = Traffic(0, 0, 0, 0)


def added(one: Traffic, other: Traffic) -> Traffic:
    """The sum."""
    return Traffic(one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3])


@dataclass(slots=True)
class Volume:
    """What has passed to one backend and from it."""

    settled: Traffic = NOTHING
    """As of the last reading."""
    open: Traffic = NOTHING
    """What flows had by then that were open."""
    ended: Traffic = NOTHING
    """What flows had in all that have ended since."""

    @property
    def now(self) -> Traffic:
        """As far as is known."""
        return self.settled if self.ended is NOTHING else _grown(self.settled, self.ended, self.open)

    def end(self, traffic: Traffic) -> None:
        """Flows have ended, having had so much in all."""
        self.ended = added(self.ended, traffic)

    def read(self, traffic: Traffic) -> None:
        """Those that are open have so much, those that `end` told of not among them."""
        if self.ended is NOTHING and traffic == self.open:
            return  # nearly all of very many
        self.settled = _grown(self.settled, added(self.ended, traffic), self.open)
        self.open, self.ended = traffic, NOTHING


def _grown(settled: Traffic, known: Traffic, before: Traffic) -> Traffic:
    return Traffic(
        settled[0] + max(known[0] - before[0], 0),
        settled[1] + max(known[1] - before[1], 0),
        settled[2] + max(known[2] - before[2], 0),
        settled[3] + max(known[3] - before[3], 0),
    )
