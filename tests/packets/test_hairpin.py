"""A backend reaches itself through its own VIP, on a bridge with and without bridge netfilter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import HOST_TOWARDS_BACKENDS, Lab, Wiring
from tests.packets.services import SERVED_PORT, Services

pytestmark = pytest.mark.root

BRIDGE_NETFILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
WIRINGS = {
    "plain": Wiring(backends=2),
    # With bridge netfilter the translated frame is bridged, not routed: its port must let it back out.
    "bridge-netfilter": Wiring(backends=2, bridge_netfilter=True, port_hairpin=True),
}


@pytest.fixture(scope="module", params=list(WIRINGS))
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    wiring = WIRINGS[request.param]
    if wiring.bridge_netfilter and not BRIDGE_NETFILTER.exists():
        pytest.skip(f"this kernel has no br_netfilter loaded: {BRIDGE_NETFILTER} is missing")
    with Lab(wiring) as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


@pytest.mark.parametrize("mode", ["hairpin", "forwarded"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_a_backend_reaches_itself(
    lab: Lab, services: Services, family: int, protocol: str, mode: str
) -> None:
    own = lab.backends[0]
    vip = services.add([own], "--masquerade", mode, family=family, protocol=protocol)
    result = own.send(*vip, count=20).all_answered()
    assert set(result.backends) == {own.name}
    assert result.sources == {HOST_TOWARDS_BACKENDS[family]}


def test_a_backend_reaches_its_peers_and_itself(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, "--masquerade", "forwarded")
    result = lab.backends[0].send(*vip, count=60).all_answered()
    assert set(result.backends) == {"b1", "b2"}


def test_established_hairpin_flow_lasts(lab: Lab, daemon: Daemon, services: Services) -> None:
    own = lab.backends[0]
    vip = services.add([own], "--masquerade", "hairpin")
    with own.open(*vip) as flow:
        before = flow.ask()
        services.add(lab.backends)
        assert flow.ask() == before
