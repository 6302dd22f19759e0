"""Opens sockets on which the kernel tells of what happens in netfilter."""

from __future__ import annotations

import socket
import struct
from array import array

RECEIVE_BUFFER_BYTES = 32 << 20
"""Room for some 50,000 notifications; used only while it is needed. Beyond it they are lost."""

NETLINK_NETFILTER = 12
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33
"""The kernel's include/uapi/asm-generic/socket.h; the socket module does not name them."""
_INSTRUCTION_BYTES = 8


def open_multicast(group: int, program: bytes = b"") -> socket.socket:
    """A socket that does not block, of a multicast group in this thread's network namespace.

    `program`: instructions of classic BPF that choose what it gets. Raises OSError.
    """
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
    try:
        opened.setblocking(False)
        try:
            opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
        except PermissionError:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if program:
            address, length = (held := array("B", program)).buffer_info()
            fprog = struct.pack("@HP", length // _INSTRUCTION_BYTES, address)
            opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
            del held  # the kernel has its own copy
        opened.bind((0, 1 << group - 1))
    except BaseException:
        opened.close()
        raise
    return opened
