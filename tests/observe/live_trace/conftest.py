"""An empty host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.node import Node
from tests.observe.empty_host import empty_host


@pytest.fixture(scope="module")
def host() -> Iterator[Node]:
    """A network namespace with nothing but `lo`."""
    with empty_host() as node:
        yield node
