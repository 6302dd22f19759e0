"""What the tests of the sources share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.node import Node
from tests.sources.host import Host, QuickHost, namespace


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One namespace for a file's tests."""
    with namespace() as made:
        yield made


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A vipd that knows nothing yet, and runs: a daemon for a test that needs root."""
    daemon = request.node.get_closest_marker("root")
    with Host(request.getfixturevalue("node")) if daemon else QuickHost() as running:
        yield running
