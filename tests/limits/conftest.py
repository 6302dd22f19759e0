"""What the tests of the sources share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sources.services_directory import ServicesDirectory


@pytest.fixture
def services_dir(tmp_path: Path) -> ServicesDirectory:
    """An empty services.d."""
    return ServicesDirectory(tmp_path)
