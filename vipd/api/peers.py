"""The API's UNIX socket, and the user and process at its other end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from vipd.host import accounts
from vipd.host.connections.connections import BACKLOG

SOCKET_MODE = 0o660
_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
_MAX_BYTES = 1024
"""Limit of Python's getsockopt: 256 groups."""
_CREDENTIALS = struct.Struct("=iII")
"""struct ucred of unix(7): pid, uid, gid."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection, at the time when it connected (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    """Its supplementary groups (SO_PEERGROUPS): those of the process, whatever its account may have."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def name(self) -> str:
        """The user's name, if it was looked up before; else `uid N`."""
        return accounts.user_names.cached(self.uid) or f"uid {self.uid}"


@dataclass(frozen=True, slots=True)
class Permission:
    """Decides which peers may change services. The socket's own mode decides about reading."""

    admin_group: str

    def peer(self, transport: asyncio.BaseTransport | None) -> Peer:
        """The peer of a connection; PermissionError if the kernel does not report it."""
        end = transport.get_extra_info("socket") if transport else None
        if end is None:
            raise PermissionError("the connection is closed")
        return Peer(*credentials_of(end), groups_of(end))

    async def may_change(self, peer: Peer) -> bool:
        """Root, the daemon's own user, and processes in the admin group. Looks the user's name up too."""
        await asyncio.to_thread(_look_up, peer.uid)
        if peer.uid in (0, os.geteuid()):
            return True
        group = await asyncio.to_thread(group_id, self.admin_group)
        return group is not None and (group == peer.gid or group in peer.groups)

    async def how_to_get_access(self, peer: Peer) -> str:
        """Why that user may change services."""
        join = f"usermod -aG {self.admin_group} {peer.name}, then log in anew"
        missing = await asyncio.to_thread(group_id, self.admin_group) is None
        return f"groupadd --system {self.admin_group}; {join}" if missing else join


def credentials_of(end: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the process at the other end of a UNIX socket. Raises OSError."""
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def groups_of(end: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of the process at the other end of a UNIX socket. Raises OSError."""
    try:
        raw = end.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        raw = _many_groups_of(end.fileno())
    return struct.unpack(f"={len(raw) // 4}I", raw)


def _many_groups_of(descriptor: int) -> bytes:
    """The list of the kernel, of any length; the kernel reports the required size if the buffer is too
    small."""
    getsockopt = ctypes.CDLL(None, use_errno=True).getsockopt
    size = ctypes.c_uint32(0)
    for _ in range(2):
        room = ctypes.create_string_buffer(max(size.value, 1))
        if not getsockopt(descriptor, socket.SOL_SOCKET, _SO_PEERGROUPS, room, ctypes.byref(size)):
            return room.raw[: size.value]
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))


def bind_socket(path: Path, group: str) -> socket.socket:
    """A listening UNIX socket of mode 0660 and the given group. Replaces a dead one that a crash left.

    Raises FileExistsError when something answers there or is no socket, OSError when it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    if path.exists() and not path.is_socket():
        raise FileExistsError(f"{path} is not a socket; it is left alone")
    if path.exists() and _is_in_use(path):
        raise FileExistsError(f"{path} is in use by another program")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode must be right from the start: between bind and chmod any user could connect.
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
            # Does not follow a link: as root in the directory of another user it could now lead anywhere.
            os.chown(path, -1, found, follow_symlinks=False)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def group_id(name: str) -> int | None:
    """The number of a group; None if there is none, or the lookup times out. Blocks: not for the loop."""
    try:
        return accounts.groups.get(name)
    except (KeyError, OSError):
        return None


def _is_in_use(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _look_up(uid: int) -> None:
    with contextlib.suppress(KeyError, OSError):
        accounts.user_names.get(uid)
