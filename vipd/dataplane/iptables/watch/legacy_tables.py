"""The size and shape of a legacy table, read from the kernel in microseconds whatever the number of rules.

It changes with every added or removed rule, but not when a rule is replaced by one of the same size.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable

from vipd.model.service import Family

_GET_INFO = 64
"""IPT_SO_GET_INFO and IP6T_SO_GET_INFO."""
_INFO = struct.Struct("=32s13I")
"""struct ipt_getinfo: name, valid hooks, hook entries, underflows, number of entries, size."""
_FAMILIES = {Family.IPV4: (socket.AF_INET, 0), Family.IPV6: (socket.AF_INET6, 41)}
"""Socket family, and SOL_IP or SOL_IPV6."""

Fingerprint = tuple[int, ...]


class LegacyTables:
    """Reads one family's tables in the network namespace of the thread that created it.

    Python's own getsockopt cannot pass the table's name, so this calls the C library's.
    """

    def __init__(self, family: Family) -> None:
        """Raises OSError."""
        domain, self._level = _FAMILIES[family]
        self._socket = socket.socket(domain, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._getsockopt = ctypes.CDLL(None, use_errno=True).getsockopt

    def close(self) -> None:
        """Close the socket that carries the questions."""
        self._socket.close()

    def fingerprint(self, tables: Iterable[str]) -> tuple[Fingerprint, ...]:
        """The shape of each table, which must exist, as reading creates a missing one. Raises OSError."""
        return tuple(self._fingerprint(table) for table in tables)

    def _fingerprint(self, table: str) -> Fingerprint:
        buffer = ctypes.create_string_buffer(table.encode(), _INFO.size)
        size = ctypes.c_uint32(_INFO.size)
        if self._getsockopt(self._socket.fileno(), self._level, _GET_INFO, buffer, ctypes.byref(size)):
            number = ctypes.get_errno()
            raise OSError(number, f"legacy table {table}: {os.strerror(number)}")
        return _INFO.unpack(buffer.raw)[1:]
