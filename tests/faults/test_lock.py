"""Another program holds the xtables lock, which counts for iptables-legacy alone.

The nftables dataplane takes no part: nf_tables has no lock that a program could hold, and nft begins anew
where another transaction came between.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

WITHIN_WAIT = 2.0
PROMPT = 4.0
"""Less than that wait: whoever was held up by it would be heard no sooner than after it."""
TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lock of this test's own: the usual one is shared with all namespaces of the machine."""
    path = tmp_path_factory.mktemp("lock") / "xtables.lock"
    path.touch()
    return path


@pytest.fixture(scope="module")
def daemon(lab: Lab, lock: Path) -> Iterator[Daemon]:
    host = lab.host.with_environment(XTABLES_LOCKFILE=str(lock))
    with Daemon(host, iptables_variant="legacy") as running:
        yield running


@contextmanager
def held(path: Path) -> Iterator[Callable[[], None]]:
    """Hold the lock, until what this gives is called or at the exit."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield lambda: fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def longest_answer_until_failed(daemon: Daemon) -> float:
    """The longest that status took to answer, asked again and again until it says that a change failed."""
    longest, end = 0.0, time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        start = time.monotonic()
        status = daemon.status()
        longest = max(longest, time.monotonic() - start)
        if status["state"] == "failed":
            assert "lock" in status["message"]
            return longest
        time.sleep(0.1)
    raise AssertionError(f"nothing failed within {TIMEOUT_SECONDS} s")


def test_a_change_waits_for_the_lock(lab: Lab, daemon: Daemon, lock: Path) -> None:
    daemon.vipctl("add", "10.96.3.1:80/tcp", backend_text(lab.backends[0]))
    start = time.monotonic()
    with held(lock) as release:
        timer = threading.Timer(WITHIN_WAIT, release)
        timer.start()
        daemon.vipctl("add", "10.96.3.2:80/tcp", backend_text(lab.backends[0]))
        assert time.monotonic() - start >= WITHIN_WAIT
        timer.join()
    for number in (1, 2):
        lab.client.send(f"10.96.3.{number}", 80, count=3).all_answered()
    assert daemon.status()["apply_failures"] == 0


def test_a_lock_held_too_long_is_tried_again_and_loses_nothing(lab: Lab, daemon: Daemon, lock: Path) -> None:
    backend = backend_text(lab.backends[0])
    with held(lock) as release, ThreadPoolExecutor(2) as pool:
        first = pool.submit(daemon.vipctl, "add", "10.96.3.3:80/tcp", backend, check=False)
        time.sleep(1.0)
        second = pool.submit(daemon.vipctl, "add", "10.96.3.4:80/tcp", backend, check=False)
        assert longest_answer_until_failed(daemon) < PROMPT
        # What the kernel has serves on.
        lab.client.send("10.96.3.1", 80, count=3).all_answered()
        release()
        daemon.wait_in_sync()
        first.result()
        second.result()
    for number in (3, 4):
        lab.client.send(f"10.96.3.{number}", 80, count=3).all_answered()
