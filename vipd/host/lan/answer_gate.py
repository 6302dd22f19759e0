"""The gate in the kernel through which every ARP answer, neighbour advertisement and announcement for an
address of the LAN passes: open for an address that this host holds, while its lease is valid.

A process that does not run cannot stop the kernel from answering: it is stopped by a signal or a debugger,
starved, or killed. So the gate closes by itself: its open state is a set element that expires in the
kernel, and that the process must renew.

The arithmetic. L is the time to live of the lease in etcd, G the life of the element, and the k-th renewal
is sent to etcd at s(k), answered, and written to the kernel at p(k):

- etcd counts L from when it handles the renewal, which is not before s(k): no other host can hold an address
  before s(k) + L.
- The kernel renews the element only in place of one that has not expired (one transaction deletes it, and
  fails if it is gone). Its predecessor was written at p(k-1), before s(k), or is an element of `pending`
  that was. So p(k) < s(k) + G, even if the process was stopped between any two of its instructions.
- The element expires at p(k) + G, which is before s(k) + 2 G.

With 2 G = L - margin the gate is closed `margin` before another host can open its own. The margin is for
clocks that run at different rates. Both are clocks that only advance: jiffies here, Go's monotonic clock in
etcd; steps of the time of day do not matter. A clock that stops does, as that of a suspended machine.

All functions block for as long as the kernel's transaction takes: use them from a thread.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

from vipd.host import netlink
from vipd.host.lan.gate_messages import (
    HELD,
    LEASE,
    PENDING,
    Element,
    address_elements,
    change,
    interface_elements,
    query,
    removal,
    tables,
)
from vipd.host.netlink_socket import OpenSocket, open_netlink, raise_error, receive

ANSWER_SECONDS = 5.0
"""The kernel answers when the transaction is done, which may wait for a large one of another program."""
_BATCH_BEGIN = 16


class AnswerGate:
    """The gate of one network namespace: two tables, `arp NAME` and `ip6 NAME`."""

    def __init__(self, name: str, open_socket: OpenSocket = open_netlink) -> None:
        self._name, self._open_socket = name, open_socket

    def make(self, interfaces: Collection[str], addresses: Collection[str], held: Collection[str]) -> None:
        """Make the gate anew, closed, for these addresses of which some are held. Raises OSError."""
        self._send(tables(self._name, addresses))
        self._send(change(self._name, [], address_elements(HELD, held)))

    def remove(self) -> None:
        """Remove the tables, with no effect if they do not exist. Answers are not filtered any more: first
        take away what answers. Raises OSError."""
        self._send(removal(self._name))

    def prepare(self, interfaces: Collection[str], seconds: float) -> bool:
        """To be called before the lease is requested: `open` works within `seconds` from now. False: the
        tables are gone. Raises OSError."""
        return self._changed([], interface_elements(PENDING, interfaces, _milliseconds(seconds)))

    def open(self, interfaces: Collection[str], seconds: float) -> bool:
        """Open a prepared gate for some seconds; False if the preparation has expired. Raises OSError."""
        return self._changed(
            interface_elements(PENDING, interfaces),
            interface_elements(LEASE, interfaces, _milliseconds(seconds)),
        )

    def extend(self, interfaces: Collection[str], seconds: float) -> bool:
        """Keep an open gate open for some seconds from now; False if it has closed. Raises OSError."""
        return self._changed(
            interface_elements(LEASE, interfaces),
            interface_elements(LEASE, interfaces, _milliseconds(seconds)),
        )

    def close(self, interfaces: Collection[str]) -> None:
        """Close it at once; it may have closed already. Raises OSError."""
        self._changed(interface_elements(LEASE, interfaces), [])

    def hold(self, addresses: Collection[str]) -> bool:
        """Answer for these from now on, too; False if the tables are gone. Raises OSError."""
        return self._changed([], address_elements(HELD, addresses))

    def release(self, addresses: Collection[str]) -> bool:
        """Answer for these no more; False if one of them was not held. Raises OSError."""
        return self._changed(address_elements(HELD, addresses), [])

    def exists(self) -> bool:
        """Whether the tables exist."""
        try:
            with self._open_socket() as opened:
                opened.settimeout(ANSWER_SECONDS)
                opened.send(query(self._name))
                answer = receive(opened)
        except OSError:
            return False
        return all(kind != netlink.ERROR for kind, *_ in netlink.split(answer))

    def _changed(self, deleted: list[Element], added: list[Element]) -> bool:
        try:
            self._send(change(self._name, deleted, added))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        return True

    def _send(self, batch: bytes) -> None:
        """One transaction, and its acknowledgements. Raises OSError with the first error."""
        asked = sum(kind > _BATCH_BEGIN + 1 for kind, *_ in netlink.split(batch))
        with self._open_socket() as opened:
            opened.settimeout(ANSWER_SECONDS)
            opened.send(batch)
            while asked > 0:
                answer = receive(opened)
                for kind, _, _, _, start, end in netlink.split(answer):
                    if kind == netlink.ERROR:
                        raise_error(answer, start, end)
                        asked -= 1


def _milliseconds(seconds: float) -> int:
    """Rounded down: never longer than asked for."""
    return max(1, int(seconds * 1000))
