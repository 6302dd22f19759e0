"""The example for keepalived with the real keepalived: `vipctl ready` decides which host has the address."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.announce.lan_network import SERVER, VIP, LanLab
from tests.fleet.network import HostDaemon
from tests.lab.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.nightly,
    pytest.mark.skipif(not shutil.which("keepalived"), reason="keepalived is not installed"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "announce" / "keepalived.conf"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LanLab]:
    with LanLab(tmp_path) as made:
        yield made


def keepalived(lab: LanLab, daemon: HostDaemon) -> None:
    """Start it with the example, for the lab's address and this daemon's socket."""
    vipctl = f"{sys.executable} -m vipd.cli.main --socket {daemon.socket}"
    text = EXAMPLE.read_text().replace("192.0.2.10", VIP).replace("/usr/bin/vipctl", vipctl)
    config = daemon.directory / "keepalived.conf"
    config.write_text(text)
    pids = (f"--{name}={daemon.directory / name}" for name in ("pid", "vrrp_pid", "checkers_pid"))
    with (daemon.directory / "keepalived.log").open("w") as log:
        daemon.host.start(
            "keepalived", "-n", "-l", "-D", "-P", "-f", str(config), *pids, stdout=log, stderr=log
        )


def has_address(daemon: HostDaemon) -> bool:
    return VIP in daemon.host.run("ip", "-4", "addr", "show", "dev", "eth0").stdout


def test_the_address_is_where_vipctl_says_ready(lab: LanLab) -> None:
    service = (
        f"- {{name: web, external_addresses: [{VIP}], ports: '80:8080', backends: [{SERVER.split(':')[0]}],\n"
        "   masquerade: always}\n"
    )
    first, second = (HostDaemon(host, service, node_name=host.name) for host in lab.hosts)
    with ExitStack() as stack:
        for daemon in (first, second):
            stack.enter_context(daemon)
            keepalived(lab, daemon)
        daemons = {"h1": first, "h2": second}

        def holders() -> list[str]:
            return [name for name, daemon in daemons.items() if has_address(daemon)]

        def logs() -> str:
            return "\n".join((d.directory / "keepalived.log").read_text() for d in (first, second))

        wait_until(lambda: len(holders()) == 1, logs, 30)
        (name,) = holders()
        other = daemons["h2" if name == "h1" else "h1"]
        assert lab.who_answers() == name
        told = daemons[name].vipctl("ready", "web")
        assert told.stdout == "web: ready\n"

        daemons[name].vipctl("host", "drain", "--reason", "kernel update")
        told = daemons[name].vipctl("ready", "web", check=False)
        assert told.returncode == 1
        assert "not ready: this host is in maintenance (kernel update)" in told.stdout
        wait_until(lambda: has_address(other) and not has_address(daemons[name]), logs, 30)
        assert lab.who_answers() == other.host.name
        lab.client.send(VIP, 80, count=50).all_answered()
        assert daemons[name].vipctl("ready", "nothing", check=False).returncode == 3

        other.kill()
        daemons[name].vipctl("host", "resume")
        wait_until(lambda: has_address(daemons[name]), logs, 30)
        assert daemons[name].vipctl("ready", f"{VIP}:80").returncode == 0
        assert other.vipctl("ready", "web", check=False).returncode == 4
