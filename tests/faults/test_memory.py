"""A large file that is saved again and again, on a host without a default route: memory stays what it was.

Without one every save lets vipd read all its routes, in objects that only a search finds as garbage.
`VIPD_SOAK=10000 pytest --nightly tests/faults/test_memory.py` saves it a hundred times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.faults.dataplanes import EQUIPMENTS, Equipment
from tests.faults.equipment import resident
from tests.faults.test_soak import CHANGES
from tests.lab.daemon import Daemon
from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.topology import ip

SERVICES = 5000
CHANGED = 500
"""Of them in each save."""
WARM = 3
"""Saves until everything that is loaded once is loaded."""
SAVES = max(CHANGES // 100, WARM + 4)
MOST = 50 * 1024
"""KiB by which it may grow. The garbage of one save is half of that."""

pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(600 + SAVES * 60)]


@pytest.fixture(params=EQUIPMENTS, ids=str)
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A host that reaches its backends, and nothing else."""
    equipment: Equipment = request.param
    name = f"{new_prefix()}-host"
    node = Node(name, "host", "10.244.0.1", "")
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "pods", "type", "bridge")
        ip("-n", name, "address", "add", "10.244.0.1/16", "dev", "pods")
        ip("-n", name, "link", "set", "pods", "up")
        with Daemon(node, **equipment.settings) as running:
            yield running
    finally:
        ip("netns", "delete", name)


def save(daemon: Daemon, number: int) -> None:
    """Save the file with other backends for some of its services; returns when the kernel has them."""
    begin = number * CHANGED % SERVICES
    services = [
        {
            "name": f"s{n}",
            "address": f"10.{96 + n // 250}.0.{n % 250 + 1}",
            "ports": ["80/tcp"],
            "backends": [f"10.244.{number % 250}.{2 if begin <= n < begin + CHANGED else 3}", "10.244.1.1"],
        }
        if begin <= n < begin + CHANGED
        else {
            "name": f"s{n}",
            "address": f"10.{96 + n // 250}.0.{n % 250 + 1}",
            "ports": ["80/tcp"],
            "backends": ["10.244.0.3", "10.244.1.1"],
        }
        for n in range(SERVICES)
    ]
    new = daemon.services_dir / ".new"
    new.write_text(json.dumps({"apiVersion": "vipd/v1", "services": services}))
    new.rename(daemon.services_dir / "services.json")
    wanted = f"10.244.{number % 250}.2:80"
    daemon.wait_until(lambda: wanted in daemon.endpoints(f"s{begin}"), True, 300)
    daemon.wait_in_sync(300)


def test_a_large_file_that_is_saved_often_takes_no_more_memory_in_the_end(daemon: Daemon) -> None:
    seen = []
    for number in range(1, SAVES + 1):
        save(daemon, number)
        seen.append(resident(daemon))
        print(f"save {number}: {seen[-1]} KiB")
    assert seen[-1] < max(seen[:WARM]) + MOST, f"KiB after each save: {seen}"
