"""Sends one real packet of a flow from this host, by a socket like any other program's."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from types import TracebackType

from vipd.model.service import Family, Protocol
from vipd.observe.live_trace.packets import Flow
from vipd.observe.live_trace.table import TraceError

IPPROTO_SCTP = 132
_KINDS = {
    Protocol.TCP: (socket.SOCK_STREAM, 0),
    Protocol.UDP: (socket.SOCK_DGRAM, 0),
    Protocol.SCTP: (socket.SOCK_STREAM, IPPROTO_SCTP),
}
_ANY = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104 (the kernel chooses the source address)


class Sender:
    """A socket bound to its own port, so that packets of other programs are not taken for its packet.

    A context manager. Raises TraceError if the socket cannot be created.
    """

    def __init__(self, flow: Flow) -> None:
        self._to = (flow.destination, flow.port)
        self._protocol = flow.protocol
        family = socket.AF_INET if flow.family is Family.IPV4 else socket.AF_INET6
        try:
            self._socket = socket.socket(family, *_KINDS[flow.protocol])
        except OSError as error:
            raise TraceError(f"cannot send {flow.protocol}", error.strerror or str(error)) from None
        try:
            self._socket.setblocking(False)
            self._socket.bind((flow.source or _ANY[flow.family], flow.source_port))
        except OSError as error:
            self._socket.close()
            raise TraceError(f"cannot send as {flow}", error.strerror or str(error)) from None
        self._failed = 0

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    @property
    def port(self) -> int:
        """The source port of its packet."""
        return int(self._socket.getsockname()[1])

    def send(self) -> bool:
        """Send it: the start of a connection, or an empty datagram. False: no further result follows."""
        self._failed = self._socket.connect_ex(self._to)
        if self._protocol is Protocol.UDP and not self._failed:
            try:
                self._socket.send(b"")
            except OSError as error:
                self._failed = error.errno or errno.EIO
        return self._failed in (0, errno.EINPROGRESS)

    def answer(self, seconds: float) -> str:
        """The result for a program within that time; empty if there is none."""
        if self._failed == errno.EINPROGRESS:
            _, writable, _ = select.select([], [self._socket], [], seconds)
            if not writable:
                return f"no answer within {seconds:g}s" if seconds else ""
            self._failed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if self._failed:
            return os.strerror(self._failed).lower()
        if self._protocol is Protocol.UDP:
            with contextlib.suppress(BlockingIOError):
                self._failed = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            return os.strerror(self._failed).lower() if self._failed else "sent"
        return "connected"
