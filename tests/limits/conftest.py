"""What the tests of the sources share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.room import Room


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """An empty services.d."""
    return Room(tmp_path)
