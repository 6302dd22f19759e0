"""Listings of the kernel that change while they are read: what stays is never missing."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.lab.node import Node
from tests.lab.topology import Lab
from vipd.host.announced_routes import read_table
from vipd.host.network import read_addresses
from vipd.host.route_table import read_routing

pytestmark = pytest.mark.root

READINGS = 8
"""Of the readings of IPv6 routes one in five missed some."""
STABLE = [f"fd00:b::{n:x}" for n in range(1, 3001)]
PASSING = [f"fd00:a::{n:x}" for n in range(1, 2001)]
"""Before the stable ones in the kernel's order."""


@contextlib.contextmanager
def churn(node: Node, *lines: str) -> Iterator[None]:
    """Run these lines of `ip -batch` in a node, again and again, until the end."""
    ended, begun = threading.Event(), threading.Event()

    def run() -> None:
        while not ended.is_set():
            batch(node, *lines)
            begun.set()

    running = threading.Thread(target=run)
    running.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        ended.set()
        running.join()


def batch(node: Node, *lines: str) -> None:
    command = ["ip", "-n", node.namespace, "-6", "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)


@pytest.mark.parametrize("table", [254, 86])
def test_no_route_that_stays_is_missed(table: int, lab: Lab) -> None:
    route = f"route {{}} {{}} dev lo metric 7 proto 86 table {table}"
    batch(lab.host, *(route.format("add", each) for each in STABLE))
    lines = [route.format(verb, each) for verb in ("add", "del") for each in PASSING]
    with churn(lab.host, *lines), lab.host.entered():
        for _ in range(READINGS):
            if table == 86:
                assert not set(STABLE) - asyncio.run(read_table(table))
            else:
                table_read = asyncio.run(read_routing("lo")).table
                assert all(map(table_read.covers, STABLE))


def test_no_address_that_stays_is_missed(lab: Lab) -> None:
    """The kernel marks most of these listings. The other end of a link has an address, and this host not."""
    lab.host.run("ip", "address", "add", "192.0.2.101", "peer", "192.0.2.102", "dev", "lo")
    with lab.host.entered():
        assert {"192.0.2.101", "192.0.2.102"} & read_addresses() == {"192.0.2.101"}
    line = "address {} {}/128 dev lo"
    batch(lab.host, *(line.format("add", each) for each in STABLE[:600]))
    lines = [line.format(verb, each) for verb in ("add", "del") for each in PASSING[:300]]
    read = 0
    with churn(lab.host, *lines), lab.host.entered():
        while read < 5:
            # One that is marked each time is an error, and no list.
            with contextlib.suppress(OSError):
                assert not set(STABLE[:600]) - read_addresses()
                read += 1
