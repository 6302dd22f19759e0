"""Signs of life of the work: whoever wants to know that it goes on listens here. Pure."""

from __future__ import annotations

from collections.abc import Callable


class Pulse:
    """Beaten by the loop that reconciles while it waits, and at each part of a step that is done."""

    def __init__(self, every: float = 60.0) -> None:
        """`every`: seconds after which the loop beats at the latest while it has nothing to do."""
        self.every = every
        self.beats = 0
        self.listeners: list[Callable[[], None]] = []
        """Called at each beat. They must return at once; what raises here ends the loop."""

    def beat(self) -> None:
        """The work goes on."""
        self.beats += 1
        for listener in self.listeners:
            listener()
