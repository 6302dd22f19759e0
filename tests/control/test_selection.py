from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis.strategies import booleans

from tests.declaration.strategies import PATIENT, services
from vipd.control import selection
from vipd.control.selection import HostIdentity, SelectionPolicy, select_backends
from vipd.host.settings.settings import Settings
from vipd.model.backend_status import AdminState, BackendStatus
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import (
    Affinity,
    Backend,
    BackendState,
    Balance,
    ExternalAddress,
    Family,
    Masquerade,
    Protocol,
    RejectAction,
    Service,
    ServicePort,
    TrafficDistribution,
    TrafficPolicy,
    family_of,
)

POLICY = SelectionPolicy({Family.IPV4: Masquerade.FORWARDED, Family.IPV6: Masquerade.OFF_CLUSTER})
DNS = Service(
    "dns", ("10.96.0.10",), (ServicePort(53, Protocol.UDP),), (Backend("10.0.0.10"), Backend("10.0.0.9"))
)


def only(service: Service) -> Forwarding:
    """The one forwarding of a service."""
    (forwarding,) = select_backends(service, POLICY)
    return forwarding


def test_endpoints_are_sorted_by_their_text() -> None:
    for service in (DNS, replace(DNS, backends=DNS.backends[::-1])):
        assert list(map(str, only(service).endpoints)) == ["10.0.0.10:53", "10.0.0.9:53"]


def test_a_backends_own_port_wins_over_the_target_and_that_over_the_port() -> None:
    ports = (ServicePort(80, Protocol.TCP, target=8080),)
    service = replace(DNS, ports=ports, backends=(Backend("10.0.0.1"), Backend("10.0.0.2", 9000)))
    assert {(e.address, e.port) for e in only(service).endpoints} == {("10.0.0.1", 8080), ("10.0.0.2", 9000)}
    assert only(DNS).endpoints[0].port == 53


@PATIENT
@given(services(), booleans(), booleans())
def test_the_shorter_way_chooses_the_same(service: Service, zoned: bool, plain: bool) -> None:
    if plain:  # like most services: without what excludes it
        service = replace(
            service,
            backends=tuple(
                replace(each, state=BackendState.UP, weight=each.weight or 1, backup=False)
                for each in service.backends
            ),
            fallback=(),
            health_port=None,
            internal_policy=TrafficPolicy.CLUSTER,
            external_policy=TrafficPolicy.CLUSTER,
        )
    policy = replace(POLICY, host=HostIdentity(frozenset({"10.0.0.1"}), zone="a" if zoned else ""))
    found = select_backends(service, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_all_serve", lambda *_: False)
        assert select_backends(service, policy) == found


def test_weight_zero_rests() -> None:
    service = replace(DNS, backends=(Backend("10.0.0.1", weight=0), Backend("10.0.0.2", weight=3)))
    forwarding = only(service)
    assert forwarding.endpoints == (Endpoint("10.0.0.2", 53, 3),)
    assert [e.address for e in forwarding.without_new_flows] == ["10.0.0.1"]


def test_the_fallback_serves_only_while_nothing_else_can() -> None:
    service = replace(DNS, fallback=(Backend("10.9.9.9", weight=2), Backend("10.9.9.8", weight=0)))
    assert {e.address for e in only(service).endpoints} == {"10.0.0.9", "10.0.0.10"}
    drained = replace(service, backends=(Backend("10.0.0.1", weight=0),))
    assert only(drained).endpoints == (Endpoint("10.9.9.9", 53, 2),)
    assert "10.0.0.1" in {e.address for e in only(drained).without_new_flows}


def test_the_fallback_of_one_family_serves_although_the_other_family_has_backends() -> None:
    service = replace(
        DNS,
        addresses=("10.96.0.10", "fd00::10"),
        backends=(Backend("10.0.0.1"),),
        fallback=(Backend("10.9.9.9"), Backend("fd01::9")),
    )
    v4, v6 = select_backends(service, POLICY)
    assert [e.address for e in v4.endpoints] == ["10.0.0.1"]
    assert [e.address for e in v6.endpoints] == ["fd01::9"]


def test_what_a_service_leaves_open_comes_from_the_settings_by_family() -> None:
    both = replace(DNS, addresses=("fd00::10", "10.96.0.10"))
    assert [f.masquerade for f in select_backends(both, POLICY)] == [
        Masquerade.FORWARDED,
        Masquerade.OFF_CLUSTER,
    ]
    assert {f.masquerade for f in select_backends(replace(both, masquerade=Masquerade.HAIRPIN), POLICY)} == {
        Masquerade.HAIRPIN
    }


def test_affinity_and_refusal_are_carried_over() -> None:
    forwarding = only(replace(DNS, affinity=Affinity(90), refusal=RejectAction.DROP))
    assert forwarding.affinity_timeout == 90
    assert forwarding.refusal is RejectAction.DROP
    assert only(DNS).affinity_timeout is None


def test_several_unnamed_ports_get_keys_of_their_own() -> None:
    service = replace(DNS, ports=(ServicePort(80, Protocol.TCP), ServicePort(81, Protocol.TCP)))
    assert [f.key.port_name for f in select_backends(service, POLICY)] == ["80", "81"]


HERE, THERE = "10.0.0.1", "10.0.0.2"
ON_NODE = replace(POLICY, host=HostIdentity(frozenset({HERE}), "node-a"))
WEB = Service("web", ("10.96.0.20",), (ServicePort(80, Protocol.TCP),), (Backend(HERE), Backend(THERE)))
BOTH = f"{HERE} {THERE}"
DRAIN, DOWN = BackendState.DRAIN, BackendState.DOWN
UNHEALTHY, DRAINING = BackendStatus(healthy=False), BackendStatus(admin=AdminState.DRAINING)
NODE_PORT = (ServicePort(80, Protocol.TCP, node_port=30080),)


def web(here: Backend | None = None, there: Backend | None = None, **more: object) -> Service:
    return replace(WEB, backends=(here or Backend(HERE), there or Backend(THERE)), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("service", "statuses", "cluster", "local", "resting", "down"),
    [
        (web(), {}, BOTH, "", "", ""),
        (web(internal_policy=TrafficPolicy.LOCAL), {}, "", HERE, THERE, ""),
        (web(internal_policy=TrafficPolicy.LOCAL, ports=NODE_PORT), {}, BOTH, HERE, "", ""),
        (web(external_policy=TrafficPolicy.LOCAL), {}, BOTH, "", "", ""),
        (web(external_policy=TrafficPolicy.LOCAL, ports=NODE_PORT), {}, BOTH, HERE, "", ""),
        (web(Backend(HERE, state=DOWN), internal_policy=TrafficPolicy.LOCAL), {}, "", "", THERE, HERE),
        (web(Backend(HERE, state=DRAIN)), {}, THERE, "", HERE, ""),
        (web(Backend(HERE, state=DRAIN), internal_policy=TrafficPolicy.LOCAL), {}, "", HERE, THERE, ""),
        (web(Backend(HERE, state=DRAIN), Backend(THERE, state=DRAIN)), {}, BOTH, "", "", ""),
        (web(Backend(HERE, state=DRAIN), Backend(THERE, backup=True)), {}, THERE, "", HERE, ""),
        (web(Backend(HERE, state=DRAIN)), {THERE: UNHEALTHY, HERE: UNHEALTHY}, "", "", "", BOTH),
        (web(Backend(HERE, backup=True)), {}, THERE, "", HERE, ""),
        (web(Backend(HERE, backup=True)), {THERE: UNHEALTHY}, HERE, "", "", THERE),
        (web(Backend(HERE, backup=True)), {THERE: DRAINING}, HERE, "", THERE, ""),
        (web(), {HERE: BackendStatus(admin=AdminState.DISABLED)}, THERE, "", "", HERE),
        (web(), {HERE: BackendStatus(weight=0)}, THERE, "", HERE, ""),
        (web(Backend(HERE, weight=0)), {HERE: BackendStatus(weight=1)}, BOTH, "", "", ""),
        (web(), {HERE: UNHEALTHY, THERE: UNHEALTHY}, "", "", "", BOTH),
        (web(keeps_unhealthy=True), {HERE: UNHEALTHY, THERE: UNHEALTHY}, BOTH, "", "", ""),
        (web(keeps_unhealthy=True), {HERE: UNHEALTHY}, THERE, "", "", HERE),
        (web(keeps_unhealthy=True), {HERE: UNHEALTHY, THERE: DRAINING}, HERE, "", THERE, ""),
    ],
)
def test_states_and_policies_choose_endpoints(
    service: Service, statuses: dict[str, BackendStatus], cluster: str, local: str, resting: str, down: str
) -> None:
    (found,) = select_backends(service, ON_NODE, statuses)
    groups = (found.endpoints, found.local_endpoints, found.without_new_flows, found.unavailable)
    assert [" ".join(e.address for e in group) for group in groups] == [cluster, local, resting, down]
    # A local policy drops, and does not refuse, while another host could serve.
    assert found.has_endpoints == bool(
        cluster or local or (resting and service.internal_policy is TrafficPolicy.LOCAL)
    )


@pytest.mark.parametrize(
    ("backend", "host", "local"),
    [
        (Backend(HERE), HostIdentity(frozenset({HERE})), True),
        (Backend(THERE), HostIdentity(frozenset({HERE})), False),
        (Backend(HERE), HostIdentity(frozenset({HERE}), "node-a", node_names_only=True), False),
        (Backend(HERE, node="node-b"), HostIdentity(frozenset({HERE}), "node-a"), False),
        (Backend(THERE, node="node-a"), HostIdentity(frozenset({HERE}), "node-a"), True),
        (Backend(HERE, node="node-b"), HostIdentity(frozenset({HERE})), True),
    ],
)
def test_a_backend_is_on_this_host_by_its_node_or_its_address(
    backend: Backend, host: HostIdentity, local: bool
) -> None:
    assert host.is_local(backend) is local


def test_the_settings_say_what_selection_knows_of_the_host() -> None:
    policy = SelectionPolicy.of(Settings(node_name="node-a", zone="east"), [HERE])
    assert policy.host == HostIdentity(frozenset({HERE}), "node-a", "east")
    assert policy.masquerade.keys() == set(Family)
    assert SelectionPolicy.of(Settings(compat="kube-proxy"), []).host.node_names_only


def test_what_a_service_says_of_flows_is_carried_over() -> None:
    external = (
        ExternalAddress("192.0.2.1", allow_from=("10.0.0.0/24", "fd00::/8")),
        ExternalAddress("fd00::9"),
    )
    service = web(
        external_addresses=external,
        allow_from=("fd01::/16", "10.1.0.0/16"),
        external_policy=TrafficPolicy.LOCAL,
        health_port=30099,
        ends_flows=True,
        answers_ping=False,
        affinity=Affinity(),
    )
    v4, v6 = select_backends(service, ON_NODE, {THERE: replace(DRAINING, keeps_affinity=True)})
    assert v4.external_addresses == (ExternalAddress("192.0.2.1", allow_from=("10.0.0.0/24",)),)
    assert v6.external_addresses == (ExternalAddress("fd00::9", allow_from=("fd01::/16",)),)
    assert (v4.allow_host, v6.allow_host) == (True, False)
    assert (v4.external_policy, v4.health_port, v4.ready_local) == (TrafficPolicy.LOCAL, 30099, (HERE,))
    assert (v4.ends_flows, v4.answers_ping, v4.affinity_only) == (True, False, (Endpoint(THERE, 80),))
    without = only(replace(service, external_addresses=(), health_port=None, affinity=None))
    assert (without.external_policy, without.ready_local, without.affinity_only) == (
        TrafficPolicy.CLUSTER,
        (),
        (),
    )
    (inside,) = select_backends(replace(service, external_addresses=(), health_port=None), ON_NODE)
    assert inside.ready_local == (), "nobody asks"


def plain(service: Service) -> Service:
    """The service as seen from inside alone: no traffic from outside, no policy of place or state."""
    return Service(
        service.name,
        service.addresses or ("10.96.0.1",),
        tuple(ServicePort(p.port, p.protocol, p.name, p.target) for p in service.ports),
        tuple(Backend(b.address, b.port, b.weight) for b in service.backends),
        fallback=tuple(Backend(b.address, b.port, b.weight) for b in service.fallback),
    )


@pytest.mark.slow
@PATIENT
@given(services().map(plain))
def test_every_frontend_is_forwarded_once_and_every_backend_is_somewhere(service: Service) -> None:
    forwardings = select_backends(service, POLICY)
    assert len({f.key for f in forwardings}) == len(forwardings)
    reached = sorted((a, f.port, f.key.protocol) for f in forwardings for a in f.addresses)
    assert reached == sorted((a, p.port, p.protocol) for a in service.addresses for p in service.ports)
    for forwarding in forwardings:
        family = forwarding.key.family
        mine = [b for b in service.backends if family_of(b.address) is family]
        spare = [b for b in service.fallback if family_of(b.address) is family and b.weight]
        assert all(e.weight > 0 for e in forwarding.endpoints)
        if any(b.weight for b in mine):
            assert len(forwarding.endpoints) == sum(b.weight > 0 for b in mine)
        else:
            assert {e.address for e in forwarding.endpoints} == {b.address for b in spare}
        known = {e.address for e in (*forwarding.endpoints, *forwarding.without_new_flows)}
        assert known >= {b.address for b in mine}
        if forwarding.endpoints:
            assert abs(sum(forwarding.shares().values()) - 1) < 1e-9


ZONED = {"10.0.0.1": ("east",), "10.0.0.2": ("east", "west"), "10.0.0.3": ("west",)}


def serving(zones: dict[str, tuple[str, ...]], policy: SelectionPolicy, **changes: object) -> set[str]:
    """Who takes new flows, of backends that are for clients in these zones."""
    backends = tuple(Backend(address, zones=each) for address, each in zones.items())
    (forwarding,) = select_backends(replace(DNS, backends=backends, **changes), policy)  # type: ignore[arg-type]
    return {endpoint.address for endpoint in forwarding.endpoints}


@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("east", {"10.0.0.1", "10.0.0.2"}),
        ("west", {"10.0.0.2", "10.0.0.3"}),
        ("north", set(ZONED)),
        ("", set(ZONED)),
    ],
)
def test_a_host_of_a_zone_uses_the_backends_for_that_zone(zone: str, expected: set[str]) -> None:
    assert serving(ZONED, SelectionPolicy.of(Settings(zone=zone), ())) == expected


NODES = {"10.0.0.1": ("east", "a"), "10.0.0.2": ("east", "b"), "10.0.0.3": ("west", "c")}


@pytest.mark.parametrize(
    ("node", "zone", "expected"),
    [
        ("a", "east", {"10.0.0.1"}),
        ("a", "west", {"10.0.0.1"}),
        ("c", "", {"10.0.0.3"}),
        ("d", "east", {"10.0.0.1", "10.0.0.2"}),
        ("d", "north", set(NODES)),
        ("", "", set(NODES)),
    ],
)
def test_the_same_node_is_preferred_and_then_the_zone(node: str, zone: str, expected: set[str]) -> None:
    policy = replace(POLICY, host=HostIdentity(node_name=node, zone=zone))
    backends = tuple(Backend(address, zones=(z,), node=n) for address, (z, n) in NODES.items())
    service = replace(DNS, backends=backends, traffic_distribution=TrafficDistribution.PREFER_SAME_NODE)
    (forwarding,) = select_backends(service, policy)
    assert {endpoint.address for endpoint in forwarding.endpoints} == expected


def test_an_unhealthy_backend_of_the_same_node_is_not_preferred() -> None:
    policy = replace(POLICY, host=HostIdentity(node_name="a"))
    backends = (Backend("10.0.0.1", node="a"), Backend("10.0.0.2", node="b"))
    service = replace(DNS, backends=backends, traffic_distribution=TrafficDistribution.PREFER_SAME_NODE)
    (forwarding,) = select_backends(service, policy, {"10.0.0.1": BackendStatus(healthy=False)})
    assert [endpoint.address for endpoint in forwarding.endpoints] == ["10.0.0.2"]


@pytest.mark.parametrize("without", list(ZONED))
def test_zones_count_only_if_every_ready_backend_has_some(without: str) -> None:
    """Else one that knows of no zones would get no flows at all."""
    east = replace(POLICY, host=HostIdentity(zone="east"))
    assert serving({**ZONED, without: ()}, east) == set(ZONED)


def test_a_backend_that_takes_no_flows_need_not_have_a_zone() -> None:
    east = replace(POLICY, host=HostIdentity(zone="east"))
    backends = (Backend("10.0.0.1", zones=("east",)), Backend("10.0.0.3", zones=("west",)))
    service = replace(DNS, backends=(*backends, Backend("10.0.0.4", weight=0)))
    (forwarding,) = select_backends(service, east)
    assert [e.address for e in forwarding.endpoints] == ["10.0.0.1"]


@pytest.mark.parametrize(
    "service",
    [
        replace(DNS, backends=(Backend("10.0.0.1", weight=0),)),
        replace(DNS, backends=(Backend("10.0.0.1", weight=0), Backend("10.0.0.2", backup=True))),
    ],
)
def test_a_backend_without_weight_gets_no_new_flows(service: Service) -> None:
    forwarding = only(service)
    assert "10.0.0.1" not in {endpoint.address for endpoint in forwarding.endpoints}
    assert [endpoint.address for endpoint in forwarding.without_new_flows] == ["10.0.0.1"]


@pytest.mark.parametrize("ways", [{}, {"node_port": 30053}])
def test_a_policy_for_outside_holds_where_there_is_a_way_in(ways: dict[str, int]) -> None:
    port = ServicePort(53, Protocol.UDP, **ways)  # type: ignore[arg-type]
    backends = (Backend("10.0.0.1"), Backend("10.0.0.2"))
    host = HostIdentity(frozenset({"10.0.0.1"}))
    service = replace(DNS, ports=(port,), backends=backends, external_policy=TrafficPolicy.LOCAL)
    (forwarding,) = select_backends(service, replace(POLICY, host=host))
    local = ["10.0.0.1"] if ways else []
    assert forwarding.external_policy is (TrafficPolicy.LOCAL if ways else TrafficPolicy.CLUSTER)
    assert [endpoint.address for endpoint in forwarding.local_endpoints] == local
    clustered = replace(service, external_policy=TrafficPolicy.CLUSTER, fallback=(Backend("10.0.0.9"),))
    (forwarding,) = select_backends(clustered, replace(POLICY, host=host))
    assert forwarding.local_endpoints == (), "no policy asks for them"


@pytest.mark.parametrize("balance", Balance)
def test_shares_that_follow_live_flows_are_random_ones_for_the_kernel(balance: Balance) -> None:
    wanted = Balance.RANDOM if balance is Balance.LEAST_CONNECTIONS else balance
    assert only(replace(DNS, balance=balance)).balance is wanted


def test_one_address_of_this_host_within_the_networks_is_enough() -> None:
    external = ExternalAddress("203.0.113.1", allow_from=("192.0.2.0/24", "198.51.100.0/24"))
    service = replace(DNS, external_addresses=(external,))
    for addresses, allowed in (({"10.0.0.1", "192.0.2.7"}, True), ({"10.0.0.1", "10.0.0.2"}, False)):
        policy = replace(POLICY, host=HostIdentity(frozenset(addresses)))
        (forwarding,) = select_backends(service, policy)
        assert forwarding.allow_host is allowed


def test_only_backends_with_too_many_connections_are_full() -> None:
    full, other = BackendStatus(full=True), BackendStatus(weight=2)
    (forwarding,) = select_backends(DNS, POLICY, {"10.0.0.9": other})
    assert forwarding.full_under == frozenset()
    (forwarding,) = select_backends(DNS, POLICY, {"10.0.0.9": other, "10.0.0.10": full})
    assert forwarding.full_under == {TrafficPolicy.CLUSTER}
