"""A host without a default route, whose first address is on lo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.topology import Lab, Wiring, add_addresses
from tests.packets.services import SERVED_PORT

ROUTER_ADDRESSES = ("192.0.2.9/32", "fd00:77::1/128")
"""On lo, as routers have them: what the kernel takes as source when a route to a VIP names none."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab of each test's own: what is compared is the state of its host."""
    with Lab(Wiring(backends=2, host_route=False)) as built:
        add_addresses(built.host.namespace, "lo", *ROUTER_ADDRESSES)
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.fixture
def lab_without_way_back() -> Iterator[Lab]:
    """A lab whose backends answer only addresses of their own network."""
    with Lab(Wiring(backends=2, host_route=False, backend_routes=False)) as built:
        add_addresses(built.host.namespace, "lo", *ROUTER_ADDRESSES)
        built.serve_everywhere(SERVED_PORT)
        yield built
