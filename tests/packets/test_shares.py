"""Each backend's part of new flows is its weight's part of the sum of weights."""

from __future__ import annotations

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.lab.traffic import Result
from tests.packets.services import Services, backend_text, fits

pytestmark = pytest.mark.root

FLOWS = 600


def shared_by(result: Result, *weights: int) -> bool:
    named = {f"b{number}": weight for number, weight in enumerate(weights, 1)}
    return fits(result.all_answered().backends, named)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_forwarded_flows(lab: Lab, services: Services, family: int, protocol: str) -> None:
    for weights, flows in (((5, 3, 1), FLOWS), ((1, 0, 1), FLOWS // 10)):
        vip = services.add(lab.backends, family=family, protocol=protocol, weights=weights)
        assert shared_by(lab.client.send(*vip, count=flows), *weights)


def test_flows_of_the_host_itself(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, weights=(1, 2, 4))
    assert shared_by(lab.host.send(*vip, count=FLOWS), 1, 2, 4)


def test_a_changed_weight_counts_from_then_on(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    daemon.vipctl("set", f"{vip}/{backend_text(lab.backends[0])}", "--weight", "8")
    result = lab.client.send(*vip, count=FLOWS)
    assert shared_by(result, 8, 1, 1)
    assert not shared_by(result, 1, 1, 1), "the old shares could be told from the new"


def test_in_turn_every_backend_has_exactly_its_part(lab: Lab, services: Services) -> None:
    for weights in ((1, 1, 1), (3, 2, 1)):
        vip = services.add(lab.backends, "--balance", "round-robin", weights=weights)
        answered = lab.client.send(*vip, count=10 * sum(weights)).all_answered().backends
        assert answered == {f"b{number}": 10 * weight for number, weight in enumerate(weights, 1)}


def test_by_source_hash_a_client_meets_one_backend_or_is_refused(
    lab: Lab, daemon: Daemon, services: Services, dataplane: str
) -> None:
    if dataplane == "nftables":
        vip = services.add(lab.backends, "--balance", "source-hash")
        assert len(lab.client.send(*vip, count=30).all_answered().backends) == 1
        return
    output = daemon.vipctl(
        "add", str(services.vip()), "10.244.0.5", "--balance", "source-hash", check=False
    ).stderr
    assert "cannot do balance: source-hash" in output
    assert "nftables" in output
