"""The sockets of this host that accept new flows, and their processes, as far as /proc shows them. It blocks:
use it from a thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from vipd.host.facts import LocalSocket
from vipd.host.processes import Processes
from vipd.model.service import Protocol

MAX_SOCKETS = 4096
"""Read of each table."""
SSH_SERVERS = ("sshd", "dropbear")
SSH_PORT = 22
_UNSEEN = ("", "systemd")
"""Holders of port 22 that may be the SSH server: an unknown one, and socket activation."""
TABLES = {"tcp": Protocol.TCP, "tcp6": Protocol.TCP, "udp": Protocol.UDP, "udp6": Protocol.UDP}
_TAKING = {Protocol.TCP: "0A", Protocol.UDP: "07"}
"""States: TCP LISTEN, and UDP that is not connected."""
_EPHEMERAL = "sys/net/ipv4/ip_local_port_range"


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

    def _rows(self, name: str) -> Iterator[_Row]:
        protocol = TABLES[name]
        low, high = self._ephemeral() if protocol is Protocol.UDP else (0, -1)
        try:
            with (self._proc / "net" / name).open() as lines:
                next(lines, "")
                for line in islice(lines, MAX_SOCKETS):
                    fields = line.split()
                    if len(fields) < 10 or fields[3] != _TAKING[protocol]:
                        if protocol is Protocol.TCP:
                            return  # the kernel lists those that listen first; there may be many others
                        continue
                    address, _, port = fields[1].partition(":")
                    if not low <= int(port, 16) <= high:  # otherwise it may be a client's, with a short life
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
    return LocalSocket(row.protocol, row.address, row.port, name)


def _address(text: str) -> str:
    """Parses an address as the kernel prints it: words of four bytes, each in the order of this machine."""
    words = (int(text[at : at + 8], 16) for at in range(0, len(text), 8))
    address = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
