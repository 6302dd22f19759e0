"""Notifications to the service manager: the protocol. test_unit.py has what is told when."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def ear(address: str) -> Iterator[Ear]:
    made = Ear(address)
    yield made
    made.close()


@pytest.fixture
def notifier(ear: Ear, address: str) -> Iterator[Notifier]:
    made = Notifier(address)
    yield made
    made.close()


def test_an_at_sign_means_an_abstract_name() -> None:
    name = f"vipd-test-{os.getpid()}"
    ear, notifier = Ear(f"\0{name}"), Notifier(f"@{name}")
    assert notifier.send("READY=1")
    assert ear.heard() == ["READY=1"]
    ear.close()
    notifier.close()


def test_a_full_socket_holds_up_nothing(ear: Ear, notifier: Notifier) -> None:
    taken = [notifier.send("WATCHDOG=1") for _ in range(2000)]
    assert taken[0]
    assert not taken[-1]
    ear.heard()
    assert notifier.send("WATCHDOG=1")


def test_the_variables_are_taken_out_of_the_environment() -> None:
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier.from_environment(environment)
    assert environment == {}
    assert notifier.watchdog_seconds == 30
    notifier.close()


@pytest.mark.parametrize(
    ("microseconds", "pid"), [("30000000", "1"), ("0", ""), ("", ""), ("soon", ""), ("-5", "")]
)
def test_a_watchdog_of_others_or_none(microseconds: str, pid: str) -> None:
    told = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": microseconds, "WATCHDOG_PID": pid}
    notifier = Notifier.from_environment(told)
    assert notifier.watchdog_seconds is None
    notifier.close()


def test_a_value_is_one_short_line() -> None:
    assert one_line("a\n b\tc") == "a b c"
    assert len(one_line("x" * 1000)) == 240
