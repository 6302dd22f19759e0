"""Reads the list of accepted survivors."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.mutation.mutants import Mutant

ACCEPTED = Path(__file__).with_name("accepted.toml")


def read_accepted() -> dict[Mutant, str]:
    tables = tomllib.loads(ACCEPTED.read_text())
    return {Mutant(path, name): reason for path, names in tables.items() for name, reason in names.items()}
