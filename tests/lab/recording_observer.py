"""An observer that keeps what it is told."""

from __future__ import annotations

from vipd.host.observer import Observer
from vipd.model.check_target import CheckTarget
from vipd.model.override import OverrideTarget


class RecordingObserver(Observer):
    def __init__(self) -> None:
        self.overrides: list[frozenset[OverrideTarget]] = []
        self.verdicts: list[frozenset[CheckTarget]] = []

    def overrides_changed(self, targets: frozenset[OverrideTarget]) -> None:
        self.overrides.append(targets)

    def health_changed(self, targets: frozenset[CheckTarget]) -> None:
        self.verdicts.append(targets)
