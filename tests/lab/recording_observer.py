"""An observer that keeps what it is told."""

from __future__ import annotations

from vipd.host.observer import Observer
from vipd.model.check_target import Target
from vipd.model.override import Subject


class RecordingObserver(Observer):
    """Keeps the changes of overrides and verdicts, one entry for each event."""

    def __init__(self) -> None:
        self.overrides: list[frozenset[Subject]] = []
        self.verdicts: list[frozenset[Target]] = []

    def overrides_changed(self, subjects: frozenset[Subject]) -> None:
        """Keep the event."""
        self.overrides.append(subjects)

    def verdicts_changed(self, targets: frozenset[Target]) -> None:
        """Keep the event."""
        self.verdicts.append(targets)
