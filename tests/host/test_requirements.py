"""What services ask of the host, as they come, change and go."""

from __future__ import annotations

from dataclasses import replace

from vipd.host.requirements import HostRequirements
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import ExternalAddress, Family, Masquerade, Protocol

VIP = "10.96.0.1"


def on(port: int, *backends: str, family: Family = Family.IPV4) -> Forwarding:
    """One port of a service on the VIP."""
    key = ForwardingKey("web", str(port), Protocol.TCP, family)
    endpoints = tuple(Endpoint(backend, port) for backend in backends)
    return Forwarding(key, (VIP,), port, endpoints, Masquerade.FORWARDED)


def test_a_vip_goes_with_the_last_of_its_ports() -> None:
    first, second = on(1, "10.244.0.5"), on(2, "10.244.0.6")
    needs = HostRequirements([first, second])
    assert needs.update({first.key: None}) == {VIP}
    assert needs.vips == {VIP: "10.244.0.6"}
    assert needs.update({second.key: None}) == {VIP}
    assert needs.vips == {}
    assert set(needs.families) == set()


def test_only_vips_that_lead_elsewhere_are_told() -> None:
    first, second = on(1, "10.244.0.5"), on(2, "10.244.0.6")
    needs = HostRequirements([first, second])
    assert needs.update({second.key: on(2, "10.244.0.7")}) == set()
    assert needs.update({first.key: on(1)}) == {VIP}
    assert needs.vips == {VIP: "10.244.0.7"}
    needs = HostRequirements([first])
    assert needs.update({first.key: on(1, "10.244.0.5", "10.244.0.9")}) == set()
    outside = replace(first, external_addresses=(ExternalAddress("198.51.100.1"),))
    assert needs.update({first.key: outside}) == {"198.51.100.1"}


def test_a_vip_that_moves_to_another_service_stays() -> None:
    old, new = on(1, "10.244.0.5"), on(2, "10.244.0.5")
    needs = HostRequirements([old])
    assert needs.update({old.key: None, new.key: new}) == set()
    assert needs.vips == {VIP: "10.244.0.5"}


def test_affinity_and_health_ports_are_known_while_somebody_has_them() -> None:
    plain = on(1, "10.244.0.5")
    pinned = replace(plain, affinity_timeout=60, health_port=32000)
    needs = HostRequirements([pinned])
    assert (list(needs.with_affinity), needs.health_ports) == ([pinned], True)
    needs.update({plain.key: plain})
    assert (list(needs.with_affinity), needs.health_ports) == ([], False)
