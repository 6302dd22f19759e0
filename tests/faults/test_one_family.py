"""The programs of one address family fail: for the other one all that follows a write follows it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.host.network.test_vip_routes import SOON
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import backend_text

pytestmark = pytest.mark.root

VIPS = {4: "10.96.3.1", 6: "fd00:96::3:1"}
OUTSIDE = {4: "203.0.113.30", 6: "2001:db8::30"}
OTHERS = 8
"""Flows of the family that is not written, to both backends."""
PROGRAMS = {4: "iptables-restore", 6: "ip6tables-restore"}


def services(lab: Lab, first: int, end: int) -> str:
    """A UDP service of each family, with the backends from one number to another."""
    return "\n".join(
        f"""
  - name: dns{family}
    address: "{VIPS[family]}"
    load_balancer_addresses: ["{OUTSIDE[family]}"]
    announce: routes
    ports: [80/udp]
    backends: [{", ".join(f'"{backend_text(node, family)}"' for node in lab.backends[first:end])}]
"""
        for family in VIPS
    )


@pytest.mark.parametrize("broken", [6, pytest.param(4, marks=pytest.mark.nightly)])
def test_flows_status_and_announcements_follow_the_family_that_is_written(
    lab: Lab, tmp_path: Path, broken: int
) -> None:
    well = 10 - broken
    program = tmp_path / PROGRAMS[broken]
    host = lab.host.with_environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    settings = {"announce_addresses": ["203.0.113.0/24", "2001:db8::/64"], "announce_withdraw_after": 1}
    with Daemon(host, services(lab, 0, 2), dataplane="iptables", **settings) as daemon:
        daemon.wait_until(lambda: announced(lab), {OUTSIDE[4], OUTSIDE[6]}, SOON)
        with lab.client.open(VIPS[well], 80, "udp") as flow, contextlib.ExitStack() as flows:
            others = [flows.enter_context(lab.client.open(VIPS[broken], 80, "udp")) for _ in range(OTHERS)]
            before, stays = flow.ask().backend, [other.ask().backend for other in others]
            program.write_text("#!/bin/sh\necho broken by the test >&2\nexit 1\n")
            program.chmod(0o755)
            left = 1 if before == lab.backends[0].name else 0
            daemon.write(services(lab, left, left + 1))
            daemon.wait_until(lambda: flow.ask().backend, lab.backends[left].name, SOON)
            assert [other.ask().backend for other in others] == stays, "no rule sends them elsewhere"
        states = {
            family: daemon.get(f"services/dns{family}")["service"]["status"]["state"] for family in VIPS
        }
        assert states == {well: "unchecked", broken: "pending"}
        daemon.write(services(lab, 0, 0))
        daemon.wait_until(lambda: announced(lab), {OUTSIDE[broken]}, SOON)
        assert "broken by the test" in daemon.vipctl("status", check=False).stdout
        program.unlink()
        daemon.reload()
        daemon.wait_until(lambda: announced(lab), set(), SOON)


def announced(lab: Lab) -> set[str]:
    """The addresses in the table that routing daemons read."""
    lines = [
        line
        for tool in ("-4", "-6")
        for line in lab.host.run("ip", tool, "route", "show", "table", "86", check=False).stdout.splitlines()
    ]
    return {line.split()[0] for line in lines}
