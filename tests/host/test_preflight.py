"""Why the daemon does not start, in words that are true: real daemons in network namespaces of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.sources.host import namespace

pytestmark = pytest.mark.root

PREFIX = "STARTT"
RUNTIME = Path("/run/vipd")


@pytest.fixture
def node() -> Iterator[Node]:
    with namespace() as made:
        yield made


def lock_of(node: Node) -> Path:
    """The lock file of a network namespace."""
    inode = node.run("stat", "-L", "-c", "%i", "/proc/self/ns/net").stdout.strip()
    return RUNTIME / f"netns-{inode}-{PREFIX}.lock"


def refusal(daemon: Daemon) -> str:
    """What a daemon with these settings says that cannot start."""
    argv = (sys.executable, "-m", "vipd", "--config", str(daemon.config), "--once")
    done = daemon.host.run(*argv, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


@contextlib.contextmanager
def configured(node: Node) -> Iterator[Daemon]:
    """A daemon that is not started."""
    daemon = Daemon(node, chain_prefix=PREFIX)
    with daemon._directory:
        yield daemon


def test_another_daemon_is_named_where_there_is_one(node: Node) -> None:
    with Daemon(node, chain_prefix=PREFIX) as daemon, configured(node) as other:
        pid = daemon.status()["pid"]
        state = f"another vipd runs on {daemon.state_dir} (pid {pid}); hint: systemctl status vipd"
        assert state in refusal(daemon)
        told = refusal(other)
        assert f"another vipd writes the chains {PREFIX}-*" in told
        assert f"(pid {pid}); hint: stop it" in told
        daemon.kill()
        other.start()
        other.stop()


def test_no_local_user_can_hold_what_vipd_needs(node: Node) -> None:
    """Abstract sockets belong to everybody, and so do files that others can open."""
    with configured(node) as daemon, node.entered(), socket.socket(socket.AF_UNIX) as held:
        held.bind(f"\0vipd/{PREFIX}")
        daemon.state_dir.mkdir()
        (daemon.state_dir / "lock").touch(0o640)  # of an older version: open to its group
        with daemon:
            for path in (lock_of(node), daemon.state_dir / "lock"):
                assert path.stat().st_mode & 0o777 == 0o600
            assert RUNTIME.stat().st_mode & 0o777 == 0o755, "the API's socket is there, too"


def test_each_network_namespace_has_its_own_lock_and_those_that_killed_daemons_left_go(node: Node) -> None:
    with namespace() as second, namespace() as third, Daemon(node, chain_prefix=PREFIX) as daemon:
        with Daemon(second, chain_prefix=PREFIX) as killed:
            assert lock_of(second) != lock_of(node)
            killed.kill()
        left = lock_of(second)
        assert left.exists()
        other = [RUNTIME / "netns-x-V.lock", RUNTIME / "netns-7-LINK.lock", RUNTIME / "netns-7-DIR.lock"]
        other[0].touch()
        other[1].symlink_to(other[0])
        other[2].mkdir()
        try:
            with Daemon(third, chain_prefix=PREFIX):
                assert not left.exists(), "each start removes them"
                assert lock_of(node).exists(), "it is held"
                assert all(path.exists() for path in other), "no locks"
        finally:
            other[2].rmdir()
            for path in other[:2]:
                path.unlink()
        assert daemon.status()["state"] == "in-sync"


def test_a_directory_that_everybody_may_write_to_is_refused(node: Node) -> None:
    with configured(node) as daemon:
        daemon.state_dir.mkdir()
        daemon.state_dir.chmod(0o1777)
        told = refusal(daemon)
        assert f"everybody may write to {daemon.state_dir}; hint: chmod o-w {daemon.state_dir}" in told
        assert told.count("hint:") == 1


def test_without_a_directory_that_it_can_write_to_vipd_starts(node: Node) -> None:
    """As a plain user with CAP_NET_ADMIN, in a namespace of its own, say."""
    RUNTIME.mkdir(0o755, exist_ok=True)
    with configured(node) as daemon:
        daemon.directory.chmod(0o755)
        daemon.state_dir.mkdir()
        os.chown(daemon.state_dir, 65534, 65534)
        plain = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        rights = [f"--{kind}-caps=+net_admin,+net_raw" for kind in ("inh", "ambient")]
        argv = [*plain, *rights, sys.executable, "-m", "vipd", "--config", str(daemon.config), "--once"]
        inside = ["ip", "netns", "exec", node.namespace, *argv]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=120, check=False)
    assert "a second vipd in this network namespace would not be noticed" in done.stderr


DISKS = {
    "size=60m": "",
    "size=40m": "the disk is nearly full: ",
    "size=512k": "the disk is full: ",
    "size=60m,nr_inodes=300": "the disk is full: ",
}


def test_a_full_disk_is_a_warning(node: Node) -> None:
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=750,size=60m", "state", directory], check=True)
        try:
            with Daemon(node, state_dir=directory, chain_prefix=PREFIX) as daemon:

                def warnings() -> list[str]:
                    return [text for text in daemon.status()["warnings"] if "the disk is" in text]

                for options, warning in DISKS.items():
                    subprocess.run(["mount", "-o", f"remount,{options}", directory], check=True)
                    for number in range(1000 if "nr_inodes" in options else 0):
                        with contextlib.suppress(OSError):
                            Path(directory, f"file{number}").touch()
                    daemon.wait_until(lambda: bool(warnings()), bool(warning))
                    hint = "; hint: see what takes it: du -xh "
                    assert all(text.startswith(warning) and hint in text for text in warnings())
        finally:
            subprocess.run(["umount", "-l", directory], check=True)
