"""One lab and one daemon for each module; a module that needs other wiring makes its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.inside import DATAPLANES
from tests.lab.topology import Lab
from tests.packets.outside import Declared
from tests.packets.services import SERVED_PORT, Services


@pytest.fixture(scope="module", params=DATAPLANES)
def dataplane(request: pytest.FixtureRequest) -> str:
    """What programs the kernel: every test of this room is run with each."""
    return str(request.param)


@pytest.fixture(scope="module")
def lab(dataplane: str) -> Iterator[Lab]:
    """A lab of the usual wiring whose three backends serve TCP and UDP. One for each dataplane: a new flow
    whose source port was used before would go where that one went."""
    with Lab() as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.fixture(scope="module")
def daemon(lab: Lab, dataplane: str) -> Iterator[Daemon]:
    with Daemon(lab.host, dataplane=dataplane) as running:
        yield running


@pytest.fixture(scope="module")
def services(daemon: Daemon) -> Services:
    return Services(daemon)


@pytest.fixture(scope="module")
def declared(daemon: Daemon) -> Declared:
    """Services of that daemon in files, for what vipctl has no option for."""
    return Declared(daemon)
