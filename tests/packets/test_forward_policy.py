"""On a host whose FORWARD policy is DROP, flows that vipd translated pass, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab, Wiring
from tests.packets.services import SERVED_PORT, Services

pytestmark = pytest.mark.root

TOOLS = {4: "iptables", 6: "ip6tables"}
FOREIGN_PORT = 9000


@pytest.fixture(scope="module")
def lab(dataplane: str) -> Iterator[Lab]:
    with Lab(Wiring(backends=2)) as built:
        built.serve_everywhere(SERVED_PORT)
        for tool in TOOLS.values():
            built.host.run(tool, "-P", "FORWARD", "DROP")
        yield built


def add_foreign_rule(lab: Lab, family: int) -> None:
    target = lab.backends[0].address(family)
    shown = f"[{target}]" if family == 6 else target
    match = ("-d", lab.host.address(family), "-p", "tcp", "--dport", str(FOREIGN_PORT))
    action = ("-j", "DNAT", "--to-destination", f"{shown}:{SERVED_PORT}")
    lab.host.run(TOOLS[family], "-t", "nat", "-A", "PREROUTING", *match, *action)


@pytest.mark.parametrize("mode", ["forwarded", "hairpin"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_translated_flows_pass(
    lab: Lab, daemon: Daemon, services: Services, family: int, protocol: str, mode: str
) -> None:
    vip = services.add(lab.backends, "--masquerade", mode, family=family, protocol=protocol)
    lab.client.send(*vip, count=20).all_answered()
    with lab.client.open(*vip) as flow:
        assert len({flow.ask() for _ in range(20)}) == 1
    assert "-P FORWARD DROP" in lab.host.run(TOOLS[family], "-S", "FORWARD").stdout, "the policy stays"
    apart = "accepts flows that vipd translated from now on" in daemon.log
    assert apart is (daemon.status()["dataplane"]["name"] == "nftables"), "iptables has it in its own rules"


@pytest.mark.parametrize("family", [4, 6])
def test_others_do_not_pass(lab: Lab, services: Services, family: int) -> None:
    services.add(lab.backends, family=family)
    lab.client.send(lab.backends[0].address(family), SERVED_PORT, timeout=0.5).all_failed("timeout")
    add_foreign_rule(lab, family)
    foreign = (lab.host.address(family), FOREIGN_PORT)
    lab.client.send(*foreign, timeout=0.5).all_failed("timeout")
    # The same two ways are open once the policy is: it was the policy that closed them.
    lab.host.run(TOOLS[family], "-P", "FORWARD", "ACCEPT")
    try:
        lab.client.send(lab.backends[0].address(family), SERVED_PORT, count=5).all_answered()
        lab.client.send(*foreign, count=5).all_answered()
    finally:
        lab.host.run(TOOLS[family], "-P", "FORWARD", "DROP")


def test_not_accepting_forwarded_flows_leaves_them_to_the_policy(
    lab: Lab, daemon: Daemon, dataplane: str
) -> None:
    daemon.stop()
    with Daemon(lab.host, dataplane=dataplane, accept_forwarded=False) as strict:
        vip = Services(strict).add(lab.backends)
        lab.client.send(*vip, timeout=0.5).all_failed("timeout")
        lab.host.send(*vip, count=5).all_answered()
    daemon.start()
