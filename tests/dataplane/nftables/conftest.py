"""A real kernel for a module: a lab with flows to make, and an empty namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.serving import built_lab, synced_in
from tests.dataplane.watched_programs import WatchedPrograms
from tests.lab.inside import Synced, synced
from tests.lab.topology import Lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with flows to make."""
    with built_lab() as built:
        yield built


@pytest.fixture
def serving(lab: Lab, tmp_path: Path) -> Iterator[Synced]:
    """A dataplane of the lab's host; without services in the end."""
    made = synced_in(lab, tmp_path)
    yield made
    made.become()


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    """An empty namespace."""
    with Namespace() as made:
        yield made


@pytest.fixture
def programs() -> WatchedPrograms:
    """Programs that a test looks on or disturbs."""
    return WatchedPrograms()


@pytest.fixture
def vipd(namespace: Namespace, tmp_path: Path) -> Synced:
    """A dataplane with usual settings in that namespace."""
    return synced("nftables", namespace.name, tmp_path)
