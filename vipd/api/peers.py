"""The UNIX socket of the API and who is at its other end."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

SOCKET_MODE = 0o660
_CREDENTIALS = struct.Struct("=iII")
"""struct ucred of unix(7): pid, uid, gid."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection, as the kernel knows it (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def name(self) -> str:
        """The user's name; `uid N` without one."""
        return _user_name(self.uid)


@dataclass(frozen=True, slots=True)
class Permission:
    """Who may change services. Reading is decided by the socket's own mode."""

    admin_group: str

    def peer(self, transport: asyncio.BaseTransport | None) -> Peer:
        """The peer of a connection; PermissionError when the kernel does not tell."""
        end = transport.get_extra_info("socket") if transport else None
        if end is None:
            raise PermissionError("the connection is closed")
        raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return Peer(*_CREDENTIALS.unpack(raw))

    def may_change(self, peer: Peer) -> bool:
        """Root, the daemon's own user, and members of the admin group."""
        if peer.uid in (0, os.geteuid()):
            return True
        group = group_id(self.admin_group)
        return group is not None and (group == peer.gid or group in _groups_of(peer))

    def way_in(self, peer: Peer) -> str:
        """How that user comes to be allowed to change services."""
        join = f"usermod -aG {self.admin_group} {peer.name}, then log in anew"
        missing = group_id(self.admin_group) is None
        return f"groupadd --system {self.admin_group}; {join}" if missing else join


def bind_socket(path: Path, group: str) -> socket.socket:
    """A listening UNIX socket of mode 0660 and the given group. Replaces a dead one that a crash left.

    Raises FileExistsError when something answers there or is no socket, OSError when it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    if path.exists() and not path.is_socket():
        raise FileExistsError(f"{path} is not a socket; it is left alone")
    if path.exists() and _answers(path):
        raise FileExistsError(f"{path} is in use by another program")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode must be right from the first moment: between bind and chmod anybody could connect.
    before = os.umask(0o777 & ~SOCKET_MODE)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    found = group_id(group)
    if found is not None:
        with contextlib.suppress(PermissionError):
            os.chown(path, -1, found)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def group_id(name: str) -> int | None:
    """The number of a group; None when there is no such group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _groups_of(peer: Peer) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(peer.uid).pw_name, peer.gid)
    except KeyError:
        return []
