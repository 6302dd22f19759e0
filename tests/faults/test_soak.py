"""Many random changes: no flow hurt, no memory leaked, and the same rules as from a cold start.

`VIPD_SOAK=100000 pytest --nightly tests/faults/test_soak.py` makes that many changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.changes import Changes, services_of
from tests.faults.dataplanes import Equipment
from tests.faults.equipment import Api, as_from_a_cold_start, resident
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

CHANGES = int(os.environ.get("VIPD_SOAK", "1000"))
WARM = 300
"""Changes until everything that is loaded once is loaded."""
MOST = 3 * 1024
"""KiB by which it may grow after that: more than twice what it does, and 4 KiB for each of the usual changes.
A fifth of the whole would hide a leak of 17 KiB in each."""
WORKERS = 4
"""Connections that change services of their own at the same time."""
SEED = 7
STABLE = "10.96.7.1"

pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(300 + CHANGES // 5)]


@pytest.fixture(scope="module")
def daemon(lab: Lab, equipment: Equipment) -> Iterator[Daemon]:
    with Daemon(lab.host, **equipment.settings) as running:
        backends = [backend_text(backend) for backend in lab.backends]
        running.vipctl("add", f"{STABLE}:80/tcp", *backends, "--name", "kept")
        yield running


def work(daemon: Daemon, lab: Lab, changes: Changes, count: int) -> None:
    """Make this many changes over one connection, and look now and then that flows are answered."""
    api = Api(daemon)
    for number in range(count):
        changes.one(api)
        if number % 100 == 0:
            lab.client.send(STABLE, 80, count=10).all_answered()
    api.close()


def test_many_random_changes(lab: Lab, daemon: Daemon, equipment: Equipment) -> None:
    changing = [Changes(SEED + n, range(n * 8, n * 8 + 8)) for n in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda each: work(daemon, lab, each, WARM // WORKERS), changing))
        warm = resident(daemon)
        list(pool.map(lambda each: work(daemon, lab, each, (CHANGES - WARM) // WORKERS), changing))
    grown = resident(daemon)
    api = Api(daemon)
    wanted = {name: service for each in changing for name, service in each.wanted.items()}
    assert services_of(api) == wanted, f"seed {SEED}"
    api.close()
    seen = f"{warm} KiB after {WARM} changes, {grown} after {CHANGES}"
    print(seen)
    assert grown < warm + MOST, seen
    daemon.wait_in_sync()
    assert daemon.status()["apply_failures"] == 0
    as_from_a_cold_start(equipment, daemon)
