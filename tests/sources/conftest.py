"""What the tests of the sources share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.node import Node
from tests.sources.host import Host, namespace


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One namespace for a file's tests."""
    with namespace() as made:
        yield made


@pytest.fixture
def host(node: Node) -> Iterator[Host]:
    """A vipd that knows nothing yet, and runs."""
    with Host(node) as running:
        yield running
