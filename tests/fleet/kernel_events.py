"""When each of several namespaces got a rule for an address, from the kernel's own notifications."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address

from tests.lab.node import Node

NETLINK_NETFILTER = 12
NFTABLES_EVENTS = 1 << (7 - 1)
"""The multicast group NFNLGRP_NFTABLES (linux/netfilter/nfnetlink.h)."""
NEW_RULE = 10 << 8 | 6
TABLE, CHAIN = 1, 2
BUFFER_BYTES = 16 * 1024 * 1024
SO_RCVBUFFORCE = 33


class RuleEvents:
    """Receives rule events of every namespace from its creation on. Works with iptables-nft."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._sockets = {}
        for node in nodes:
            with node.entered():
                opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
            opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
            opened.bind((0, NFTABLES_EVENTS))
            opened.setblocking(False)
            self._sockets[opened] = node.name

    def drain(self) -> None:
        """Discard the notifications received so far."""
        for opened in self._sockets:
            while _read(opened):
                pass

    def wait_for_rule(self, address: str, timeout: float) -> dict[str, float]:
        """Monotonic time at which the nat table reached the address, by host.

        A host that has no such rule after `timeout` seconds is missing.
        """
        wanted, found, end = IPv4Address(address).packed, {}, time.monotonic() + timeout
        waiting = dict(self._sockets)
        while waiting and (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select(list(waiting), [], [], left)
            now = time.monotonic()
            for opened in ready:
                while data := _read(opened):
                    if any(wanted in rule for rule in _rules(data)):
                        found[waiting.pop(opened)] = now
                        break
        return found

    def close(self) -> None:
        """Close the sockets."""
        for opened in self._sockets:
            opened.close()


def _read(opened: socket.socket) -> bytes:
    try:
        return opened.recv(1 << 20)
    except BlockingIOError:
        return b""
    except OSError:  # events were lost: a later one may still match
        return b"\0"


def _rules(data: bytes) -> Iterator[bytes]:
    """New rules of the nat table that lead to services; not those of a service's own chains."""
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        if length < 16:
            return
        message, data = data[16:length], data[(length + 3) & ~3 :]
        if kind == NEW_RULE:
            table, chain = (_text(message, wanted) for wanted in (TABLE, CHAIN))
            if table == "nat" and not chain.startswith(("VIPD-SVC-", "VIPD-SEP-", "VIPD-EXT-")):
                yield message


def _text(message: bytes, wanted: int) -> str:
    """A text attribute of a message, after its header of four bytes."""
    at = 4
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            return ""
        if kind == wanted:
            return message[at + 4 : at + length].rstrip(b"\0").decode()
        at += (length + 3) & ~3
    return ""
