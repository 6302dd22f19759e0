"""External and load balancer addresses lead to the service, as seen from outside and from the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import HOST_TOWARDS_BACKENDS, Lab
from tests.packets.outside import (
    Declared,
    backend_texts,
    forward_policies,
    inside_address,
    outside_address,
    outside_lab,
)
from tests.packets.services import ENOUGH_OF_TWO, SERVED_PORT

pytestmark = pytest.mark.root

KINDS = ("external_addresses", "load_balancer_addresses")
BOTH = frozenset({"b1", "b2"})


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with outside_lab() as built:
        yield built


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_reaches_the_backends_with_the_hosts_source(
    lab: Lab, declared: Declared, kind: str, family: int, protocol: str
) -> None:
    inside, outside = inside_address(family), outside_address(family)
    spec = {"address": inside, "ports": [f"{SERVED_PORT}/{protocol}"], kind: [outside]}
    declared.put("reached", backend_texts(lab.backends[:2], family), family, **spec)
    for policy in forward_policies(lab, family):
        for node in (lab.client, lab.host):
            for address in (outside, inside):
                result = node.send(address, SERVED_PORT, protocol, count=ENOUGH_OF_TWO).all_answered()
                assert set(result.backends) == BOTH
                seen = f"{node.name} to {address}, FORWARD {policy}"
                assert result.sources == {HOST_TOWARDS_BACKENDS[family]}, seen


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_removed_it_is_its_owners_again(lab: Lab, declared: Declared, kind: str, family: int) -> None:
    outside = outside_address(family)
    rival = {lab.backends[-1].name}
    spec = {"address": inside_address(family), "ports": [f"{SERVED_PORT}/tcp"]}
    assert set(lab.client.send(outside, SERVED_PORT).all_answered().backends) == rival
    declared.put("removed", backend_texts(lab.backends[:2], family), family, **spec, **{kind: outside})
    assert set(lab.client.send(outside, SERVED_PORT, count=ENOUGH_OF_TWO).all_answered().backends) == BOTH
    declared.put("removed", backend_texts(lab.backends[:2], family), family, **spec)
    assert set(lab.client.send(outside, SERVED_PORT, count=ENOUGH_OF_TWO).all_answered().backends) == rival


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_hairpin_keeps_the_clients_source(lab: Lab, declared: Declared, kind: str, family: int) -> None:
    outside = outside_address(family)
    spec = {"address": inside_address(family), "ports": [f"{SERVED_PORT}/tcp"], "masquerade": "hairpin"}
    declared.put("kept", backend_texts(lab.backends[:2], family), family, **spec, **{kind: outside})
    for policy in forward_policies(lab, family):
        seen = lab.client.send(outside, SERVED_PORT, count=10).all_answered().sources
        assert seen == {lab.client.address(family)}, f"FORWARD {policy}"


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_service_refuses(lab: Lab, declared: Declared, kind: str, family: int) -> None:
    outside = outside_address(family)
    spec = {"address": inside_address(family), "ports": [f"{SERVED_PORT}/tcp", f"{SERVED_PORT}/udp"]}
    lab.client.send(outside, SERVED_PORT).all_answered()
    declared.put("empty", (), family, **spec, **{kind: outside})
    lab.client.send(outside, SERVED_PORT, count=3).all_failed("refused")
    lab.client.send(outside, SERVED_PORT, "udp", count=3).all_failed("refused")
    lab.host.send(outside, SERVED_PORT, count=3).all_failed("refused")


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_inside_address(lab: Lab, daemon: Daemon, declared: Declared, kind: str) -> None:
    outside = outside_address(4)
    spec = {"ports": [f"{SERVED_PORT}/tcp"], kind: outside}
    declared.put("only-outside", backend_texts(lab.backends[:2], 4), 4, **spec)
    for node in (lab.client, lab.host):
        assert set(node.send(outside, SERVED_PORT, count=ENOUGH_OF_TWO).all_answered().backends) == BOTH
    for verb in ("list", "describe"):
        assert outside in daemon.vipctl(verb, "only-outside-v4").stdout
