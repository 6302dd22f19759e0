"""What every test relies on: tests that need root say so instead of being left out."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test marked `root` at once when it is not run by root: real packets are the point of it."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.fail("needs root for network namespaces; run: sudo bash tests/run.sh", pytrace=False)
