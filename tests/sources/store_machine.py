"""A store's clocks and a disk that is full, for tests of what is built on the store."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.model.samples import service
from vipd.model.service import Service
from vipd.sources import history, store
from vipd.sources.confirmation import Clocks
from vipd.sources.store import StoreSource

START = datetime(2026, 1, 1, tzinfo=UTC)
A = service("a", "10.96.0.10", "10.244.0.5")
B = service("b", "10.96.0.11", "10.244.0.6")


@dataclass
class Machine:
    """A host's clocks, which a test sets."""

    time_of_day: datetime = START
    uptime: float = 1000.0
    boot: str = "first"

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.time_of_day, lambda: self.uptime, lambda: self.boot)

    def wait(self, seconds: float) -> None:
        self.time_of_day += timedelta(seconds=seconds)
        self.uptime += seconds

    def reboot(self) -> None:
        self.uptime, self.boot = 5.0, self.boot + "'"

    def start(self, directory: Path) -> StoreSource:
        """vipd starts: the store has read its files."""
        made = StoreSource(directory / "services.yaml", self.clocks)
        made.load()
        return made


def holding(*services: Service) -> dict[str, Service]:
    return {each.name: each for each in services}


def full_disk(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """From now on these files cannot be written; returns them, to be emptied when there is room again."""
    full = list(names)

    def wrapped(module: Any) -> None:
        write = module.write_durably

        def write_unless_full(path: Path, data: bytes) -> None:
            if path.name in full:
                raise OSError(28, "No space left on device")
            write(path, data)

        monkeypatch.setattr(module, "write_durably", write_unless_full)

    wrapped(history)
    wrapped(store)
    return full
