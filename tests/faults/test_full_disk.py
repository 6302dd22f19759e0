"""A state directory that fills up, or becomes read-only, while the daemon runs.

A change that cannot be stored is refused as a whole; accepted services go on; vipd writes again once it can.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.dataplanes import Equipment
from tests.faults.equipment import MountingNode
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

SMALL = 'mount -t tmpfs -o size=256k,mode=755 tmpfs "$0" && exec "$@"'
FILL = 'cat /dev/zero > "$0/filler" 2>/dev/null; true'


class SmallDisk:
    """The state directory as the daemon sees it."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def run(self, *argv: str) -> None:
        """Run a command in the daemon's mount namespace."""
        pid = self._daemon.status()["pid"]
        self._daemon.host.run("nsenter", "--target", str(pid), "--mount", *argv)

    def fill(self) -> None:
        """Leave no byte free."""
        self.run("sh", "-c", FILL, str(self._daemon.state_dir))

    def empty(self) -> None:
        """Make room again."""
        self.run("rm", f"{self._daemon.state_dir}/filler")

    def forbid_writing(self) -> None:
        """Mount a read-only view over it. The file system itself cannot be remounted: the lock is open."""
        path = str(self._daemon.state_dir)
        self.run("mount", "--bind", path, path)
        self.run("mount", "-o", "remount,ro,bind", path)

    def allow_writing(self) -> None:
        """Take that view away."""
        self.run("umount", str(self._daemon.state_dir))


@pytest.fixture
def daemon(lab: Lab, equipment: Equipment) -> Iterator[Daemon]:
    """A daemon whose state directory is that small file system."""
    plain = lab.host
    made = Daemon(plain, **equipment.settings)
    made.state_dir.mkdir()
    made.host = MountingNode(plain.namespace, "", "", "", directory=str(made.state_dir), script=SMALL)
    with made:
        made.host = plain
        yield made
    plain.run("sh", "-c", "nft flush ruleset; ip link delete vipd0", check=False)


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_a_change_that_cannot_be_stored_is_refused_and_nothing_is_lost(
    lab: Lab, daemon: Daemon, fault: str
) -> None:
    backend, disk = backend_text(lab.backends[0]), SmallDisk(daemon)
    daemon.vipctl("add", "10.96.9.1:80/tcp", backend)
    if fault == "full":
        disk.fill()
    else:
        disk.forbid_writing()
    for refused in (
        daemon.vipctl("add", "10.96.9.2:80/tcp", backend, check=False),
        daemon.vipctl("drain", f"10.96.9.1:80/tcp/{backend}", check=False),
        daemon.vipctl("remove", "10.96.9.1:80/tcp", check=False),
    ):
        assert refused.returncode == 1
        said = "No space left on device" if fault == "full" else "Read-only file system"
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr
    named = "the disk is full" if fault == "full" else "is on a read-only file system"
    assert any(named in warning for warning in daemon.status()["warnings"])
    lab.client.send("10.96.9.1", 80, count=5).all_answered()
    lab.client.send("10.96.9.2", 80, count=2, timeout=1).all_failed("timeout")
    if fault == "full":
        disk.empty()
    else:
        disk.allow_writing()
    daemon.vipctl("add", "10.96.9.3:80/tcp", backend)
    lab.client.send("10.96.9.3", 80, count=5).all_answered()
    assert {line.split()[0] for line in daemon.vipctl("list").stdout.splitlines()[1:]} == {
        "10.96.9.1:80/tcp",
        "10.96.9.3:80/tcp",
    }
    assert "Traceback" not in daemon.log
