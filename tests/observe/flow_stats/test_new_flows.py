"""New flows of real traffic are counted exactly, over changes of rules, restarts and others' doings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.cached import cached, spoil
from tests.lab.daemon import Daemon
from tests.lab.inside import DATAPLANES
from tests.lab.topology import Lab
from tests.observe.flow_stats.counted import PATIENCE_SECONDS, WEB, backends, new_flows, service, wait_for

pytestmark = pytest.mark.root

NODE_PORT = 30080
OTHER = WEB.replace("name: web", "name: other")


@pytest.fixture(scope="module", params=DATAPLANES)
def resident(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon(lab.host, WEB, dataplane=request.param) as made:
        yield made
        made.stop()
        made.cleanup()


@pytest.fixture
def daemon(resident: Daemon) -> Daemon:
    """The same one for every test, with WEB; the flows of other tests are counted already."""
    resident.declare(WEB)
    return resident


def test_each_flow_is_counted_at_its_backend(lab: Lab, daemon: Daemon) -> None:
    assert new_flows(daemon) == 0
    tcp = lab.client.send("10.96.0.10", 80, count=40).all_answered().backends
    udp = lab.client.send("10.96.0.10", 80, "udp", count=12).all_answered().backends
    six = lab.client.send("fd00:96::10", 80, count=5).all_answered().backends
    expected = {f"10.244.0.1{name[1]}:80/tcp": number for name, number in tcp.items()}
    expected |= {f"10.244.0.1{name[1]}:80/udp": number for name, number in udp.items()}
    expected |= {"[fd00:244::11]:80/tcp": six["b1"]}
    wait_for(daemon, 57)
    assert backends(daemon) == expected
    with lab.client.open("10.96.0.10", 80) as flow:
        for _ in range(5):
            flow.ask()
        wait_for(daemon, 58)


def test_a_backend_that_lived_between_two_readings_is_counted(lab: Lab, daemon: Daemon) -> None:
    daemon.vipctl("add", "10.98.0.80:80/tcp", "10.244.0.11", "--name", "brief")
    lab.client.send("10.98.0.80", 80, count=7).all_answered()
    # One that reaches itself meets two rules of its chain.
    lab.backends[0].send("10.98.0.80", 80, count=2).all_answered()
    daemon.vipctl("add-backend", "brief", "10.244.0.12")
    daemon.vipctl("remove-backend", "brief", "10.244.0.11")
    wait_for(daemon, 9, "brief")
    (_, gone) = service(daemon, "brief")["backends"]
    assert (gone["endpoint"], gone["gone"], gone["new_flows"]) == ("10.244.0.11:80", True, 9)
    daemon.vipctl("remove", "brief")


def test_a_node_port_counts_at_any_address(lab: Lab, daemon: Daemon) -> None:
    ports = f"[{{port: 80, node_port: {NODE_PORT}}}]"
    daemon.declare(f"{WEB}- {{name: outer, address: 10.96.0.20, ports: {ports}, backends: [10.244.0.11]}}\n")
    for address, port in (("10.10.0.1", NODE_PORT), ("10.244.0.1", NODE_PORT), ("10.96.0.20", 80)):
        lab.client.send(address, port, count=3).all_answered()
    wait_for(daemon, 9, "outer")


def test_who_takes_over_a_frontend_begins_at_zero(lab: Lab, daemon: Daemon) -> None:
    before = new_flows(daemon)
    lab.client.send("10.96.0.10", 80, count=5).all_answered()
    wait_for(daemon, before + 5)
    daemon.declare(OTHER)
    lab.client.send("10.96.0.10", 80, count=3).all_answered()
    wait_for(daemon, 3, "other")
    daemon.declare(WEB)
    wait_for(daemon, before + 5)


def test_flows_while_no_daemon_runs_count_and_a_damaged_file_means_what_the_kernel_has(
    lab: Lab, daemon: Daemon
) -> None:
    before = new_flows(daemon)
    daemon.stop()
    lab.client.send("10.96.0.10", 80, count=5).all_answered()
    daemon.start()
    wait_for(daemon, before + 5)
    daemon.stop()
    for damage in ("{", "[]", '{"former": 1}'):
        spoil(daemon.state_dir, "total", damage)
        said = daemon.log.count("the totals cannot be read")
        daemon.start()
        assert daemon.log.count("the totals cannot be read") == said + 1, damage
        lab.client.send("10.96.0.10", 80, count=2).all_answered()
        daemon.wait_until(lambda: new_flows(daemon) >= 2, True, PATIENCE_SECONDS)
        daemon.stop()
        assert "service web" in cached(daemon.state_dir, "total")
    daemon.start()


def test_rules_that_others_flush_have_counted(lab: Lab, daemon: Daemon) -> None:
    before, tells = new_flows(daemon), daemon.status()["dataplane"]["name"] == "iptables"
    lab.client.send("10.96.0.10", 80, count=15).all_answered()
    if not tells:  # the kernel tells the last count of a rule that ends, and not that of an element
        wait_for(daemon, before + 15)
    written = daemon.status()["applies"]
    lab.host.run("nft", "flush", "ruleset")
    daemon.wait_until(lambda: daemon.status()["applies"] > written, True, PATIENCE_SECONDS)
    listing = ("nft", "list", "ruleset")
    daemon.wait_until(lambda: "10.96.0.10" in lab.host.run(*listing).stdout, True, PATIENCE_SECONDS)
    daemon.wait_in_sync()
    lab.client.send("10.96.0.10", 80, count=4).all_answered()
    wait_for(daemon, before + 19)
