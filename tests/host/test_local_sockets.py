"""What the kernel lists by sock_diag is what it lists in /proc/net."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

import pytest

from tests.lab.held_ports import held_ports
from vipd.host import local_sockets
from vipd.host.local_sockets import TABLES, LocalSockets, dumped


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which this process listens and receives in both families, with a connection to it."""
    with held_ports(1) as (free,), contextlib.ExitStack() as stack:
        for address in ("127.0.0.1", "::1", "::ffff:127.0.0.2"):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                opened = stack.enter_context(
                    socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
                )
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                opened.bind((address, free))
                if kind == socket.SOCK_STREAM:
                    opened.listen()
        stack.enter_context(socket.create_connection(("127.0.0.1", free)))
        sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sender.bind(("127.0.0.3", free))
        sender.connect(("127.0.0.1", free))
        yield free


@pytest.mark.parametrize(
    ("table", "addresses"),
    [
        ("tcp", {"127.0.0.1"}),
        ("tcp6", {"::1", "127.0.0.2"}),
        ("udp", {"127.0.0.1"}),
        ("udp6", {"::1", "127.0.0.2"}),
    ],
)
def test_both_ways_list_the_same(port: int, table: str, addresses: set[str]) -> None:
    by_sock_diag, by_proc = (
        {row for row in rows if row.port == port} for rows in (dumped(table), LocalSockets()._listed(table))
    )
    assert by_sock_diag == by_proc
    assert {row.address for row in by_sock_diag} == addresses
    assert {row.user for row in by_sock_diag} == {os.geteuid()}
    assert all(int(row.inode) > 0 for row in by_sock_diag)


def test_a_kernel_without_sock_diag_is_read_in_proc_and_asked_once(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(protocol: int) -> socket.socket:
        asked.append(protocol)
        raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")

    monkeypatch.setattr(local_sockets, "open_netlink", refuse)
    sockets = LocalSockets()
    assert {row.address for row in sockets._rows_of("tcp") if row.port == port} == {"127.0.0.1"}
    sockets.read()
    sockets.read()
    assert len(asked) == len(TABLES)
