"""Reads `seams.toml`: faults between packages."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("seams.toml")


@dataclass(frozen=True)
class Seam:
    path: str
    """From the root of the project."""
    name: str
    before: str
    after: str
    tests: tuple[str, ...]
    """Arguments for pytest: who is to notice."""

    def changed(self, source: str) -> str:
        """The source with the fault. Raises ValueError unless it has the place once."""
        if source.count(self.before) != 1:
            raise ValueError(f"{self.path} has no longer one place for: {self.name}")
        return source.replace(self.before, self.after)


def read_seams() -> list[Seam]:
    rows = tomllib.loads(FILE.read_text())["seam"]
    return [Seam(r["file"], r["fault"], r["before"], r["after"], tuple(r["tests"])) for r in rows]
