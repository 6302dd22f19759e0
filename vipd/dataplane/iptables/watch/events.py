"""The kernel's events about nf_tables, to which iptables-nft and nft write."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from vipd.dataplane.iptables.watch.debouncer import Debouncer
from vipd.dataplane.iptables.watch.external_change import ExternalChange, OwnershipFilter
from vipd.dataplane.iptables.watch.messages import (
    GROUP_NFTABLES,
    KINDS,
    Generation,
    MessageKind,
    read_messages,
    sender_and_end,
)
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.host.netlink_socket import open_multicast

_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h."""
_DATAGRAM_BYTES = 1 << 16
_DATAGRAMS_A_TURN = 200
"""After this many the event loop may run other tasks."""


def open_socket() -> socket.socket:
    """A socket that receives every nf_tables change in this thread's network namespace. Raises OSError: the
    kernel has no nf_tables, or CAP_NET_ADMIN is missing. Lost messages count as a change of everything."""
    return open_multicast(GROUP_NFTABLES)


class RuleEvents:
    """Reports foreign changes as the kernel notifies of them. Closes the socket that it is given."""

    def __init__(
        self,
        listening: socket.socket,
        scope: OwnershipFilter,
        own: OwnProcesses,
        clock: Callable[[], float],
        on_message: Callable[[bytes], None] | None = None,
        kinds: Mapping[int, MessageKind] = KINDS,
    ) -> None:
        """`on_message` gets every datagram first, including vipd's own changes.

        `kinds`: the types of messages to read.
        """
        self._socket, self._own, self._clock, self._hear = listening, own, clock, on_message
        self._kinds = kinds
        self._gathering = Debouncer(scope)
        self._read_some = asyncio.Event()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    async def run(self, report: Callable[[ExternalChange], None]) -> None:
        """Report each burst of foreign changes, until cancelled. Raises OSError when the socket fails."""
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._socket.fileno(), self._readable, failed)
        try:
            while not failed.done():
                await self._wait()
                due = self._gathering.due
                if due is not None and due <= self._clock():
                    disturbance = self._gathering.collect(self._own.wrote)
                    if disturbance:
                        report(disturbance)
            failed.result()
        finally:
            loop.remove_reader(self._socket.fileno())
            failed.cancel()

    async def _wait(self) -> None:
        """Wait until messages were read, or read ones are due."""
        due = self._gathering.due
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.0, due - self._clock())):
                await self._read_some.wait()
        self._read_some.clear()

    def _readable(self, failed: asyncio.Future[None]) -> None:
        try:
            for _ in range(_DATAGRAMS_A_TURN):
                self._take(self._socket.recv(_DATAGRAM_BYTES))
        except BlockingIOError:
            pass
        except ValueError:
            self._gathering.lost(self._clock())
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOBUFS:
                self._gathering.lost(self._clock())
            elif not failed.done():
                # An exception in the event loop's log alone would end the watch unnoticed.
                failed.set_exception(error)
                self._read_some.set()
        if self._gathering.due is not None:
            self._read_some.set()

    def _take(self, datagram: bytes) -> None:
        port, ends = sender_and_end(datagram)
        if self._hear and not ends:
            self._hear(datagram)
        if not ends and self._own.sent(port):
            self._gathering.skip(port)
            return
        for message in read_messages(datagram, self._kinds):
            if isinstance(message, Generation):
                self._gathering.end(message, self._own.wrote, self._clock())
            else:
                self._gathering.change(message)


def pids_are_global() -> bool:
    """Whether this process is in the first pid namespace, whose pids the kernel's events carry."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False
