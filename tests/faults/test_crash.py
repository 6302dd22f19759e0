"""SIGKILL at any moment of a stream of changes hurts no flow, loses no answered change, leaves no debris."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time

import pytest

from tests.faults.changes import Changes, services_of
from tests.faults.conftest import KEPT
from tests.faults.dataplanes import Equipment
from tests.faults.equipment import GONE, as_from_a_cold_start
from tests.lab.daemon import Daemon
from tests.lab.steady_client import steady_client
from tests.lab.topology import Lab

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

CRASHES = 6
COMPARED = 3
"""One in so many times the rules are compared with those of a cold start."""
SEED = 20
LONGEST_LIFE = 0.3
"""Seconds of changes before a crash, after the first one: a change takes some ten milliseconds."""


def crash(daemon: Daemon, changes: Changes, after: float) -> None:
    def stream() -> None:
        with contextlib.suppress(*GONE):
            while True:
                changes.one(daemon)

    changing = threading.Thread(target=stream)
    before = changes.answered
    changing.start()
    # Else, on a slow machine, no change would be met.
    daemon.wait_until(lambda: changes.answered > before or not changing.is_alive(), True)
    time.sleep(after)
    daemon.kill()
    changing.join(60)
    assert not changing.is_alive()


@pytest.mark.nightly(each_time="nftables")
def test_a_fault_in_its_memory_says_where_it_was(daemon: Daemon) -> None:
    daemon.kill(signal.SIGSEGV)
    assert "Fatal Python error: Segmentation fault" in daemon.log
    assert "asyncio/base_events.py" in daemon.log
    daemon.start()
    assert daemon.endpoints("kept")


@pytest.mark.nightly(each_time="iptables")
def test_crashes_amid_changes(lab: Lab, daemon: Daemon, equipment: Equipment) -> None:
    moments, changes = random.Random(SEED), Changes(SEED)
    with steady_client(lab.client, KEPT, 80) as outcome:
        for number in range(CRASHES):
            crash(daemon, changes, moments.uniform(0, LONGEST_LIFE))
            daemon.start()
            found = services_of(daemon)
            changes.settle(found)
            assert found == changes.wanted, f"seed {SEED}: an answered change was lost"
            if number % COMPARED == 0:
                as_from_a_cold_start(equipment, daemon)
    assert outcome["failed"] == {}, f"seed {SEED}"
    assert outcome["answered"] > 40
    # Else the crashes met nothing.
    assert changes.answered >= CRASHES
