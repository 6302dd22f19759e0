"""TCP checks of real listeners."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.health.servers import (
    PATIENCE,
    beside,
    checked,
    closed_port,
    full_backlog,
    healthy_and_reason,
    silent,
    tcp_server,
)
from tests.lab.inside import probed


def test_a_listener_is_good_whatever_it_does_with_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, beside(tcp_server(silent)) as port:
        verdicts = probed(checked("tcp", listener.getsockname()[1]), checked("tcp", port))
    assert [found.healthy for found in verdicts] == [True, True]
    assert all(found.reason.startswith("answered in ") for found in verdicts)


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_so_is_one_with_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        assert probed(checked("tcp", listener.getsockname()[1], "::1"))[0].healthy


def test_a_closed_port_refuses_and_no_packet_goes_to_broadcast() -> None:
    with closed_port() as port:
        assert healthy_and_reason("tcp", port) == (False, "connection refused")
    assert healthy_and_reason("tcp", 80, address="255.255.255.255") == (False, "network unreachable")


def test_a_listener_that_accepts_nothing_any_more_times_out() -> None:
    with full_backlog() as port:
        (found,) = probed(checked("tcp", port, timeout="300ms"))
    assert found[:2] == (False, "timeout after 0.3 s")
    assert found.seconds >= 0.3


def test_probes_disturb_no_server_and_leave_nothing_behind() -> None:
    """The handshake is not completed: the program sees no connection, the kernel keeps no TIME_WAIT."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        port = listener.getsockname()[1]
        earlier = time_waits(port)  # of others that had this port before
        # Each has a time limit of its own: equal checks are asked once.
        verdicts = probed(*(checked("tcp", port, timeout=f"{limit}s") for limit in range(10, 60)))
        assert all(found.healthy for found in verdicts)
        listener.setblocking(False)
        accepted = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                accepted += 1
        # A busy machine may take longer than the kernel holds the last packet back, but hardly each time.
        assert accepted < 45
        assert time_waits(port) <= earlier


TIME_WAIT = "06"


def time_waits(port: int) -> set[tuple[str, str]]:
    """Both ends of the connections in TIME_WAIT that have this loopback port on either side."""
    here = f"0100007F:{port:04X}"
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    ends = {(fields[1], fields[2]) for fields in map(str.split, lines) if fields[3] == TIME_WAIT}
    return {pair for pair in ends if here in pair}


MORE_THAN_IT_MAY = """
from tests.health.servers import checked, full_backlog, probed, seen
held = [open("/dev/null") for _ in range(200)]
with full_backlog() as port:
    for found in probed(*(checked("tcp", port, timeout=f"{100 + n}ms") for n in range(60))):
        print(seen(found).partition(" after ")[0])
"""


def test_what_this_host_lacks_is_no_backends_fault() -> None:
    """More checks at once than it may have files."""
    argv = ["prlimit", "--nofile=240:240", sys.executable, "-c", MORE_THAN_IT_MAY]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
    assert {*shown.splitlines()} == {"bad: timeout", "not asked: cannot be asked: too many open files"}
