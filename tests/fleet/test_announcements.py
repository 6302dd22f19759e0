"""Hosts of a fleet know what the others announce: the last one keeps an address that no backend can serve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.fleet.network import FLEET_SECONDS, FleetLab, HostDaemon
from tests.host.network.test_announced_routes import TABLE

pytestmark = pytest.mark.root

VIP = "203.0.113.10"
WEB = f"load_balancer_addresses: {VIP}\nports: 80\nbackends: 10.244.0.11\nannounce: routes\n"
SETTINGS: dict[str, Any] = {
    "announce_addresses": ["203.0.113.0/24"],
    "announce_withdraw_after": 0,
    "announce_return_after": 0,
}


@pytest.fixture
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FleetLab, HostDaemon, HostDaemon]]:
    with FleetLab(tmp_path_factory.mktemp("announce"), 2) as lab, ExitStack() as stack:
        lab.put("services/web", WEB)
        etcd = {"endpoints": list(lab.etcd.urls), "timeout": "20s", "report_interval": 1}
        first, second = (
            stack.enter_context(HostDaemon(host, node_name=host.name, etcd=etcd, **SETTINGS))
            for host in lab.hosts
        )
        yield lab, first, second


def announced(*daemons: HostDaemon) -> list[bool]:
    """Which hosts have the address in their table."""
    show = ("ip", "route", "show", "table", TABLE)
    return [VIP in daemon.host.run(*show, check=False).stdout for daemon in daemons]


def announcing(daemon: HostDaemon) -> list[str]:
    """The last line of the fleet's status: an address, and the hosts that announce it."""
    lines: list[str] = daemon.vipctl("fleet", "status", "-o", "wide").stdout.splitlines()
    return lines[-1].split()


@pytest.mark.nightly
def test_the_last_host_keeps_an_address(both: tuple[FleetLab, HostDaemon, HostDaemon]) -> None:
    lab, first, second = both
    first.wait_until(lambda: announced(first, second), [True, True])

    def announcement_states() -> list[str]:
        return [" ".join(host["announced"].values()) for host in first.get("fleet")["hosts"]]

    first.wait_until(announcement_states, ["served", "served"])
    first.vipctl("drain", "web/10.244.0.11")
    first.wait_until(lambda: announced(first, second), [False, True])
    first.wait_until(announcement_states, ["", "served"])
    second.vipctl("drain", "web/10.244.0.11")
    second.wait_until(
        lambda: [w for w in second.status()["warnings"] if VIP in w][:1] != [], True, FLEET_SECONDS
    )
    assert announced(first, second) == [False, True], "the last one keeps it"
    assert "no other host announces it" in second.vipctl("host", "status").stdout
    first.wait_until(announcement_states, ["", "last-host"])
    first.vipctl("resume", "web/10.244.0.11")
    first.wait_until(lambda: announced(first, second), [True, False])
    first.wait_until(lambda: announcing(first), [VIP, "routes", "h1"])
    first.wait_until(announcement_states, ["served", ""])
    alone = first.vipctl("host", "drain", "--dry-run")
    assert f"no other host announces {VIP}" in alone.stderr
    assert "maintenance" not in first.vipctl("fleet", "status").stdout
    first.vipctl("host", "drain", "--reason", "kernel update")
    assert announced(first) == [False]
    first.wait_until(lambda: "maintenance" in first.vipctl("fleet", "status").stdout, True)
    # Host 2, which withdrew it for host 1, takes it back.
    first.wait_until(lambda: announced(first, second), [False, True])
    first.kill()
    first.start()
    assert announced(first) == [False], "maintenance outlives a crash"
    first.wait_until(lambda: announcing(first), [VIP, "routes", "h2"])
    lab.delete("services/web")
    second.wait_until(lambda: announced(second), [False])
