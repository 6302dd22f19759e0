"""One lab for each module of faults, and a host with tools that fail on demand, for each dataplane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.dataplanes import EQUIPMENTS, Equipment
from tests.faults.equipment import FailingTools
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab, Wiring
from tests.packets.services import SERVED_PORT, backend_text

KEPT = "10.96.6.1"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(Wiring(backends=2)) as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.fixture(scope="module", params=EQUIPMENTS, ids=str)
def equipment(request: pytest.FixtureRequest) -> Equipment:
    given: Equipment = request.param
    return given


@pytest.fixture(scope="module")
def daemon(lab: Lab, equipment: Equipment) -> Iterator[Daemon]:
    """It serves one service, `kept`, that no test changes."""
    with Daemon(lab.host, **equipment.settings) as running:
        backends = [backend_text(backend) for backend in lab.backends]
        running.vipctl("add", f"{KEPT}:80/tcp", *backends, "--name", "kept")
        yield running


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory, equipment: Equipment) -> FailingTools:
    return FailingTools(tmp_path_factory.mktemp("tools"), equipment)
