"""The sockets of this host that accept new flows, and their processes, as far as /proc shows them. It blocks:
use it from a thread.

The kernel lists the sockets by sock_diag (include/uapi/linux/inet_diag.h), and only those in the states asked
for. In /proc/net/tcp and tcp6 it goes through its whole table of connections, too: 2.2 ms each, whoever
listens, in place of 0.2 ms (Linux 6.18). A kernel without tcp_diag or udp_diag is read there.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from vipd.host.facts import LocalSocket
from vipd.host.netlink import CONTENT, DUMP, REQUEST, MalformedMessageError, message
from vipd.host.netlink_socket import open_netlink, read_whole
from vipd.host.processes import Processes
from vipd.model.service import Protocol

MAX_SOCKETS = 4096
"""Read of each table."""
SSH_SERVERS = ("sshd", "dropbear")
SSH_PORT = 22
_UNSEEN = ("", "systemd")
"""Holders of port 22 that may be the SSH server: an unknown one, and socket activation."""
TABLES = {"tcp": Protocol.TCP, "tcp6": Protocol.TCP, "udp": Protocol.UDP, "udp6": Protocol.UDP}
_TAKING = {Protocol.TCP: 10, Protocol.UDP: 7}
"""States: TCP LISTEN, and UDP that is not connected."""
_EPHEMERAL = "sys/net/ipv4/ip_local_port_range"

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NUMBERS = {Protocol.TCP: socket.IPPROTO_TCP, Protocol.UDP: socket.IPPROTO_UDP}
_REQUEST = struct.Struct("=BBBxI48x")
"""inet_diag_req_v2: address family, protocol, extensions, states, and any socket's identity."""
_ANSWER = struct.Struct("=BBxx2sxx16s40xII")
"""inet_diag_msg: address family, state, port, address, and behind what is not read the user and inode."""
SILENCE_SECONDS = 5.0


class _Row(NamedTuple):
    protocol: Protocol
    address: str
    port: int
    user: int
    inode: str


class LocalSockets:
    """Polls; the processes are read only when a socket is new."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc, self._processes = root / "proc", Processes(root)
        self._undumped = set(TABLES) if root != Path("/") else set[str]()
        """The tables that the kernel does not list by sock_diag."""
        self._holders: dict[str, tuple[str, int]] = {}
        """Name and pid by inode; empty and 0 if unknown."""

    def read(self) -> tuple[LocalSocket, ...]:
        """All except this process's own, in order."""
        rows = [row for name in TABLES for row in self._rows(name)]
        self._identify({row.inode for row in rows})
        held = [(row, *self._holders[row.inode]) for row in rows]
        return tuple(sorted(_socket(row, name) for row, name, pid in held if pid != os.getpid()))

    def _identify(self, inodes: set[str]) -> None:
        self._holders = {inode: known for inode, known in self._holders.items() if inode in inodes}
        if fresh := inodes - self._holders.keys():
            self._holders.update(dict.fromkeys(fresh, ("", 0)))
            found = self._processes.socket_owners(fresh)
            self._holders.update({inode: (name, pid) for inode, (name, pid, _) in found.items()})

    def _rows(self, name: str) -> Iterable[_Row]:
        low, high = self._ephemeral() if TABLES[name] is Protocol.UDP else (0, -1)
        # A port that clients get may be a client's, with a short life.
        return (row for row in self._rows_of(name) if not low <= row.port <= high)

    def _rows_of(self, name: str) -> Iterable[_Row]:
        if name not in self._undumped:
            try:
                return list(dumped(name))
            except (OSError, MalformedMessageError):
                self._undumped.add(name)  # the kernel would look for its module each time
        return self._listed(name)

    def _listed(self, name: str) -> Iterator[_Row]:
        """As /proc/net lists them."""
        protocol = TABLES[name]
        try:
            with (self._proc / "net" / name).open() as lines:
                next(lines, "")
                for line in islice(lines, MAX_SOCKETS):
                    fields = line.split()
                    if len(fields) < 10 or fields[3] != f"{_TAKING[protocol]:02X}":
                        if protocol is Protocol.TCP:
                            return  # the kernel lists those that listen first; there may be many others
                        continue
                    address, _, port = fields[1].partition(":")
                    yield _Row(protocol, _address(address), int(port, 16), int(fields[7]), fields[9])
        except OSError:
            return  # a kernel without that family

    def _ephemeral(self) -> tuple[int, int]:
        """The ports that clients get."""
        try:
            low, high = (self._proc / _EPHEMERAL).read_text().split()
            return int(low), int(high)
        except (OSError, ValueError):
            return 32768, 60999


def _socket(row: _Row, name: str) -> LocalSocket:
    ssh_port = row.protocol is Protocol.TCP and row.port == SSH_PORT and row.user == 0
    if row.protocol is Protocol.TCP and (name in SSH_SERVERS or (ssh_port and name in _UNSEEN)):
        return LocalSocket(row.protocol, row.address, row.port, "the SSH server of this host", protected=True)
    return LocalSocket(row.protocol, row.address, row.port, name, user=row.user)


def dumped(name: str) -> Iterator[_Row]:
    """A table as sock_diag lists it, in this thread's network namespace. Raises OSError and
    MalformedMessageError."""
    protocol = TABLES[name]
    family = socket.AF_INET6 if name.endswith("6") else socket.AF_INET
    wanted = _REQUEST.pack(family, _NUMBERS[protocol], 0, 1 << _TAKING[protocol])
    with open_netlink(_NETLINK_SOCK_DIAG) as opened:
        opened.settimeout(SILENCE_SECONDS)
        yield from read_whole(
            opened,
            lambda sequence: message(_SOCK_DIAG_BY_FAMILY, REQUEST | DUMP, sequence, wanted),
            lambda datagram, answers: (
                _row_of(protocol, datagram[start + CONTENT : end])
                for kind, start, end in answers
                if kind == _SOCK_DIAG_BY_FAMILY
            ),
            MAX_SOCKETS,
        )


def _row_of(protocol: Protocol, body: bytes) -> _Row:
    if len(body) < _ANSWER.size:
        raise MalformedMessageError(f"a socket in {len(body)} bytes of {_ANSWER.size}")
    family, _, port, source, user, inode = _ANSWER.unpack_from(body)
    found = IPv6Address(source) if family == socket.AF_INET6 else IPv4Address(source[:4])
    return _Row(protocol, _plain(found), int.from_bytes(port, "big"), user, str(inode))


def _address(text: str) -> str:
    """Parses an address as the kernel prints it: words of four bytes, each in the order of this machine."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    return _plain(ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words)))


def _plain(address: IPv4Address | IPv6Address) -> str:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
