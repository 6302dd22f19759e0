"""A real kernel for a module: an empty namespace, and a dataplane in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.programmed import Inside, Programmed
from tests.dataplane.nftables.serving import built_lab, programmed_in
from tests.lab.topology import Lab

Program = Callable[..., Programmed]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with flows to make."""
    with built_lab() as built:
        yield built


@pytest.fixture
def serving(lab: Lab, tmp_path: Path) -> Iterator[Programmed]:
    """A dataplane of the lab's host; without services in the end."""
    made = programmed_in(lab, tmp_path)
    yield made
    made.become()


@pytest.fixture
def inside() -> Iterator[Inside]:
    """An empty namespace."""
    with Namespace() as namespace:
        yield Inside(namespace.name)


@pytest.fixture
def programmed(inside: Inside, tmp_path: Path) -> Programmed:
    """A dataplane with usual settings in that namespace."""
    return Programmed(inside, tmp_path)
