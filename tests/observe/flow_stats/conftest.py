"""A lab with a client, a host and two backends, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.topology import Lab, Wiring


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Backends serve TCP and UDP on port 80 and count what they get by answering."""
    with Lab(Wiring(backends=2)) as made:
        made.serve_everywhere(80)
        yield made
