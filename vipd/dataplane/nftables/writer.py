"""Writes changes of elements to the kernel, over a netlink socket that stays open.

The program nft needs 3 ms of processor time to start. At its end it waits: before a netlink socket is closed,
the kernel frees what was deleted, which takes it some 10 ms (a grace period of RCU). And it reads text: sixty
thousand elements take it 0.55 s of processor time, and 0.2 s as messages, 0.06 s of them in the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import weakref

from vipd.dataplane.base import ApplyError
from vipd.dataplane.programs import HANGS
from vipd.host.netlink import ERROR, MalformedMessageError, error_number, split
from vipd.host.netlink_socket import OpenSocket, allow_large_requests, receive, shorten_answers
from vipd.host.process import STALL_SECONDS

LARGEST_BATCH = 1 << 24
"""Bytes of one transaction; nft writes larger ones. A batch of a load has some 5 MB."""


class ElementWriter:
    """Writes batches in the network namespace of the thread that writes the first one."""

    def __init__(self, open_socket: OpenSocket) -> None:
        self._open = open_socket
        self._opened: tuple[socket.socket, weakref.finalize[..., ElementWriter]] | None = None
        """The socket, and what closes it."""
        self._under_way: asyncio.Future[bool] | None = None

    async def write(self, batch: bytes, echoes: list[bytes] | None = None) -> bool:
        """Write one transaction; `echoes` gets the kernel's answers. False: it is not written, for a reason
        that nft can find out. Raises
        ApplyError when it may be written or not: the kernel does not answer in time, or the answer is lost;
        and when an earlier one has only now been written.
        """
        try:
            async with asyncio.timeout(STALL_SECONDS):
                if self._under_way is not None and not self._under_way.done():
                    # Its caller was cancelled, or timed out; the table was read before it was written.
                    await asyncio.wait((self._under_way,))
                    what = "the kernel has taken an earlier transaction only now"
                    raise ApplyError(what, "the table must be read again")
                if (opened := self._socket()) is None:
                    return False
                # In a thread: while another program changes rules, the kernel lets the sender wait.
                loop = asyncio.get_running_loop()
                self._under_way = loop.run_in_executor(None, _transact, opened, batch, echoes)
                return await asyncio.shield(self._under_way)
        except TimeoutError:
            why = f"it did not take a transaction within {STALL_SECONDS:.0f} s"
            raise ApplyError("the kernel hangs", why, HANGS) from None
        except (OSError, MalformedMessageError) as error:
            self._close()
            raise ApplyError("the kernel's answer to a transaction is lost", str(error)) from None

    def _socket(self) -> socket.socket | None:
        """The open socket; None if none can be opened."""
        if self._opened is None:
            try:
                opened = self._open()
            except OSError:
                return None
            self._opened = opened, weakref.finalize(self, opened.close)
            opened.setblocking(False)
            with contextlib.suppress(OSError):
                shorten_answers(opened)
                allow_large_requests(opened, LARGEST_BATCH)
        return self._opened[0]

    def _close(self) -> None:
        if self._opened is not None:
            self._opened[1]()
            self._opened = None


def _transact(opened: socket.socket, batch: bytes, echoes: list[bytes] | None = None) -> bool:
    """Send a batch, and read the answers, which are there once it is sent; returns whether it is written.
    Raises OSError and MalformedMessageError if that is unknown."""
    try:
        opened.sendto(batch, (0, 0))
    except OSError:
        return False
    errors: list[int] = []
    while True:
        try:
            datagram = receive(opened)
        except BlockingIOError:
            break
        if echoes is not None:
            echoes.append(datagram)
        answers = split(datagram)
        errors += [error_number(datagram, start, end) for kind, *_, start, end in answers if kind == ERROR]
    if not errors:
        raise OSError(errno.ENOMSG, "there is none")
    return not any(errors)
