"""Another program holds the xtables lock, which counts for iptables-legacy alone.

The nftables dataplane takes no part: nf_tables has no lock that a program could hold, and nft begins anew
where another transaction came between.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.equipment import EquippedNode
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

WITHIN_WAIT = 3.0
BEYOND_WAIT = 7.0
"""vipd's iptables waits for five seconds."""
PROMPT = 1.0


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lock of this test's own: the usual one is shared with all namespaces of the machine."""
    path = tmp_path_factory.mktemp("lock") / "xtables.lock"
    path.touch()
    return path


@pytest.fixture(scope="module")
def daemon(lab: Lab, lock: Path) -> Iterator[Daemon]:
    host = EquippedNode.of(lab.host, XTABLES_LOCKFILE=str(lock))
    with Daemon(host, iptables_variant="legacy") as running:
        yield running


@contextmanager
def held(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock for a while, from now on; on exit it is free."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timer = threading.Timer(seconds, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def longest_answer(daemon: Daemon, until: float) -> float:
    """The longest that status took to answer, asked again and again."""
    longest = 0.0
    while time.monotonic() < until:
        start = time.monotonic()
        daemon.status()
        longest = max(longest, time.monotonic() - start)
        time.sleep(0.1)
    return longest


def test_a_change_waits_for_the_lock(lab: Lab, daemon: Daemon, lock: Path) -> None:
    daemon.vipctl("add", "10.96.3.1:80/tcp", backend_text(lab.backends[0]))
    start = time.monotonic()
    with held(lock, WITHIN_WAIT):
        daemon.vipctl("add", "10.96.3.2:80/tcp", backend_text(lab.backends[0]))
        waited = time.monotonic() - start
    assert WITHIN_WAIT <= waited < WITHIN_WAIT + 3
    for number in (1, 2):
        lab.client.send(f"10.96.3.{number}", 80, count=3).all_answered()
    assert daemon.status()["apply_failures"] == 0


def test_a_lock_held_too_long_is_tried_again_and_loses_nothing(lab: Lab, daemon: Daemon, lock: Path) -> None:
    backend = backend_text(lab.backends[0])
    start = time.monotonic()
    with held(lock, BEYOND_WAIT):
        process = daemon.host.start("true")
        process.wait()
        first = threading.Thread(
            target=daemon.vipctl, args=("add", "10.96.3.3:80/tcp", backend), kwargs={"check": False}
        )
        first.start()
        time.sleep(1.0)
        second = threading.Thread(
            target=daemon.vipctl, args=("add", "10.96.3.4:80/tcp", backend), kwargs={"check": False}
        )
        second.start()
        assert longest_answer(daemon, start + BEYOND_WAIT - 0.5) < PROMPT
        status = daemon.status()
        assert status["state"] == "failed"
        assert "lock" in status["message"]
        # What the kernel has serves on.
        lab.client.send("10.96.3.1", 80, count=3).all_answered()
        daemon.wait_in_sync(10)
        first.join()
        second.join()
    for number in (3, 4):
        lab.client.send(f"10.96.3.{number}", 80, count=3).all_answered()
