"""Receives the ends of flows. Nothing here blocks, but very many keep Python busy: read in a thread."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct

from vipd.dataplane.conntrack.flow_end import GROUP_DESTROY, FlowEnd, kernel_filter, parse_flow_end
from vipd.dataplane.conntrack.netlink import ConntrackError
from vipd.host.netlink import MalformedMessageError
from vipd.host.netlink_socket import open_multicast

_DATAGRAM_BYTES = 1 << 13

_SO_MEMINFO = 55
"""The kernel's include/uapi/asm-generic/socket.h; the socket module does not name it."""
_MEMINFO = struct.Struct("=9I")
_DROPS = 8
"""SK_MEMINFO_DROPS of the kernel's include/uapi/linux/sock_diag.h."""


class FlowEndListener:
    """The translated flows that end in one network namespace, from its making until it is closed."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        self._overruns = self._garbled = 0

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._socket.close()

    def read(self, most: int) -> list[FlowEnd]:
        """The waiting ends, from at most `most` messages. Raises ConntrackError."""
        found: list[FlowEnd] = []
        receive, append = self._socket.recv, found.append
        for _ in range(most):
            try:
                ended = parse_flow_end(receive(_DATAGRAM_BYTES))
            except BlockingIOError:
                break
            except MalformedMessageError:
                self._garbled += 1
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise ConntrackError.of("cannot hear of flows that end", error) from error
                self._overruns += 1
            else:
                if ended is not None:
                    append(ended)
        return found

    @property
    def lost(self) -> int:
        """Number of ends that were lost for lack of space, or not understood. If the kernel does not count
        the former: how often it happened."""
        drops = self._overruns
        with contextlib.suppress(OSError, struct.error):
            told = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
            drops = max(int(_MEMINFO.unpack(told)[_DROPS]), drops)
        return drops + self._garbled


def open_flow_end_listener() -> FlowEndListener:
    """Listens in the network namespace that the calling thread is in. Raises ConntrackError."""
    try:
        return FlowEndListener(open_multicast(GROUP_DESTROY, kernel_filter()))
    except OSError as error:
        raise ConntrackError.of("cannot hear of flows that end", error) from error
