"""Notifications to the service manager: datagrams of assignments, as sd_notify(3) describes them.

Without libsystemd: a notification is one datagram, and the library takes 0.8 MB of memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import MutableMapping

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.model.text import shortened

log = logging.getLogger(__name__)

_UNTOLD = "the service manager cannot be notified"
_TAKEN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Notifies the service manager; without one it does nothing. Never blocks, never raises."""

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        """`address`: a path, or `@NAME` for an abstract socket; empty: no manager."""
        self._fault = ""
        self.watchdog_seconds = watchdog_seconds
        """How long the manager waits for a heartbeat; None: it requires none."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket:
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """A notifier by the variables, which are removed, so that no child uses them as this process."""
        told = {name: environment.pop(name, "") for name in _TAKEN}
        address = told["NOTIFY_SOCKET"]
        if not address.startswith(("/", "@")):
            return cls()  # missing, or of a family that only virtual machines get
        return cls(address, _watchdog_seconds(told["WATCHDOG_USEC"], told["WATCHDOG_PID"]))

    def send(self, *assignments: str) -> bool:
        """Send `NAME=VALUE`s; returns whether they were accepted, or there is no manager."""
        try:
            taken = self._transmit("\n".join(assignments).encode("utf-8", "replace"))
        except Exception as error:
            expected = isinstance(error, OSError)
            why = str(error) if expected else f"{internal_error(error, 'sending')}; {PLEASE_REPORT}"
            if why != self._fault:
                log.warning("%s: %s", _UNTOLD, why, exc_info=None if expected else error)
            self._fault = why
            return False
        self._fault = ""
        return taken

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the manager cannot be notified."""
        return (f"{_UNTOLD}: {self._fault}",) if self._fault else ()

    def _transmit(self, data: bytes) -> bool:
        if self._socket:
            self._socket.sendto(data, self._address)
        return True

    def close(self) -> None:
        """Close the socket."""
        if self._socket:
            with contextlib.suppress(OSError):
                self._socket.close()


def one_line(text: str, limit: int = 240) -> str:
    """A text as a value of an assignment: in one line, and cut."""
    return shortened(text, limit)


def _watchdog_seconds(microseconds: str, pid: str) -> float | None:
    if pid and pid != str(os.getpid()):
        return None  # meant for another process, and inherited from it
    return int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) > 0 else None
