"""One lab for each module of faults, and a host with tools that fail on demand, for each dataplane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.dataplanes import EQUIPMENTS, Equipment
from tests.faults.equipment import FailingTools
from tests.lab.topology import Lab, Wiring
from tests.packets.services import SERVED_PORT


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
def tools(tmp_path_factory: pytest.TempPathFactory, equipment: Equipment) -> FailingTools:
    return FailingTools(tmp_path_factory.mktemp("tools"), equipment)
