"""firewalld, ufw and Docker as Debian installs them, on a booted machine: flows through a VIP outlive their
reloads and restarts."""

from __future__ import annotations

import pytest

from tests.system.conftest import SERVED_PORT, Prepared, serve_web
from tests.system.machine import Machine

pytestmark = [pytest.mark.root, pytest.mark.nightly, pytest.mark.timeout(1800)]

VIP = "10.96.44.1"
START_DOCKER = """
echo 0 > /run/ip_forward
units=/run/systemd/system/docker.service.d
mkdir -p $units
printf '[Service]\\nBindPaths=/run/ip_forward:/proc/sys/net/ipv4/ip_forward\\n' > $units/forwarding.conf
systemctl daemon-reload
systemctl reset-failed docker
exec systemctl start docker
"""
"""As on a host that forwards nothing yet, more often than systemd allows by itself. vipd would turn the
setting itself on again before Docker reads it."""


@pytest.fixture(autouse=True, scope="module")
def installed(machine: Machine, prepared: Prepared) -> None:
    serve_web(machine, prepared.package, VIP)


def answered(machine: Machine) -> bool:
    return not machine.lab.client.send(VIP, 80, count=5, timeout=3.0).failures


def is_dropped_without_vipd(machine: Machine) -> bool:
    """Whether the firewall keeps the client from a backend's own address: else a test of it shows nothing."""
    backend = machine.lab.backends[0].ipv4
    return bool(machine.lab.client.send(backend, SERVED_PORT, timeout=2.0).failures)


@pytest.mark.parametrize("dataplane", ["iptables", "nftables"])
@pytest.mark.parametrize(
    ("package", "start", "reload", "stop"),
    [
        (
            "firewalld",
            ("systemctl", "start", "firewalld"),
            ("firewall-cmd", "--reload"),
            ("systemctl", "stop", "firewalld"),
        ),
        ("ufw", ("ufw", "--force", "enable"), ("ufw", "reload"), ("ufw", "disable")),
        # Where it has to turn forwarding on itself, it drops what is not its own, and does so when it has
        # ended, too.
        (
            "docker.io",
            ("sh", "-c", START_DOCKER),
            ("systemctl", "restart", "docker"),
            ("systemctl", "stop", "docker", "docker.socket"),
        ),
    ],
    ids=["firewalld", "ufw", "docker"],
)
def test_flows_outlive_a_reload(
    machine: Machine,
    dataplane: str,
    package: str,
    start: tuple[str, ...],
    reload: tuple[str, ...],
    stop: tuple[str, ...],
) -> None:
    machine.run("vipctl", "set-dataplane", dataplane)
    machine.apt("install", "--no-install-recommends", package)
    for unit in {"firewalld": ("firewalld",), "docker.io": ("docker.socket", "docker")}.get(package, ()):
        machine.run("systemctl", "stop", unit)  # the package starts it
    before = machine.main_pid()
    with machine.lab.client.open(VIP, 80) as flow:
        backend = flow.ask()
        machine.run(*start)
        # firewalld may have started before its rules are there.
        machine.wait_until(lambda: is_dropped_without_vipd(machine), f"rules of {package}")
        machine.wait_until(lambda: answered(machine), f"new flows beside {package}")
        assert flow.ask() == backend
        machine.run(*reload)
        machine.wait_until(lambda: answered(machine), f"new flows after a reload of {package}")
        assert flow.ask() == backend
    machine.run(*stop)
    machine.wait_until(lambda: answered(machine), f"new flows after the end of {package}")
    assert machine.main_pid() == before
    in_sync = ("sh", "-c", "vipctl status || true")  # at once after such a change a step may be under way
    machine.wait_until(lambda: "in sync" in machine.said(*in_sync), "in sync")
    status = machine.said(*in_sync)
    # The confined service may not read legacy tables, and warns where there are any.
    legacy = machine.said("sh", "-c", "cat /proc/net/ip_tables_names /proc/net/ip6_tables_names 2>&1 || true")
    assert "Permission denied" not in status, (status, legacy)
