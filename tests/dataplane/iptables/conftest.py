"""A kernel that is faked, and a vipd that writes to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dataplane.iptables.fake_kernel import FakeKernel
from tests.lab.inside import Synced, synced


@pytest.fixture
def kernel() -> FakeKernel:
    """An empty one, with the programs of nft for the usual ones."""
    return FakeKernel()


@pytest.fixture
def vipd(kernel: FakeKernel, tmp_path: Path) -> Synced:
    """One with usual settings."""
    return synced("iptables", kernel.run, tmp_path)
