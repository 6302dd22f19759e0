"""Signs of life of the work: whoever wants to know that it goes on listens here."""

from __future__ import annotations

from collections.abc import Callable

from vipd.host.containment import Containment


class Heartbeat:
    """Beaten by the loop that reconciles while it waits, and at each part of a step that is done."""

    def __init__(self, every: float = 60.0) -> None:
        """`every`: seconds after which the loop beats at the latest while it has nothing to do."""
        self.every = every
        self.beats = 0
        self.listeners: list[Callable[[], None]] = []
        """Called at each beat. They must return at once. What one raises is logged once, and ends nothing."""
        self._containment = Containment()

    def beat(self) -> None:
        """The work goes on."""
        self.beats += 1
        for listener in self.listeners:
            with self._containment.around("heartbeat", "sending it"):
                listener()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What keeps signs of life from being sent."""
        return self._containment.warnings
