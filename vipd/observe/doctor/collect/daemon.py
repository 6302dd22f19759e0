"""The daemon: queried over its socket, and detected by its lock for the network namespace."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vipd import __version__
from vipd.host.preflight import RUNTIME_DIR, locked_inodes, namespace_locks
from vipd.observe.api_client import Client, ClientError, url_path
from vipd.observe.doctor.facts import Daemon

TIMEOUT_SECONDS = 10.0
"""Maximum silence in seconds."""
SYNC_WAIT_SECONDS = 3.0
"""Seconds in which a change is over, usually."""
PENDING_STATES = ("pending", "starting")


def prefixes_in_use(root: Path) -> frozenset[str]:
    """Chain prefixes of the vipds at work in this network namespace (vipd/host/preflight.py).

    Raises OSError and ValueError when the kernel's list of locks cannot be read.
    """
    held = locked_inodes(root / "proc")
    try:
        locks = namespace_locks(root / RUNTIME_DIR.relative_to("/"), root / "proc")
    except FileNotFoundError:
        return frozenset()
    inodes = {prefix: path.lstat().st_ino for prefix, path in locks.items()}
    if inodes and not held:  # a list without any lock is that of a container, which does not show the host's
        raise ValueError("/proc/locks is empty")
    return frozenset(prefix for prefix, inode in inodes.items() if inode in held)


def ask_daemon(socket: str) -> tuple[Mapping[str, Any], list[Mapping[str, Any]], str]:
    """Status and services, or why there is no answer. A change on its way is waited for."""
    client = Client(socket, TIMEOUT_SECONDS)
    end = time.monotonic() + SYNC_WAIT_SECONDS
    try:
        status = client.get(url_path("status"))
        while status["state"] in PENDING_STATES and time.monotonic() < end:
            time.sleep(SYNC_WAIT_SECONDS / 20)
            status = client.get(url_path("status"))
        return status, client.get(url_path("services"))["services"], ""
    except ClientError as error:
        return {}, [], str(error)
    except (KeyError, TypeError, AttributeError) as error:
        return {}, [], f"its answer is not understood: {type(error).__name__}: {error}"


def serves_elsewhere(pid: int, root: Path) -> bool:
    """Whether a vipd with this pid has another network namespace than this process; False if that is
    unknown."""
    try:
        command = (root / f"proc/{pid}/cmdline").read_bytes()
        here, there = (root / "proc/self/ns/net").stat(), (root / f"proc/{pid}/ns/net").stat()
    except OSError:
        return False
    return b"vipd" in command and (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)


def describe(status: Mapping[str, Any], fault: str, root: Path, prefix: str, elsewhere: bool) -> Daemon:
    """The known facts about it."""
    try:
        held, unseen = prefixes_in_use(root), ""
    except (OSError, ValueError) as error:
        held, unseen = frozenset(), f"the list of locks cannot be read: {error}"
    others = tuple(sorted(held - {prefix}))
    return Daemon(status, fault, prefix in held, others, unseen, elsewhere, __version__)
