"""A real kernel for a module: an empty namespace, and a dataplane in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dataplane.namespace import Namespace
from tests.nftables.programmed import Inside, Programmed

Program = Callable[..., Programmed]


@pytest.fixture
def inside() -> Iterator[Inside]:
    """An empty namespace."""
    with Namespace() as namespace:
        yield Inside(namespace.name)


@pytest.fixture
def programmed(inside: Inside, tmp_path: Path) -> Programmed:
    """A dataplane with usual settings in that namespace."""
    return Programmed(inside, tmp_path)
