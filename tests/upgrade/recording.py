"""Records the state directory of a real daemon of this tree, for later releases to start with.

    sudo .venv/bin/python -m tests.upgrade.recording

replaces the folder `tests/upgrade/VERSION`, where VERSION is vipd's own. Run it before each release, and
never for a version that is released: its folder is what hosts have.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import vipd
from tests.lab.daemon import Daemon
from tests.lab.name_server import NameServer
from tests.lab.topology import Lab
from tests.sources.etcd.members import Cluster, Member
from tests.upgrade import folder
from tests.upgrade.scene import (
    API,
    CHECK,
    DEAD_PORT,
    FILES,
    KEYS,
    NAME,
    SERVED_PORT,
    VIPS,
    WEB,
    backends,
    daemon_on,
    host,
    knowledge,
    new_flows,
)

FLOWS = 20


def record(path: Path) -> None:
    """Replace the folder."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lab = stack.enter_context(host())
        names = NameServer(lab.host, directory)
        stack.callback(names.die)
        names.addresses(NAME, [lab.backends[0].ipv4])
        etcd = Cluster([Member(directory, "m0", (2379, 2380))])
        stack.callback(etcd.stop)
        with lab.host.entered():
            etcd.start()
            for key, value in KEYS.items():
                etcd.put(f"/vipd/v1/{key}", value)
        daemon = daemon_on(lab)
        for name, services in FILES.items():
            daemon.write(services, name)
        with daemon:
            daemon.vipctl("set-dataplane", "nftables")
            daemon.wait_until(lambda: len(daemon.endpoints("fleet")), 2)
            _use(lab, daemon)
            daemon.stop()
            daemon.start()
            daemon.wait_until(lambda: len(daemon.endpoints("fleet")), 2)
            known = knowledge(daemon)
            daemon.stop()
            folder.save(path, daemon, known)


def _use(lab: Lab, daemon: Daemon) -> None:
    """What operators and clients do: overrides of each kind, changes, one of them unconfirmed, flows."""
    good, dead = (f"{lab.backends[1].ipv4}:{port}" for port in (SERVED_PORT, DEAD_PORT))
    daemon.vipctl(
        "add",
        f"{WEB}:80/tcp",
        f"{lab.backends[0].ipv4}:{SERVED_PORT}",
        good,
        dead,
        f"{lab.backends[2].ipv4}:{SERVED_PORT}",
        "--name",
        "web",
        "--check",
        CHECK,
    )
    daemon.wait_until(lambda: backends(daemon, "web").get(dead), False)
    daemon.vipctl("add", f"{API}:80/tcp", f"{lab.backends[0].ipv4}:{SERVED_PORT}", "--name", "api")
    daemon.vipctl("drain", f"shop/{good}", "--reason", "kernel update", "--for", "2h")
    daemon.vipctl("set", f"shop/{good}", "--weight", "3")
    daemon.vipctl("disable", "--address", lab.backends[2].ipv4)
    daemon.wait_in_sync()
    for vip in VIPS.values():
        lab.client.send(vip, 80, count=FLOWS).all_answered()
    daemon.wait_until(lambda: {new_flows(daemon)[name] for name in VIPS}, {FLOWS})
    daemon.vipctl("host", "drain", "--reason", "new disks")
    daemon.vipctl("set", "web", "--fallback", "drop", "--confirm", "24h")


if __name__ == "__main__":
    record(folder.ROOT / vipd.__version__)
