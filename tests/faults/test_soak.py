"""Many changes: no flow hurt, no memory leaked, and the same rules as from a cold start.

`VIPD_SOAK=100000 pytest --nightly tests/faults/test_soak.py` makes that many, and more saves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.changes import Changes, services_of
from tests.faults.conftest import KEPT
from tests.faults.dataplanes import EQUIPMENTS, Equipment
from tests.faults.equipment import as_from_a_cold_start, resident
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab, Wiring, add_addresses

CHANGES = int(os.environ.get("VIPD_SOAK", "1000"))
WARM = 300
"""Changes until everything that is loaded once is loaded."""
MOST = 3 * 1024
"""KiB by which it may grow after that: more than twice what it does, and 4 KiB for each of the usual changes.
A fifth of the whole would hide a leak of 17 KiB in each."""
WORKERS = 4
SEED = 7
SERVICES = 5000
CHANGED = 500
WARM_SAVES = 3
SAVES = max(CHANGES // 100, WARM_SAVES + 4)
MOST_OF_SAVES = 50 * 1024
"""KiB by which it may grow. The garbage of one save is half of that."""

pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(600 + SAVES * 60)]


def work(daemon: Daemon, lab: Lab, changes: Changes, count: int) -> None:
    """Make this many changes, and look now and then that flows are answered."""
    for number in range(count):
        changes.one(daemon)
        if number % 100 == 0:
            lab.client.send(KEPT, 80, count=10).all_answered()


def test_many_random_changes(lab: Lab, daemon: Daemon, equipment: Equipment) -> None:
    changing = [Changes(SEED + n, range(n * 8, n * 8 + 8)) for n in range(WORKERS)]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda each: work(daemon, lab, each, WARM // WORKERS), changing))
        warm = resident(daemon)
        list(pool.map(lambda each: work(daemon, lab, each, (CHANGES - WARM) // WORKERS), changing))
    grown = resident(daemon)
    wanted = {name: service for each in changing for name, service in each.wanted.items()}
    assert services_of(daemon) == wanted, f"seed {SEED}"
    seen = f"{warm} KiB after {WARM} changes, {grown} after {CHANGES}"
    print(seen)
    assert grown < warm + MOST, seen
    daemon.wait_in_sync()
    assert daemon.status()["apply_failures"] == 0
    as_from_a_cold_start(equipment, daemon)


@pytest.fixture(params=EQUIPMENTS, ids=str)
def routeless(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A host that reaches its backends, and nothing else."""
    equipment: Equipment = request.param
    with Lab(Wiring(backends=1, host_route=False)) as built:
        add_addresses(built.host.namespace, "cluster", "10.244.255.1/16")
        with Daemon(built.host, **equipment.settings) as running:
            yield running


def save(daemon: Daemon, number: int) -> None:
    """Save the file with other backends for some of its services; returns when the kernel has them."""
    begin = number * CHANGED % SERVICES
    changed = range(begin, begin + CHANGED)
    services = [
        {
            "name": f"s{n}",
            "address": f"10.{96 + n // 250}.0.{n % 250 + 1}",
            "ports": ["80/tcp"],
            "backends": [f"10.244.{number % 250}.2" if n in changed else "10.244.0.3", "10.244.1.1"],
        }
        for n in range(SERVICES)
    ]
    new = daemon.services_dir / ".new"
    new.write_text(json.dumps({"apiVersion": "vipd/v1", "services": services}))
    new.rename(daemon.services_dir / "services.json")
    wanted = f"10.244.{number % 250}.2:80"
    daemon.wait_until(lambda: wanted in daemon.endpoints(f"s{begin}"), True, 300)
    daemon.wait_in_sync(300)


def test_a_large_file_that_is_saved_often_takes_no_more_memory_in_the_end(routeless: Daemon) -> None:
    """Without a default route every save lets vipd read all its routes, in objects that only a search finds
    as garbage."""
    seen = []
    for number in range(1, SAVES + 1):
        save(routeless, number)
        seen.append(resident(routeless))
        print(f"save {number}: {seen[-1]} KiB")
    assert seen[-1] < max(seen[:WARM_SAVES]) + MOST_OF_SAVES, f"KiB after each save: {seen}"
