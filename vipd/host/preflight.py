"""Checks before the daemon starts: it is the only one in this network namespace, and may change rules."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from vipd.host.durable import names_in, open_directory, open_own, remove_own
from vipd.host.settings.settings import Settings
from vipd.model.limits import STATE_DIR_FULL_BYTES, STATE_DIR_LOW_BYTES

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_NOT_PERMITTED = 77
"""EX_NOPERM of sysexits.h: a restart would not help."""
LOCK = "lock"
LOCK_MODE = 0o600
"""A user who can open a lock file can hold the lock."""
RUNTIME_DIR = Path("/run/vipd")
"""Directory of the lock files of network namespaces: the same for all daemons, whatever their settings."""
MAX_STALE_LOCKS = 1000
"""Lock files of other network namespaces that a start checks: killed daemons have left some of them."""
_LOCK_NAME = re.compile(r"netns-(\d+)-[^/]+\.lock")
_TRIES, _PAUSE_SECONDS = 5, 0.05
"""For a lock of a network namespace: another start may hold it for a moment, to check whether it is held."""
_MAX_PID_LENGTH = 20
_HELD = re.compile(r"\d+: +(?:-> )?\w+ +\w+ +\w+ +-?\d+ [0-9a-f]+:[0-9a-f]+:(\d+) ")
"""A line of /proc/locks. A lock that waits has an arrow; one that waits behind a waiting one is indented."""
_LOCKS_READ_AT_ONCE = 4096
"""Characters of /proc/locks that the kernel gives from one moment (fs/seq_file.c: a page)."""
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
    """Whether CAP_NET_ADMIN is in effect; True if that is unknown, as the tools will then report it."""
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    except OSError:
        return True
    return found is None or bool(int(found[1], 16) >> CAP_NET_ADMIN & 1)


@contextlib.contextmanager
def state_lock(settings: Settings) -> Iterator[None]:
    """Hold the state directory, and the chain prefix in this network namespace: two daemons with one of them
    would undo each other's rules. Raises StartError."""
    path = settings.state_dir / LOCK
    try:
        descriptor = _state_lock_file(path)
    except OSError as error:
        hint = "" if "hint: " in str(error.strerror) else "; hint: run as root, or set state_dir"
        what = f"{path}: {error.strerror}{hint}"
        raise StartError(what, number=error.errno or 0) from None
    try:
        hint = "hint: systemctl status vipd"
        if descriptor is not None:
            _take_lock(descriptor, path, f"another vipd runs on {settings.state_dir}", hint)
        with _namespace_lock(settings.chain_prefix):
            yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def state_faults(directory: Path) -> tuple[str, ...]:
    """The warning about a state directory that is now read-only, full or nearly full."""
    try:
        system = os.statvfs(directory)
    except OSError:
        return ()  # the parts that need it report it
    if not system.f_flag & os.ST_RDONLY:
        return _space_faults(directory, system)
    lost = "what is known of backends, flows and this host is lost with a restart"
    hint = f"dmesg says why; mount -o remount,rw {directory}, or set state_dir"
    what = "what could be read serves, and nothing is saved: changes by vipctl are refused, and"
    return (f"{directory} is on a read-only file system: {what} {lost}; hint: {hint}",)


def _space_faults(directory: Path, system: os.statvfs_result) -> tuple[str, ...]:
    free = system.f_bavail * system.f_frsize
    without_inodes = bool(system.f_files) and not system.f_favail  # some file systems count none
    if free > STATE_DIR_LOW_BYTES and not without_inodes:
        return ()
    full = free < STATE_DIR_FULL_BYTES or without_inodes
    left = f"{free // 1024} KiB are left for {directory}" + (", and no inode" if without_inodes else "")
    lost = "changes by vipctl are refused, and nothing else is saved, while there is no room"
    hint = f'see what takes it: du -xh "$(findmnt -n -o TARGET -T {directory})" | sort -h | tail'
    return (f"the disk is {'full' if full else 'nearly full'}: {left}; {lost}; hint: {hint}",)


def _state_lock_file(path: Path) -> int | None:
    """A descriptor of a state directory's lock file, or of the directory if that is read-only; None if
    there is none and none can be created. Raises OSError."""
    try:
        _require_closed(path.parent, 0o750)
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT, LOCK_MODE)
        os.fchmod(descriptor, LOCK_MODE)  # older versions let the group read it, and so hold it
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    else:
        return descriptor
    log.error("%s cannot be made or written: %s; vipd starts all the same", path, os.strerror(errno.EROFS))
    with contextlib.suppress(FileNotFoundError):
        return open_own(path, os.O_RDONLY)
    with contextlib.suppress(FileNotFoundError):
        return os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    return None


def namespace_locks(directory: Path, proc: Path) -> dict[str, Path]:
    """The locks of chain prefixes in this network namespace, held or not, by prefix. Raises OSError."""
    start, end = _lock_name(proc, "\0").split("\0")
    return {
        name[len(start) : -len(end)]: directory / name
        for name in names_in(directory)
        if name.startswith(start) and name.endswith(end)
    }


def locked_inodes(proc: Path) -> frozenset[int]:
    """The inodes of locked files. Raises OSError, and ValueError for a list of the kernel's
    that is not understood.

    A longer list is read three times: while other processes lock and unlock, one reading omits locks that are
    held all the time (120 locks held: 268 of 4,226 readings)."""
    text = (proc / "locks").read_text(errors="replace")
    if len(text) > _LOCKS_READ_AT_ONCE - 100:
        text += "".join((proc / "locks").read_text(errors="replace") for _ in range(2))
    found = [_HELD.match(line) for line in text.splitlines()]
    if None in found:
        raise ValueError(f"{proc}/locks is not understood")
    return frozenset(int(each[1]) for each in found if each)


def _held(path: Path) -> bool:
    """Whether a lock file that cannot be opened may be held: one that a killed vipd of root left is not."""
    try:
        return path.lstat().st_ino in locked_inodes(Path("/proc"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def _lock_name(proc: Path, prefix: str) -> str:
    return f"netns-{(proc / 'self/ns/net').stat().st_ino}-{prefix}.lock"


@contextlib.contextmanager
def _namespace_lock(prefix: str) -> Iterator[None]:
    """Hold the chain prefix in this network namespace, whatever the state directory."""
    what = f"another vipd writes the chains {prefix}-* in this network namespace"
    path = RUNTIME_DIR / _lock_name(Path("/proc"), prefix)
    descriptor = _own_lock(path, what)
    try:
        if descriptor is not None:
            _remove_stale_locks(path.name)
        yield
    finally:
        if descriptor is not None:
            # While it is held: a process that has opened it since then sees that it has no name any more.
            with contextlib.suppress(OSError):
                remove_own(path)
            os.close(descriptor)


def _remove_stale_locks(own: str) -> None:
    """Remove the lock files of other network namespaces that no process holds. Never raises."""
    with contextlib.suppress(OSError):
        found = [(name, match[1]) for name in names_in(RUNTIME_DIR) if (match := _LOCK_NAME.fullmatch(name))]
        here = next(number for name, number in found if name == own)
        for name in [name for name, number in found if number != here][:MAX_STALE_LOCKS]:
            with contextlib.suppress(OSError):
                _remove_stale_lock(RUNTIME_DIR / name)


def _remove_stale_lock(path: Path) -> None:
    """Remove a lock file. Raises OSError, also if another process holds it."""
    descriptor = open_own(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A process that has removed it since it was opened held it; its name may now be another's.
        if os.fstat(descriptor).st_nlink:
            remove_own(path)
    finally:
        os.close(descriptor)


def _own_lock(path: Path, another: str) -> int | None:
    """A descriptor that holds a lock file; None if a user without rights cannot create one. Raises
    StartError."""
    tries = 0
    while True:
        try:
            _require_closed(path.parent, 0o755)
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT, LOCK_MODE)
        except OSError as error:
            if isinstance(error, PermissionError) and os.geteuid() != 0 and not _held(path):
                told = "a second vipd in this network namespace would not be noticed"
                log.warning("%s cannot be made (%s): %s", path, error.strerror, told)
                return None
            what = f"{path}: {error.strerror}"
            hint = "" if "hint: " in what else f"; hint: it is vipd's own; rm {path}, if no vipd runs"
            raise StartError(f"{what}{hint}", number=error.errno or 0) from None
        try:
            _take_lock(descriptor, path, another, "hint: stop it, or use another chain_prefix")
        except StartError:
            os.close(descriptor)
            tries += 1
            if tries == _TRIES:
                raise
            time.sleep(_PAUSE_SECONDS)
            continue
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # its holder has ended just now


def _require_closed(directory: Path, mode: int) -> None:
    """Create a directory if it is missing. Raises OSError, also if every user may write to it."""
    descriptor = open_directory(directory, make=mode)
    try:
        if os.fstat(descriptor).st_mode & stat.S_IWOTH:
            raise OSError(0, f"everybody may write to {directory}; hint: chmod o-w {directory}")
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, path: Path, another: str, hint: str) -> None:
    """Lock a file and write this process's pid to it if possible. Raises StartError; if it is held, with the
    meaning of that and a hint."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartError(f"{another} (pid {_holder(descriptor)}); {hint}") from None
    except OSError as error:
        what = f"{path} cannot be locked: {error.strerror or error}"
        hint = f"{path.parent} must be on a file system of this host that knows locks"
        raise StartError(f"{what}; hint: {hint}", number=error.errno or 0) from None
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError as error:
        # It is held all the same. On a full or read-only disk services must be served, too.
        log.warning("%s cannot be written: %s; hint: df %s", path, error.strerror or error, path.parent)


def _holder(descriptor: int) -> str:
    """The pid that a lock file names."""
    with contextlib.suppress(OSError, ValueError):
        return str(int(os.pread(descriptor, _MAX_PID_LENGTH, 0)))
    return "not known"
