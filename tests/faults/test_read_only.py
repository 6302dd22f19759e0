"""A state directory that is read-only at the start: vipd serves what it can read, and status warns."""

from __future__ import annotations

import subprocess

import pytest

from tests.faults.dataplanes import Equipment
from tests.faults.equipment import MountingNode
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

TOLD = "is on a read-only file system: what could be read serves"
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


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
        assert "history.jsonl: cannot be written: Read-only file system" in refused.stderr
        another = subprocess.run(
            host.inside(["python3", "-c", HELD, str(daemon.state_dir)]),
            capture_output=True,
            text=True,
            check=True,
        )
        assert another.stdout == "held\n", "no second vipd works on that directory"
        early = daemon.cleanup(check=False)
        assert "vipd is running" in early.stderr, "whatever pid stands in the lock file"
        assert "Traceback" not in daemon.log
    daemon.cleanup(check=False)


HELD = """if True:
    import fcntl, os, sys
    path = sys.argv[1] + "/lock"
    opened = os.open(path if os.path.exists(path) else sys.argv[1], os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held")
"""
