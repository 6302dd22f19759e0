"""A file that takes more memory than there is: it is a problem of that file, and the daemon goes on. Where
asyncio itself has no memory, nobody knows which tasks would go on: the daemon ends at once and says so."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.dataplanes import NFTABLES
from tests.faults.memoryless_vipd import FILE
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

SERVICES = 20_000


class MemorylessDaemon(Daemon):
    module = "tests.faults.memoryless_vipd"


@contextmanager
def scarce(daemon: Daemon, more: int) -> Iterator[None]:
    """For a while the daemon gets no more than so many bytes besides what it has.

    With 1 MiB it may hang: threads for calls that may never return start when they are needed, and where a
    new thread gets no memory, `Thread.start` waits for ever. The watchdog of systemd restarts it then.
    """
    process = int(daemon.status()["pid"])
    size = re.search(r"VmSize:\s+(\d+) kB", "\n".join(daemon.memory()))
    assert size
    before = resource.prlimit(process, resource.RLIMIT_AS)
    resource.prlimit(process, resource.RLIMIT_AS, (int(size[1]) * 1024 + more, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_AS, before)


@pytest.mark.parametrize("more", [pytest.param(20 * 2**20, marks=pytest.mark.nightly), 60 * 2**20])
def test_the_daemon_outlives_a_file_that_is_too_large_for_it(lab: Lab, more: int) -> None:
    backend = backend_text(lab.backends[0])
    services = [
        {"name": f"s{n}", "address": f"10.97.{n >> 8}.{n & 255}", "ports": ["80/tcp"], "backends": [backend]}
        for n in range(SERVICES)
    ]
    with Daemon(lab.host, **NFTABLES.settings) as daemon:
        daemon.vipctl("add", "10.96.10.1:80/tcp", backend, "--name", "kept")
        process = daemon.status()["pid"]
        large = daemon.services_dir / "large.json"
        with scarce(daemon, more):
            new = daemon.services_dir / ".new"
            new.write_text(json.dumps({"apiVersion": "vipd/v1", "services": services}))
            new.rename(large)
            daemon.wait_until(lambda: troubled(daemon), True)
            lab.client.send("10.96.10.1", 80, count=5).all_answered()
        large.unlink()
        try:
            daemon.status()
        except OSError:  # asyncio itself had no memory
            assert_ended(daemon)
            daemon.start()
            process = daemon.status()["pid"]
        daemon.write(f"- {{name: late, address: 10.96.10.2, ports: [80/tcp], backends: ['{backend}']}}")
        daemon.wait_until(lambda: daemon.endpoints("late"), [backend])
        daemon.wait_in_sync()
        assert daemon.status()["pid"] == process
        assert len(daemon.log) < 100_000
        lab.client.send("10.96.10.2", 80, count=5).all_answered()


def test_a_loop_without_memory_ends_the_daemon_at_once(lab: Lab) -> None:
    with MemorylessDaemon(lab.host, **NFTABLES.settings) as daemon:
        daemon.vipctl("add", "10.96.10.1:80/tcp", backend_text(lab.backends[0]), "--name", "kept")
        (daemon.directory / FILE).touch()
        assert_ended(daemon)
        lab.client.send("10.96.10.1", 80, count=5).all_answered()
        (daemon.directory / FILE).unlink()
        daemon.start()
        assert daemon.endpoints("kept")


def assert_ended(daemon: Daemon) -> None:
    """It has ended by itself, and has said why; systemd would start it again."""
    assert daemon.wait_for_end() == 1
    assert "out of memory: vipd ends, the rules stay in the kernel; hint: " in daemon.log


def troubled(daemon: Daemon) -> bool:
    """Whether the daemon has met the end of its memory."""
    words = ("MemoryError", "out of memory", "Cannot allocate memory", "can't start new thread")
    return any(word in daemon.log for word in words)
