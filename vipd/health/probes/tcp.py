"""Opens a TCP connection. Most probes are of this type, so it is optimised for low cost.

No task and no stream: sockets wait in one epoll, which the event loop watches as a single descriptor. With
TCP_QUICKACK off the kernel delays the handshake's last packet for a moment, and closing sends a reset in
its place: the server's program never sees the connection, and no side keeps a socket in TIME_WAIT.
A connection attempt still detects a full backlog, as the kernel then answers no SYN.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
import struct
from collections.abc import Callable

from vipd.health.lag import LoopLag
from vipd.health.probes.base import Attempt, Deadline, ProbeCallback, error_result, internal_error_result
from vipd.health.result import ProbeResult
from vipd.model.check_target import CheckTarget

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: close sends a reset."""

_AT_ONCE = 256
_TCP_QUICKACK = 12  # linux/tcp.h


class TcpProber:
    """Connects. Use it as a context manager."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lag: LoopLag) -> None:
        self._loop, self._lag = loop, lag
        self._epoll = select.epoll()
        self._attempts: dict[int, _Connecting] = {}

    def __enter__(self) -> TcpProber:
        self._loop.add_reader(self._epoll.fileno(), self._ready)
        return self

    def __exit__(self, *_: object) -> None:
        for attempt in tuple(self._attempts.values()):
            attempt.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def start(self, target: CheckTarget, done: ProbeCallback) -> Attempt:
        """Probe once."""
        began = self._loop.time()
        try:
            connection = tcp_socket(target.address)
        except OSError as error:
            done(error_result(error))
            return _NOTHING
        try:
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_QUICKACK, 0)
            number = connection.connect_ex((target.address, target.port))
            if number == errno.EINPROGRESS:
                self._epoll.register(connection.fileno(), select.EPOLLOUT)
        except OSError as error:
            number = error.errno or errno.EIO
        if number != errno.EINPROGRESS:
            connection.close()
            done(_result(number, self._loop.time() - began))
            return _NOTHING
        attempt = _Connecting(connection, target, began, done, self._forget)
        attempt.deadline = Deadline(self._loop, self._lag, target.timing.timeout, attempt.expire)
        self._attempts[connection.fileno()] = attempt
        return attempt

    def _ready(self) -> None:
        now = self._loop.time()
        for descriptor, _ in self._epoll.poll(0, _AT_ONCE):
            # One that was reported before may have removed this one.
            attempt = self._attempts.get(descriptor)
            if attempt is not None:
                try:
                    attempt.finish(now)
                except Exception as error:
                    attempt.fail(error)

    def _forget(self, descriptor: int) -> None:
        del self._attempts[descriptor]
        # Closing alone is not enough: a program that is being started holds a copy for a moment.
        self._epoll.unregister(descriptor)


class _Connecting:
    """A connection on its way."""

    __slots__ = ("_began", "_connection", "_done", "_forget", "_target", "deadline")

    def __init__(
        self,
        connection: socket.socket,
        target: CheckTarget,
        began: float,
        done: ProbeCallback,
        forget: Callable[[int], None],
    ) -> None:
        self._connection, self._target, self._began = connection, target, began
        self._done, self._forget = done, forget
        self.deadline: Deadline | None = None

    def finish(self, now: float) -> None:
        """It is made, or refused."""
        number = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.cancel()
        self._done(_result(number, now - self._began))

    def fail(self, error: Exception) -> None:
        """vipd itself cannot determine the result."""
        self.cancel()
        self._done(internal_error_result(self._target, error))

    def expire(self) -> None:
        """It took too long."""
        self.cancel()
        self._done(ProbeResult.timeout(self._target.timing.timeout))

    def cancel(self) -> None:
        """Close it, whatever has become of it."""
        if self.deadline is None:
            return
        self.deadline.cancel()
        self.deadline = None
        self._forget(self._connection.fileno())
        self._connection.close()


class _Nothing:
    """An attempt that ended at once."""

    def cancel(self) -> None:
        """Nothing is left to end."""


_NOTHING = _Nothing()


def tcp_socket(address: str) -> socket.socket:
    """A socket for one probe, closing with a reset. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    return made


def _result(number: int, seconds: float) -> ProbeResult:
    return error_result(number, seconds) if number else ProbeResult.success(seconds)
