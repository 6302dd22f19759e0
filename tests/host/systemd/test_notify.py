"""Notifications to the service manager: the protocol. test_unit.py has what is told when."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

from vipd.host.systemd.notify import Notifier, one_line


class Ear:
    """A datagram socket, asked when wanted."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """What has come since the last time."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(1 << 16).decode())
            except BlockingIOError:
                return found

    def close(self) -> None:
        self._socket.close()


def test_an_at_sign_means_an_abstract_name() -> None:
    name = f"vipd-test-{os.getpid()}"
    with closing(Ear(f"\0{name}")) as ear, closing(Notifier(f"@{name}")) as notifier:
        assert notifier.send("READY=1")
        assert ear.heard() == ["READY=1"]


def test_a_full_socket_holds_up_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with closing(Ear(path)) as ear, closing(Notifier(path)) as notifier:
        taken = [notifier.send("WATCHDOG=1") for _ in range(2000)]
        assert taken[0]
        assert not taken[-1]
        ear.heard()
        assert notifier.send("WATCHDOG=1")


def test_the_variables_are_taken_out_of_the_environment_and_may_name_another_process() -> None:
    watchdogs = {("30000000", str(os.getpid())): 30, ("30000000", "1"): None}
    watchdogs |= {(microseconds, ""): None for microseconds in ("0", "", "soon", "-5")}
    for (microseconds, pid), seconds in watchdogs.items():
        environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": microseconds, "WATCHDOG_PID": pid}
        with closing(Notifier.from_environment(environment)) as notifier:
            assert (notifier.watchdog_seconds, environment) == (seconds, {}), microseconds


def test_a_value_is_one_short_line() -> None:
    assert one_line("a\n b\tc") == "a b c"
    assert len(one_line("x" * 1000)) == 240
