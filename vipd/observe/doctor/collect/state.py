"""The state directory and the API's socket."""

from __future__ import annotations

import fcntl
import grp
import os
import stat
from pathlib import Path

from vipd.host.settings.settings import Settings
from vipd.observe.doctor.facts import SocketFile, StateDir
from vipd.sources.state import FILE_NAME
from vipd.sources.store import StoreSource

_GET_FLAGS = 0x80086601
"""FS_IOC_GETFLAGS of a machine with 64 bits."""
_IMMUTABLE = 0x10


def read_state_dir(settings: Settings, root: bool) -> StateDir:
    """The state of the directory; its content is read only as root, as the daemon would."""
    path = settings.state_dir
    try:
        found, system = path.stat(), os.statvfs(path)
    except (FileNotFoundError, NotADirectoryError):
        return StateDir(str(path), exists=False)
    except OSError as error:
        return StateDir(str(path), fault=f"{path} cannot be looked at: {error.strerror}")
    store = StoreSource(path / FILE_NAME, repair=False)
    if root:
        store.load()
    return StateDir(
        str(path),
        mode=stat.S_IMODE(found.st_mode),
        writable=os.access(path, os.W_OK | os.X_OK) and not _immutable(path),
        read_only=bool(system.f_flag & os.ST_RDONLY),
        free=system.f_bavail * system.f_frsize,
        # Some file systems count no inodes.
        free_inodes=system.f_favail if system.f_files else 1,
        store_faults=store.faults(),
        has_copy=store.has_good_copy,
    )


def read_socket_file(settings: Settings) -> SocketFile | None:
    """The socket; None if there is none. Raises OSError if that is unknown."""
    try:
        found = settings.socket.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return SocketFile(
        str(settings.socket),
        stat.S_IMODE(found.st_mode),
        _group(found.st_gid),
        _existing(settings.socket_group),
    )


def _immutable(path: Path) -> bool:
    """Whether even root cannot create a file in it. Nothing is written: access(2) does not report chattr."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = int.from_bytes(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8)), "little")
        finally:
            os.close(descriptor)
    except OSError:
        return False  # a file system without such flags
    return bool(flags & _IMMUTABLE)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _existing(group: str) -> str:
    try:
        return grp.getgrnam(group).gr_name
    except KeyError:
        return ""
