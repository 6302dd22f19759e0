"""Traces of legacy iptables: vipd reads by netlink what the kernel would write to its log.

Legacy tables also trace a packet that nftables marked, so they need no rule of vipd's. They report it by
the logger of the packet's family, a setting of the network namespace; during a trace it is nfnetlink_log. A
child process restores the setting when this process ends, for whatever reason: it sees the end of a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
from pathlib import Path
from types import TracebackType

from vipd.host.netlink import ACKNOWLEDGE, FAMILY_NUMBERS, REQUEST, attribute, message, nfgenmsg
from vipd.host.netlink_socket import acknowledge, open_netlink
from vipd.model.service import Family
from vipd.observe.live_trace.table import ANSWER_SECONDS, TraceError

WANTED = "nfnetlink_log"
_SETTINGS = Path("/proc/sys/net/netfilter/nf_log")
_CONFIGURE = 4 << 8 | 1
"""NFULNL_MSG_CONFIG."""
_COMMAND, _MODE, _THRESHOLD = 1, 2, 5
_BIND, _COPY_PACKET = 1, 2
_HEADERS_LENGTH = 128
"""Bytes of a packet in its log message: more than the headers of any traced packet."""
_GROUP = 0
"""The only group that receives traces."""


class LegacyLog:
    """Traces of legacy tables arrive at `socket` from entry to exit. Raises TraceError on entry."""

    def __init__(self, family: Family) -> None:
        self._setting = _SETTINGS / str(FAMILY_NUMBERS[family])
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> LegacyLog:
        what = "cannot read the traces of legacy iptables"
        try:
            self._opened.enter_context(_logger_switched(self._setting))
            self.socket = self._opened.enter_context(open_netlink())
            _bind(self.socket)
        except OSError as error:
            self._opened.close()
            raise TraceError(what, error.strerror or str(error), _hint(error.errno)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


class _logger_switched:  # noqa: N801 (it is used as a function)
    """The family's logger is nfnetlink_log from entry to exit."""

    def __init__(self, setting: Path) -> None:
        self._setting = setting
        self._guard = self._pipe = 0

    def __enter__(self) -> None:
        before = self._setting.read_text().strip()
        if before == WANTED:
            return
        reading, self._pipe = os.pipe()
        # Signals that end a terminal or a service reach the child, too, perhaps before it has done anything.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._guard = os.fork()
            if not self._guard:
                os.close(self._pipe)
                _put_back_later(self._setting, before, reading)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reading)
        self._setting.write_text(WANTED)

    def __exit__(self, *_: object) -> None:
        if self._guard:
            os.close(self._pipe)
            os.waitpid(self._guard, 0)


def _put_back_later(setting: Path, before: str, pipe: int) -> None:
    """In the child, whose signals are blocked: wait for the parent's end, restore the setting, end. It never
    returns."""
    try:
        os.setsid()
        os.read(pipe, 1)
        # If another program has changed it since, its value stays.
        if setting.read_text().strip() == WANTED:
            setting.write_text(before)
    finally:
        os._exit(0)


def _bind(opened: socket.socket) -> None:
    """Have every log of the group at once, with the headers of its packet. Raises OSError."""
    opened.settimeout(ANSWER_SECONDS)
    mode = struct.pack(">IBx", _HEADERS_LENGTH, _COPY_PACKET)
    for kind, value in ((_COMMAND, bytes([_BIND])), (_MODE, mode), (_THRESHOLD, struct.pack(">I", 1))):
        content = nfgenmsg(resource=_GROUP) + attribute(kind, value)
        opened.send(message(_CONFIGURE, REQUEST | ACKNOWLEDGE, 0, content))
        acknowledge(opened)


def _hint(number: int | None) -> str:
    # The kernel reports EPERM if another socket has the group.
    if number in (errno.EPERM, errno.EBUSY):
        return "perhaps another program, such as ulogd, takes group 0 of nfnetlink_log"
    if number in (errno.ENOENT, errno.EPROTONOSUPPORT):
        return "modprobe nfnetlink_log"
    return ""
