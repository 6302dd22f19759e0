"""Another dataplane takes over while flows come and go; nobody notices."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.steady_client import steady_client
from tests.lab.topology import Lab
from tests.packets.services import ENOUGH, Services
from vipd.model.service import Frontend

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def dataplane() -> str:
    """The one that each story begins with."""
    return "iptables"


def left_by(host: Node) -> tuple[bool, bool]:
    """Whether there are rules of vipd in iptables, and a table of its own."""
    return "VIPD" in host.run("iptables-save").stdout, "vipd" in host.run("nft", "list", "tables").stdout


def new_flows(daemon: Daemon, vip: Frontend) -> int:
    """How many are counted; half a second old at most."""
    (service,) = json.loads(daemon.vipctl("stats", str(vip), "-o", "json").stdout)["services"]
    return int(service["new_flows"])


@pytest.fixture
def back(daemon: Daemon) -> Iterator[None]:
    yield
    daemon.vipctl("set-dataplane", "iptables")


@pytest.mark.usefixtures("back")
def test_no_new_flow_fails_and_open_ones_go_on(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    with lab.client.open(*vip) as flow, steady_client(lab.client, vip.address, vip.port) as outcome:
        first = flow.ask()
        for name, there in (("nftables", (False, True)), ("iptables", (True, False))) * 3:
            output = daemon.vipctl("set-dataplane", name).stdout
            assert f"to {name}" in output
            assert daemon.status()["dataplane"]["name"] == name
            assert left_by(lab.host) == there
            assert flow.ask() == first
            assert len(lab.client.send(*vip, count=ENOUGH).all_answered().backends) == 3
    sent = int(str(outcome["answered"])) + 6 * ENOUGH + 1
    # What the old rules count between their last reading and their end is lost: some milliseconds' worth.
    daemon.wait_until(lambda: new_flows(daemon, vip) >= 0.9 * sent, True)
    counted = new_flows(daemon, vip)
    print(f"{counted} of {sent} flows counted over six changes")
    assert counted <= sent
    assert outcome["failed"] == {}
    assert int(str(outcome["answered"])) > 50


@pytest.mark.usefixtures("back")
def test_it_is_kept_over_a_restart_and_watched(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    daemon.vipctl("set-dataplane", "nftables")
    assert "unchanged" in daemon.vipctl("set-dataplane", "nftables").stdout
    daemon.kill()
    daemon.start()
    assert daemon.status()["dataplane"]["name"] == "nftables"
    lab.host.run("nft", "flush", "ruleset")
    # The table is there a moment before its elements are.
    daemon.wait_until(lambda: set(lab.client.send(*vip, timeout=1).failures), set())
    assert left_by(lab.host)[1]
    daemon.wait_in_sync()
    assert len(lab.client.send(*vip, count=ENOUGH).all_answered().backends) == 3


@pytest.mark.usefixtures("back")
def test_what_the_other_cannot_do_is_refused(lab: Lab, daemon: Daemon, services: Services) -> None:
    daemon.vipctl("set-dataplane", "nftables")
    vip = services.add(lab.backends, "--balance", "source-hash")
    refused = daemon.vipctl("set-dataplane", "iptables", check=False)
    assert refused.returncode == 1
    assert "source-hash" in refused.stderr
    assert daemon.status()["dataplane"]["name"] == "nftables"
    daemon.vipctl("remove", str(vip))


def test_cleanup_knows_every_dataplane(lab: Lab, daemon: Daemon, services: Services) -> None:
    services.add(lab.backends)
    daemon.vipctl("set-dataplane", "nftables")
    daemon.stop()
    assert "table ip vipd" in daemon.cleanup("--dry-run").stdout
    daemon.cleanup()
    assert left_by(lab.host) == (False, False)
    daemon.start()
    daemon.vipctl("set-dataplane", "iptables")
