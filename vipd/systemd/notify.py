"""Notifications to the service manager: datagrams of assignments, as sd_notify(3) describes them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

_TAKEN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Notifier:
    """Tells the service manager; without one it does nothing. Never waits, never raises."""

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        """`address`: a path, or `@NAME` for an abstract socket; empty for nobody."""
        self.watchdog_seconds = watchdog_seconds
        """How long the manager waits for a sign of life; None: it does not ask for any."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket:
            self._socket.setblocking(False)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """As the variables say, which are taken out, so that no child speaks or counts as this process."""
        told = {name: environment.pop(name, "") for name in _TAKEN}
        address = told["NOTIFY_SOCKET"]
        if not address.startswith(("/", "@")):
            return cls()  # none, or of a family that only virtual machines are given
        return cls(address, _watchdog_seconds(told["WATCHDOG_USEC"], told["WATCHDOG_PID"]))

    def send(self, *assignments: str) -> bool:
        """Send `NAME=VALUE`s; whether they were taken, or nobody wants to know."""
        if not self._socket:
            return True
        try:
            self._socket.sendto("\n".join(assignments).encode("utf-8", "replace"), self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        if self._socket:
            with contextlib.suppress(OSError):
                self._socket.close()


def one_line(text: str, limit: int = 240) -> str:
    """A text as a value of an assignment: in one line, and cut."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _watchdog_seconds(microseconds: str, pid: str) -> float | None:
    if pid and pid != str(os.getpid()):
        return None  # meant for another process, from which we have inherited it
    return int(microseconds) / 1e6 if microseconds.isdecimal() and int(microseconds) > 0 else None
