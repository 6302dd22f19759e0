"""A state directory that fills up, or becomes read-only, or is it from the start: a change that cannot be
stored is refused as a whole; accepted services go on; vipd writes again once it can."""

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
VIEW = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"'
# The file system itself cannot be remounted: the lock is open.
FAULTS = {
    "full": (
        'cat /dev/zero > "$0/filler" 2>/dev/null; true',
        'rm "$0/filler"',
        "No space left on device",
        "the disk is full",
    ),
    "read-only": (VIEW, 'umount "$0"', "Read-only file system", "is on a read-only file system"),
}
"""How it begins and ends, and what vipctl and status say."""
TOLD = "is on a read-only file system: what could be read serves"
READ_ONLY = f'{VIEW} && exec "$@"'


@pytest.fixture
def daemon(lab: Lab, equipment: Equipment) -> Iterator[Daemon]:
    plain = lab.host
    made = Daemon(plain, **equipment.settings)
    made.state_dir.mkdir()
    made.host = MountingNode(plain.namespace, "", "", "", directory=str(made.state_dir), script=SMALL)
    with made:
        made.host = plain
        yield made
    plain.run("sh", "-c", "nft flush ruleset; ip link delete vipd0", check=False)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_change_that_cannot_be_stored_is_refused_and_nothing_is_lost(
    lab: Lab, daemon: Daemon, fault: str
) -> None:
    backend, (begin, end, said, named) = backend_text(lab.backends[0]), FAULTS[fault]

    def run(script: str) -> None:
        inside = ("nsenter", "--target", str(daemon.status()["pid"]), "--mount")
        daemon.host.run(*inside, "sh", "-c", script, str(daemon.state_dir))

    daemon.vipctl("add", "10.96.9.1:80/tcp", backend)
    run(begin)
    for change in (
        ("add", "10.96.9.2:80/tcp", backend),
        ("drain", f"10.96.9.1:80/tcp/{backend}"),
        ("remove", "10.96.9.1:80/tcp"),
    ):
        refused = daemon.vipctl(*change, check=False)
        assert refused.returncode == 1
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr
    assert any(named in warning for warning in daemon.status()["warnings"])
    lab.client.send("10.96.9.1", 80, count=5).all_answered()
    lab.client.send("10.96.9.2", 80, count=2, timeout=1).all_failed("timeout")
    run(end)
    daemon.vipctl("add", "10.96.9.3:80/tcp", backend)
    lab.client.send("10.96.9.3", 80, count=5).all_answered()
    listed = {line.split()[0] for line in daemon.vipctl("list").stdout.splitlines()[1:]}
    assert listed == {"10.96.9.1:80/tcp", "10.96.9.3:80/tcp"}
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_what_can_be_read_serves(lab: Lab, equipment: Equipment, known: bool) -> None:
    backend = backend_text(lab.backends[0])
    declaration = f"- {{name: filed, address: 10.96.9.1, ports: [80/tcp], backends: ['{backend}']}}"
    host = lab.host
    daemon = Daemon(host, declaration, **equipment.settings)
    daemon.state_dir.mkdir()
    if known:
        daemon.start()
        daemon.vipctl("add", "10.96.9.2:80/tcp", backend, "--name", "stored")
        daemon.stop()
    for command in ("nft flush ruleset", "ip link delete vipd0"):
        host.run(*command.split(), check=False)
    daemon.host = MountingNode(host.namespace, "", "", "", directory=str(daemon.state_dir), script=READ_ONLY)
    with daemon:
        daemon.host = host
        for address in ("10.96.9.1", *(("10.96.9.2",) if known else ())):
            lab.client.send(address, 80, count=5).all_answered()
        reported = [warning for warning in daemon.status()["warnings"] if TOLD in warning]
        assert len(reported) == 1
        assert "hint: " in reported[0]
        refused = daemon.vipctl("add", "10.96.9.3:80/tcp", backend, check=False)
        assert refused.returncode == 1
        assert "state.db: cannot be written: Read-only file system" in refused.stderr
        lock = daemon.state_dir / "lock"
        held = str(lock if lock.exists() else daemon.state_dir)
        another = host.run("flock", "--nonblock", held, "true", check=False)
        assert another.returncode == 1, "no second vipd works on that directory"
        early = daemon.cleanup(check=False)
        assert "vipd is running" in early.stderr, "whatever pid stands in the lock file"
        assert "Traceback" not in daemon.log
    daemon.cleanup(check=False)
