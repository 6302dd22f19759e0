"""What must hold before the daemon may start: it is the only one here, and may change the kernel's rules."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from vipd.settings import Settings

EXIT_FAILED = 1
EXIT_NOT_PERMITTED = 77
"""EX_NOPERM of sysexits.h: a restart would not help."""
LOCK = "lock"
CAP_NET_ADMIN = 12
"""Its bit (linux/capability.h)."""


class StartError(RuntimeError):
    """The daemon cannot start: what and why; the exit code, and the system's error number or 0."""

    def __init__(self, what: str, code: int = EXIT_FAILED, number: int = 0) -> None:
        super().__init__(what)
        self.code, self.number = code, number


def require_privileges() -> None:
    """Raises StartError unless the tools have a chance to work."""
    if not may_change_rules():
        hint = "run as root, or give it AmbientCapabilities=CAP_NET_ADMIN"
        what = f"vipd may not change the kernel's rules: it lacks CAP_NET_ADMIN; hint: {hint}"
        raise StartError(what, EXIT_NOT_PERMITTED, errno.EPERM)


def may_change_rules(status: Path = Path("/proc/self/status")) -> bool:
    """Whether CAP_NET_ADMIN is in effect; also when that cannot be found out, for then the tools will say."""
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    except OSError:
        return True
    return found is None or bool(int(found[1], 16) >> CAP_NET_ADMIN & 1)


@contextlib.contextmanager
def state_lock(settings: Settings) -> Iterator[None]:
    """Hold the state directory: two daemons on one would undo each other. Raises StartError."""
    path = settings.state_dir / LOCK
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        what = f"{path}: {error.strerror}; hint: run as root, or set state_dir"
        raise StartError(what, number=error.errno or 0) from None
    try:
        _take_lock(descriptor, settings)
        with _namespace_lock(settings):
            yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _namespace_lock(settings: Settings) -> Iterator[None]:
    """Hold the chain prefix in this network namespace, whatever the state directory: abstract sockets belong
    to a network namespace (unix(7)), and the kernel lets go of them when their process ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(f"\0vipd/{settings.chain_prefix}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                what = f"another vipd writes the chains {settings.chain_prefix}-* in this network namespace"
                raise StartError(f"{what}; hint: stop it, or use another chain_prefix") from None
            what = f"the chains {settings.chain_prefix}-* cannot be locked in this network namespace"
            raise StartError(f"{what}: {error.strerror or error}", number=error.errno or 0) from None
        yield


def _take_lock(descriptor: int, settings: Settings) -> None:
    """Lock the file and leave our pid in it, by which cleanup knows that we run."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartError(f"another vipd runs on {settings.state_dir}; hint: systemctl status vipd") from None
    except OSError as error:
        what = f"{settings.state_dir / LOCK} cannot be locked: {error.strerror or error}"
        hint = "state_dir must be on a file system of this host that knows locks"
        raise StartError(f"{what}; hint: {hint}", number=error.errno or 0) from None
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError as error:
        what = f"{settings.state_dir / LOCK} cannot be written: {error.strerror or error}"
        raise StartError(f"{what}; hint: df {settings.state_dir}", number=error.errno or 0) from None
