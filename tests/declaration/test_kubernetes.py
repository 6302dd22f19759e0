"""What the Services and EndpointSlices of Kubernetes become."""

from __future__ import annotations

from typing import Any

import pytest

from tests.declaration.manifests import Json, backends, endpoint_slice, notes, only, read, service
from vipd.model import limits
from vipd.model.service import (
    Affinity,
    Backend,
    BackendState,
    ExternalAddress,
    Protocol,
    Service,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
)

UP, DRAIN, DOWN = BackendState.UP, BackendState.DRAIN, BackendState.DOWN
TCP, UDP = Protocol.TCP, Protocol.UDP
TWO_PORTS = [{"name": "http", "port": 80}, {"name": "https", "port": 443}]


def named(port: int, name: str) -> Json:
    return {"name": name, "port": port}


def test_backends_are_reached_at_their_ports_of_the_names() -> None:
    slices = [
        endpoint_slice("10.244.0.1", "10.244.0.2", ports=[named(8080, "http"), named(8443, "https")]),
        endpoint_slice("10.244.0.3", ports=[named(9090, "http")]),
    ]
    found = only(service(ports=TWO_PORTS), *slices)
    reached = {
        port.name: [f"{b.address}:{b.port_for(port)}" for b in found.backends if b.port_for(port)]
        for port in found.ports
    }
    assert reached == {
        "http": ["10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.3:9090"],
        "https": ["10.244.0.1:8443", "10.244.0.2:8443"],
    }


@pytest.mark.parametrize(("ports_of_the_other", "problems"), [(("http", "https"), 0), (("http",), 1)])
def test_many_endpoints_are_listed_for_each_port_only_if_all_ports_have_the_same(
    monkeypatch: pytest.MonkeyPatch, ports_of_the_other: tuple[str, ...], problems: int
) -> None:
    monkeypatch.setattr(limits, "NAMED_PORT_LOOKUPS", 2)
    slices = [
        endpoint_slice("10.244.0.1", ports=[named(8080, "http"), named(8080, "https")]),
        endpoint_slice("10.244.0.2", ports=[named(8080, name) for name in ports_of_the_other]),
    ]
    found = read(service(ports=TWO_PORTS), *slices)
    assert len(found.problems) == problems, found.problems
    assert all("its ports have different endpoints" in str(problem) for problem in found.problems)


def test_a_service_with_everything() -> None:
    found = only(
        service(
            type="LoadBalancer",
            clusterIP="10.96.0.20",
            clusterIPs=["10.96.0.20", "fd00::20"],
            ports=[
                {"name": "http", "port": 80, "nodePort": 30080, "targetPort": "web"},
                {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 53},
            ],
            externalIPs=["203.0.113.10"],
            loadBalancerSourceRanges=[" 192.0.2.77/24 ", "010.00.0.5", "10.0.0.0/08", "192.0.2.0/24"],
            sessionAffinity="ClientIP",
            sessionAffinityConfig={"clientIP": {"timeoutSeconds": 90}},
            internalTrafficPolicy="Local",
            externalTrafficPolicy="Local",
            healthCheckNodePort=32100,
            status={"loadBalancer": {"ingress": [{"ip": "198.51.100.5"}, {"ip": "2001:db8::5"}]}},
        )
    )
    assert found == Service(
        "default/web",
        ("10.96.0.20", "fd00::20"),
        (ServicePort(80, TCP, "http", node_port=30080), ServicePort(53, UDP, "dns")),
        affinity=Affinity(90),
        external_addresses=(
            ExternalAddress("203.0.113.10", allow_from=()),
            ExternalAddress(
                "198.51.100.5", load_balancer=True, allow_from=("192.0.2.0/24", "10.0.0.5/32", "10.0.0.0/8")
            ),
            ExternalAddress("2001:db8::5", load_balancer=True, allow_from=()),
        ),
        internal_policy=TrafficPolicy.LOCAL,
        external_policy=TrafficPolicy.LOCAL,
        health_port=32100,
    )


LOCAL: Json = {"externalTrafficPolicy": "Local", "healthCheckNodePort": 32100}
INGRESS = {"loadBalancer": {"ingress": [{"ip": "198.51.100.5"}]}}


def test_a_type_decides_what_counts() -> None:
    ports = [{"port": 80, "nodePort": 30080}]
    ranges = ["10.0.0.0/8"]
    plain = only(service(status=INGRESS, ports=ports, loadBalancerSourceRanges=ranges, **LOCAL))
    assert (plain.ports[0].node_port, plain.external_addresses) == (None, ())
    assert (plain.external_policy, plain.health_port) == (TrafficPolicy.CLUSTER, None)
    node = only(
        service(status=INGRESS, type="NodePort", ports=ports, loadBalancerSourceRanges=ranges, **LOCAL)
    )
    assert (node.ports[0].node_port, node.external_addresses) == (30080, ())
    assert (node.external_policy, node.health_port) == (TrafficPolicy.LOCAL, None)
    external = only(service(externalIPs=["203.0.113.1"], loadBalancerSourceRanges=ranges, **LOCAL))
    assert external.external_addresses == (ExternalAddress("203.0.113.1"),)
    assert (external.external_policy, external.health_port) == (TrafficPolicy.LOCAL, None)
    cluster = only(service(type="LoadBalancer", ports=ports, healthCheckNodePort=32100))
    assert cluster.health_port is None


def test_affinity_defaults_to_three_hours() -> None:
    assert only(service(sessionAffinity="ClientIP")).affinity == Affinity(10800)
    assert only(service(sessionAffinity="None")).affinity is None


def test_ingress_that_no_packet_arrives_for_is_passed_over() -> None:
    ingress = [{"ip": "198.51.100.5", "ipMode": "Proxy"}, {"hostname": "x.example"}, {"ip": "198.51.100.6"}]
    found = only(service(type="LoadBalancer", status={"loadBalancer": {"ingress": ingress}}))
    assert found.external_addresses == (ExternalAddress("198.51.100.6", load_balancer=True),)


def test_an_external_ip_wins_over_the_same_of_a_load_balancer() -> None:
    ranges = ["10.0.0.0/8"]
    declared = service(
        type="LoadBalancer", status=INGRESS, externalIPs=["198.51.100.5"], loadBalancerSourceRanges=ranges
    )
    assert only(declared).external_addresses == (ExternalAddress("198.51.100.5", allow_from=()),)
    assert notes(declared) == ["198.51.100.5 left out: Service default/web has it already"]


def test_external_addresses_of_a_family_without_cluster_ip_are_left_out() -> None:
    declared = service(externalIPs=["2001:db8::1"], externalTrafficPolicy="Local")
    assert only(declared).external_addresses == ()
    assert only(declared).external_policy is TrafficPolicy.CLUSTER
    assert notes(declared) == ["2001:db8::1 left out: no clusterIP of Service default/web is of its family"]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"clusterIP": "None"}, "headless"),
        ({"clusterIP": "", "clusterIPs": ["None"]}, "headless"),
        ({"type": "ExternalName", "externalName": "x.example", "clusterIP": ""}, "ExternalName"),
        ({"clusterIP": ""}, "no clusterIP yet"),
        ({"clusterIP": None}, "no clusterIP yet"),
    ],
)
def test_services_without_an_address_are_left_out(spec: Json, why: str) -> None:
    (note,) = notes(service(**spec), endpoint_slice("10.244.0.1"))
    assert note.startswith("Service default/web left out: ")
    assert why in note
    assert read(service(**spec)).services == ()


def test_what_another_proxy_serves_is_left_out() -> None:
    declared = service()
    declared["metadata"]["labels"] = {"service.kubernetes.io/service-proxy-name": "cilium"}
    why = "another proxy serves it (label service.kubernetes.io/service-proxy-name)"
    assert notes(declared) == [f"Service default/web left out: {why}"]


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, UP),
        (None, UP),
        ({"ready": True}, UP),
        ({"ready": False}, DOWN),
        ({"ready": False, "serving": True}, DOWN),
        ({"ready": False, "serving": True, "terminating": True}, DRAIN),
        ({"ready": False, "terminating": True}, DRAIN),
        ({"ready": False, "serving": False, "terminating": True}, DOWN),
        # Both are true only where the service publishes what is not ready: kube-proxy then sends there.
        ({"ready": True, "serving": True, "terminating": True}, UP),
    ],
)
def test_conditions_make_the_state(conditions: Json | None, state: BackendState) -> None:
    (backend,) = backends(
        service(), endpoint_slice({"addresses": ["10.244.0.1", "10.244.0.2"], "conditions": conditions})
    )
    assert backend == Backend("10.244.0.1", state=state)


MODE, HINTS = "service.kubernetes.io/topology-mode", "service.kubernetes.io/topology-aware-hints"


@pytest.mark.parametrize(
    ("annotations", "zones"),
    [
        ({}, ()),
        ({MODE: "Auto"}, ("a", "b")),
        ({HINTS: "auto"}, ("a", "b")),
        ({MODE: "Disabled"}, ()),
        ({MODE: ""}, ()),
        ({MODE: "Auto", HINTS: "disabled"}, ()),
    ],
)
def test_zone_hints_count_when_the_service_asks(annotations: dict[str, str], zones: tuple[str, ...]) -> None:
    declared = service()
    declared["metadata"]["annotations"] = annotations
    endpoint = {**BARE, "hints": {"forZones": [{"name": zone} for zone in "ab"]}}
    assert backends(declared, endpoint_slice(endpoint)) == (Backend("10.244.0.1", node="n1", zones=zones),)


BARE: Json = {"addresses": ["10.244.0.1"], "nodeName": "n1"}
ZONED: Json = {**BARE, "hints": {"forZones": [{"name": "a"}], "forNodes": [{"name": "n1"}]}}
SAME_ZONE, SAME_NODE = TrafficDistribution.PREFER_SAME_ZONE, TrafficDistribution.PREFER_SAME_NODE


@pytest.mark.parametrize(
    ("value", "distribution"),
    [("PreferClose", SAME_ZONE), ("PreferSameZone", SAME_ZONE), ("PreferSameNode", SAME_NODE)],
)
def test_hints_count_when_the_service_has_a_traffic_distribution(
    value: str, distribution: TrafficDistribution
) -> None:
    declared = service(trafficDistribution=value), endpoint_slice(ZONED)
    found = only(*declared)
    assert found.traffic_distribution is distribution
    assert found.backends == (Backend("10.244.0.1", node="n1", zones=("a",)),)
    assert notes(*declared) == []


def test_the_annotation_wins_over_a_traffic_distribution() -> None:
    declared = service(trafficDistribution="PreferSameNode")
    declared["metadata"]["annotations"] = {MODE: "Auto"}
    found = only(declared, endpoint_slice(ZONED))
    assert (found.traffic_distribution, found.backends[0].zones) == (SAME_ZONE, ("a",))
    declared["metadata"]["annotations"] = {MODE: "Disabled"}
    found = only(declared, endpoint_slice(ZONED))
    assert (found.traffic_distribution, found.backends[0].zones) == (SAME_NODE, ("a",))


OTHER_NODES: Json = {**ZONED, "hints": {"forNodes": [{"name": "n2"}]}}
RACKS: Json = {**ZONED, "hints": {"forRacks": [{"name": "r1"}]}}


@pytest.mark.parametrize(
    ("value", "endpoint", "note"),
    [
        ("PreferRack", BARE, "web: trafficDistribution PreferRack has no effect; known: PreferClose,"),
        ("PreferClose", BARE, "web: trafficDistribution PreferClose has no effect: no endpoint has hints"),
        (None, ZONED, "web: hints of its endpoints left out: it has neither trafficDistribution nor "),
        (
            "PreferSameNode",
            OTHER_NODES,
            ": forNodes with nodes other than nodeName left out of the hints ",
        ),
        ("PreferSameNode", RACKS, ": forRacks left out of the hints of its endpoints"),
    ],
)
def test_what_is_not_honoured_of_a_preference_is_told(value: str | None, endpoint: Json, note: str) -> None:
    (told,) = notes(service(trafficDistribution=value), endpoint_slice(endpoint))
    kind = "EndpointSlice" if note.startswith(":") else "Service"
    assert told.startswith(f"{kind} default/{note}")


def test_hints_that_a_service_forbids_need_no_note() -> None:
    declared = service()
    declared["metadata"]["annotations"] = {MODE: "Disabled"}
    assert notes(declared, endpoint_slice(ZONED)) == []


def test_the_usual_number_is_the_target_and_others_are_the_backends() -> None:
    ports = [{"port": 9090}, {"port": 0}, {"name": "x", "port": 1}]
    other = endpoint_slice("10.244.0.3", "10.244.0.1", ports=ports)
    found = only(service(), endpoint_slice("10.244.0.1", "10.244.0.2", ports=[{"port": 8080}]), other)
    assert found.ports == (ServicePort(80, TCP, "", 8080),)
    assert found.backends == (
        Backend("10.244.0.1"),
        Backend("10.244.0.1", 9090),
        Backend("10.244.0.2"),
        Backend("10.244.0.3", 9090),
    )


def test_ports_with_servers_of_their_own() -> None:
    found = only(
        service(ports=TWO_PORTS),
        endpoint_slice("10.244.0.1", "10.244.0.2", ports=[named(80, "http"), named(8443, "https")]),
        endpoint_slice("10.244.0.3", ports=[named(80, "http"), named(9443, "https")]),
        endpoint_slice(
            "10.244.0.4", ports=[named(80, "http"), {"name": "https", "port": 8443, "protocol": "UDP"}]
        ),
    )
    assert found.ports == (ServicePort(80, TCP, "http"), ServicePort(443, TCP, "https", 8443))
    assert found.backends == (
        Backend("10.244.0.1"),
        Backend("10.244.0.2"),
        Backend("10.244.0.3", ports=(("http", 80), ("https", 9443))),
        Backend("10.244.0.4", ports=(("http", 80),)),
    )


def test_of_twins_the_readier_one_is_kept() -> None:
    late = {"addresses": ["10.244.0.1"], "conditions": {"ready": False}, "nodeName": "n1"}
    soon = {"addresses": ["10.244.0.1"], "nodeName": "n2"}
    for first, second in ((late, soon), (soon, late)):
        found = backends(service(), endpoint_slice(first), endpoint_slice(second))
        assert found == (Backend("10.244.0.1", node="n2"),)


def test_slices_of_the_services_families_count() -> None:
    found = only(
        service(clusterIPs=["fd00::20", "10.96.0.20"]),
        endpoint_slice("10.244.0.1"),
        endpoint_slice("FD01::1", family="IPv6", ports=[{"port": 8080}]),
    )
    assert found.backends == (Backend("10.244.0.1"), Backend("fd01::1"))
    assert backends(service(), endpoint_slice("fd01::1", family="IPv6")) == ()


def test_slices_without_a_use_are_told() -> None:
    fqdn = endpoint_slice("x.example", name="f", family="FQDN")
    bare = endpoint_slice("10.244.0.1", name="b")
    bare["metadata"]["labels"] = {}
    headless = endpoint_slice("10.244.0.1", name="h")
    headless["metadata"]["labels"]["service.kubernetes.io/headless"] = ""
    declared = [service(), fqdn, bare, headless, endpoint_slice("10.244.0.1", of="gone", name="g")]
    assert notes(*declared) == [
        "EndpointSlice default/f left out: its endpoints are names, which are not resolved",
        "EndpointSlice default/b left out: it has no label kubernetes.io/service-name",
        "EndpointSlice default/g left out: there is no Service default/gone in this file",
    ]
    assert backends(*declared) == ()


def test_addresses_of_an_endpoint_beyond_its_first_are_named() -> None:
    several: list[Json] = [
        {"addresses": ["10.244.0.1", "10.244.0.2", "10.244.0.3"]},
        {"addresses": ["10.244.0.4"]},
        {"addresses": ["10.244.0.5", *(f"10.244.1.{n}" for n in range(1, 10))]},
    ]
    declared = [service(), endpoint_slice(*several, name="s")]
    what = "an endpoint serves at its first address alone"
    named = "10.244.0.2, 10.244.0.3, 10.244.1.1, 10.244.1.2, 10.244.1.3 and 6 more"
    assert notes(*declared) == [f"EndpointSlice default/s: {named} left out: {what}"]
    assert backends(*declared) == tuple(Backend(f"10.244.0.{n}") for n in (1, 4, 5))
    odd = endpoint_slice({"addresses": ["10.244.0.1", "\x1b[31m", ""]}, name="s")
    (note,) = notes(service(), odd)
    assert "\x1b" not in note


def endpoints(**subset: Any) -> Json:
    return {"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "web"}, "subsets": [subset]}


ADDRESSES = {
    "addresses": [{"ip": "10.244.0.1", "nodeName": "n1", "targetRef": {"kind": "Pod"}}],
    "notReadyAddresses": [{"ip": "10.244.0.2"}],
    "ports": [{"port": 8080}],
}


def test_endpoints_serve_where_there_is_no_slice() -> None:
    found = only(service(), endpoints(**ADDRESSES))
    assert found.ports == (ServicePort(80, TCP, "", 8080),)
    assert found.backends == (Backend("10.244.0.1", node="n1"), Backend("10.244.0.2", state=DOWN))
    published = backends(service(publishNotReadyAddresses=True), endpoints(**ADDRESSES))
    assert [backend.state for backend in published] == [UP, UP]
    assert backends(service(), endpoints(**ADDRESSES), endpoint_slice()) == ()
