"""Which backends of a service get new flows: by what is declared, what checks find, what operators order."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.examples import examples
from tests.lab.inside import Vipd, running
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import Balance, Family, Masquerade, RejectAction, TrafficPolicy

CHECKED = {"type": "tcp", "interval": "1s", "rise": 1, "fall": 1}
LOCAL, OUTSIDE = {"internal": "local"}, {"external": "local"}
Json = dict[str, Any]


class Case(NamedTuple):
    """A service with a backend on this host and another elsewhere."""

    here: Json
    there: Json
    service: Json
    states: Json
    """What checks find (a text) or operators order (a dict) of `here` and `there`."""
    cluster: str
    """Which of them get flows; `local`: under a local policy; `resting`: keep those they have; `down`: lose
    them."""
    local: str
    resting: str
    down: str


SICK, DRAINED, OUT = "dead", {"admin": "draining"}, {"admin": "disabled"}
DRAIN, DOWN, BACKUP = {"state": "drain"}, {"state": "down"}, {"backup": True}
NODE_PORT = {"ports": [{"port": 80, "node_port": 30080}]}
KEEP = {"fallback": "keep"}
BOTH = "here there"
CASES: dict[str, Case] = {
    "both": Case({}, {}, {}, {}, BOTH, "", "", ""),
    "a way in": Case({}, {}, NODE_PORT, {}, BOTH, "", "", ""),
    "local inside": Case({}, {}, {"traffic_policy": LOCAL}, {}, "", "here", "there", ""),
    "local inside, with a way in": Case(
        {}, {}, {"traffic_policy": LOCAL, **NODE_PORT}, {}, BOTH, "here", "", ""
    ),
    "local outside, without a way in": Case({}, {}, {"traffic_policy": OUTSIDE}, {}, BOTH, "", "", ""),
    "local outside": Case({}, {}, {"traffic_policy": OUTSIDE, **NODE_PORT}, {}, BOTH, "here", "", ""),
    "local and down": Case(DOWN, {}, {"traffic_policy": LOCAL}, {}, "", "", "there", "here"),
    "draining": Case(DRAIN, {}, {}, {}, "there", "", "here", ""),
    "local and draining": Case(DRAIN, {}, {"traffic_policy": LOCAL}, {}, "", "here", "there", ""),
    "both draining": Case(DRAIN, DRAIN, {}, {}, BOTH, "", "", ""),
    "draining beside a backup": Case(DRAIN, BACKUP, {}, {}, "there", "", "here", ""),
    "draining beside a dead backup": Case(DRAIN, BACKUP, {}, {"there": SICK}, "here", "", "", "there"),
    "draining, all dead": Case(DRAIN, {}, {}, {"here": SICK, "there": SICK}, "", "", "", BOTH),
    "a backup": Case(BACKUP, {}, {}, {}, "there", "", "here", ""),
    "a backup beside a dead one": Case(BACKUP, {}, {}, {"there": SICK}, "here", "", "", "there"),
    "a backup beside a drained one": Case(BACKUP, {}, {}, {"there": DRAINED}, "here", "", "there", ""),
    "a dead one": Case({}, {}, {}, {"here": SICK}, "there", "", "", "here"),
    "a drained one": Case({}, {}, {}, {"here": DRAINED}, "there", "", "here", ""),
    "a disabled one": Case({}, {}, {}, {"here": OUT}, "there", "", "", "here"),
    "weight 0": Case({"weight": 0}, {}, {}, {}, "there", "", "here", ""),
    "weight 0 beside a backup": Case({"weight": 0}, BACKUP, {}, {}, "there", "", "here", ""),
    "ordered to weight 0": Case({}, {}, {}, {"here": {"weight": 0}}, "there", "", "here", ""),
    "ordered from weight 0": Case({"weight": 0}, {}, {}, {"here": {"weight": 1}}, BOTH, "", "", ""),
    "all dead": Case({}, {}, {}, {"here": SICK, "there": SICK}, "", "", "", BOTH),
    "all dead and kept": Case({}, {}, KEEP, {"here": SICK, "there": SICK}, BOTH, "", "", ""),
    "a dead one, kept": Case({}, {}, KEEP, {"here": SICK}, "there", "", "", "here"),
    "kept beside a drained one": Case(
        {}, {}, KEEP, {"here": SICK, "there": DRAINED}, "here", "", "there", ""
    ),
    "kept beside a disabled one": Case({}, {}, KEEP, {"here": SICK, "there": OUT}, "here", "", "", "there"),
    "a pinned one": Case({}, {}, {}, {"here": {**DRAINED, "pins": 600}}, "there", "", "here", ""),
}


def only(vipd: Vipd, name: str, family: Family = Family.IPV4) -> Forwarding:
    """The one forwarding of a service."""
    (found,) = [f for key, f in vipd.kernel.rules.items() if key.service == name and key.family is family]
    return found


def addresses(endpoints: tuple[Endpoint, ...]) -> list[str]:
    return [endpoint.address for endpoint in endpoints]


def test_states_and_policies_choose_backends() -> None:
    def words(endpoints: tuple[Endpoint, ...]) -> str:
        return " ".join("here" if address.endswith(".1") else "there" for address in addresses(endpoints))

    async def story(vipd: Vipd) -> dict[str, tuple[str, ...]]:
        services = []
        for number, case in enumerate(CASES.values()):
            place = {"here": f"10.{number}.0.1", "there": f"10.{number}.0.2"}
            backends = [
                {"address": place["here"], "node": "host-a", **case.here},
                {"address": place["there"], "node": "host-b", **case.there},
            ]
            service = {
                "ports": [80],
                **case.service,
                "name": f"s{number}",
                "address": f"10.96.0.{number + 1}",
            }
            if "node_port" in str(service):
                service["ports"] = [{"port": 80, "node_port": 30000 + number}]
            services.append({**service, "backends": backends, "check": CHECKED})
            vipd.backends.update({place[w]: SICK for w, state in case.states.items() if state == SICK})
        assert (await vipd.ask("POST", "/v1/apply", {"services": services})).status == 200
        orders = [
            {"service": f"s{number}", "backend": f"10.{number}.0.{1 + (which == 'there')}", **state}
            for number, case in enumerate(CASES.values())
            for which, state in case.states.items()
            if state != SICK
        ]
        for order in orders:
            assert (await vipd.ask("POST", "/v1/overrides", order)).status == 200
        await asyncio.sleep(5)
        found = {}
        for number, (name, case) in enumerate(CASES.items()):
            f = only(vipd, f"s{number}")
            groups = (f.endpoints, f.local_endpoints, f.without_new_flows, f.unavailable)
            found[name] = tuple(map(words, groups))
            # A local policy drops, and does not refuse, while another host could serve.
            elsewhere = found[name][2] and case.service.get("traffic_policy") == LOCAL
            assert f.has_endpoints == bool(found[name][0] or found[name][1] or elsewhere), name
            assert not f.full_under, name
        return found

    assert running(story, simulated=True) == {
        name: (case.cluster, case.local, case.resting, case.down) for name, case in CASES.items()
    }


def declared(vipd: Vipd, *services: str) -> None:
    """Services web, web1 ... of 80/tcp, unless they say otherwise."""
    blocks = []
    for number, service in enumerate(services):
        keys = "" if "ports:" in service else "ports: [80/tcp], "
        keys += "" if "address:" in service.partition("backends")[0] else f"address: 10.96.0.{number + 1}, "
        blocks.append(f"  - {{name: web{number or ''}, {keys}{service}}}\n")
    vipd.declare(*blocks)


async def forwardings(vipd: Vipd) -> list[Forwarding]:
    return list(vipd.kernel.rules.values())


def written(*services: str, **settings: Any) -> list[Forwarding]:
    """What is written of services, in the order of their names."""
    found = running(forwardings, lambda vipd: declared(vipd, *services), **settings)
    return sorted(found, key=lambda f: (f.key.service, f.key.family, f.port))


def test_backends_are_sorted_and_a_port_of_their_own_wins() -> None:
    first, second, third, http, admin = written(
        "backends: [10.0.0.10, 10.0.0.9]",
        "backends: [10.0.0.9, 10.0.0.10]",
        "ports: [{port: 80, target: 8080}], backends: [10.0.0.1, '10.0.0.2:9000']",
        "ports: [{port: 80, name: http}, {port: 81, name: admin}], "
        "backends: [10.0.0.1, {address: 10.0.0.2, ports: {http: 8080}}]",
    )
    assert [str(e) for e in first.endpoints] == ["10.0.0.10:80", "10.0.0.9:80"]
    assert first.endpoints == second.endpoints
    assert [str(e) for e in third.endpoints] == ["10.0.0.1:8080", "10.0.0.2:9000"]
    assert [str(e) for e in http.endpoints] == ["10.0.0.1:80", "10.0.0.2:8080"]
    assert [str(e) for e in admin.endpoints] == ["10.0.0.1:81"], "the other does not serve that port"


def test_the_fallback_serves_while_no_backend_of_its_family_can() -> None:
    spare = "fallback: {backends: [{address: 10.9.9.9, weight: 2}, {address: 10.9.9.8, weight: 0}]}"
    serving, resting, v4, v6 = written(
        f"backends: [10.0.0.1], {spare}",
        f"backends: [{{address: 10.0.0.1, weight: 0}}], {spare}",
        "address: [10.96.0.10, 'fd00::10'], backends: [10.0.0.1], "
        "fallback: {backends: [10.9.9.9, 'fd01::9']}",
    )
    assert addresses(serving.endpoints) == ["10.0.0.1"]
    assert resting.endpoints == (Endpoint("10.9.9.9", 80, 2),)
    assert "10.0.0.1" in addresses(resting.without_new_flows)
    assert (addresses(v4.endpoints), addresses(v6.endpoints)) == (["10.0.0.1"], ["fd01::9"])


def test_what_a_service_says_of_its_flows_is_carried_over() -> None:
    several, other, plain = "ports: [80, 81]", "affinity: 90s, fallback: drop, masquerade: hairpin", ""
    (first, second, v4, v6, hairpin, usual, least) = written(
        f"{several}, backends: [10.0.0.1]",
        "address: [10.96.0.10, 'fd00::10'], backends: [10.0.0.1, 'fd01::1'], respond_to_ping: false, "
        "allow_from: [fd01::/16, 10.10.0.0/16], external_addresses: [192.0.2.1, 'fd00::9'], "
        "traffic_policy: {external: local}, health_port: 30099, on_remove: reset",
        f"{other}, backends: [10.0.0.1]",
        f"{plain}backends: [10.0.0.1]",
        "balance: least-connections, backends: [10.0.0.1]",
    )
    assert [f.key.port_name for f in (first, second)] == ["80", "81"]
    assert (v4.external_addresses[0].allow_from, v6.external_addresses[0].allow_from) == (
        ("10.10.0.0/16",),
        ("fd01::/16",),
    )
    assert (v4.allow_host, v6.allow_host) == (True, False), "of this host's addresses one is enough"
    assert (v4.external_policy, v4.health_port, v4.answers_ping) == (TrafficPolicy.LOCAL, 30099, False)
    assert (hairpin.affinity_timeout, hairpin.refusal) == (90, RejectAction.DROP)
    assert (hairpin.masquerade, usual.masquerade) == (Masquerade.HAIRPIN, Masquerade.FORWARDED)
    assert (usual.affinity_timeout, usual.external_policy) == (None, TrafficPolicy.CLUSTER)
    assert least.balance is Balance.RANDOM, "shares that follow live flows are random ones for the kernel"
    (hashed,) = written("balance: source-hash, backends: [10.0.0.1]", dataplane="nftables")
    assert hashed.balance is Balance.SOURCE_HASH


def test_pins_are_kept_while_draining_and_only_with_affinity() -> None:
    async def story(vipd: Vipd) -> None:
        for service in ("web", "web1"):
            order = {"service": service, "backend": "10.0.0.1", "admin": "draining", "pins": 60}
            await vipd.ask("POST", "/v1/overrides", order)
        assert only(vipd, "web").affinity_only == (Endpoint("10.0.0.1", 80),)
        assert only(vipd, "web1").affinity_only == ()
        await asyncio.sleep(61)
        assert only(vipd, "web").affinity_only == ()

    backends = "backends: [10.0.0.1, 10.0.0.2]"
    running(story, lambda vipd: declared(vipd, f"affinity: 10m, {backends}", backends), simulated=True)


@pytest.mark.parametrize(
    ("backend", "settings", "local"),
    [
        ("address: 10.10.0.1", {"node_name": ""}, True),
        ("address: 10.0.0.2", {"node_name": ""}, False),
        ("address: 10.10.0.1, node: host-b", {}, False),
        ("address: 10.0.0.2, node: host-a", {}, True),
        ("address: 10.10.0.1, node: host-b", {"node_name": ""}, True),
        ("address: 10.10.0.1", {"compat": "kube-proxy"}, False),
    ],
)
def test_a_backend_is_on_this_host_by_its_node_or_its_address(
    backend: str, settings: Json, local: bool
) -> None:
    (found,) = written(f"traffic_policy: {{internal: local}}, backends: [{{{backend}}}]", **settings)
    assert bool(found.local_endpoints) is local


def test_a_node_port_alone_is_a_way_in_from_outside() -> None:
    node_port = "ports: [{port: 80, node_port: 30080}], traffic_policy: {external: local}"
    (found,) = written(f"{node_port}, backends: [10.10.0.1, 10.0.0.2]", node_name="")
    assert found.external_policy is TrafficPolicy.LOCAL
    assert (addresses(found.local_endpoints), len(found.endpoints)) == (["10.10.0.1"], 2)


ZONED = "backends: [{address: 10.0.0.1, zone: east}, {address: 10.0.0.3, zone: west}%s]"
NEAR = (
    "traffic_distribution: prefer-same-node, backends: [{address: 10.0.0.1, zone: east, node: a}, "
    "{address: 10.0.0.2, zone: east, node: b}, {address: 10.0.0.3, zone: west, node: c}]"
)
ALL = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
PLACES: tuple[tuple[str, Json, list[str]], ...] = (
    (ZONED % "", {"zone": "east"}, ["10.0.0.1"]),
    (ZONED % "", {"zone": "west"}, ["10.0.0.3"]),
    (ZONED % "", {"zone": "north"}, ["10.0.0.1", "10.0.0.3"]),
    (ZONED % "", {}, ["10.0.0.1", "10.0.0.3"]),
    (ZONED % ", 10.0.0.2", {"zone": "east"}, ALL),
    (ZONED % ", {address: 10.0.0.2, weight: 0}", {"zone": "east"}, ["10.0.0.1"]),
    (NEAR, {"node_name": "a", "zone": "east"}, ["10.0.0.1"]),
    (NEAR, {"node_name": "a", "zone": "west"}, ["10.0.0.1"]),
    (NEAR, {"node_name": "c"}, ["10.0.0.3"]),
    (NEAR, {"node_name": "d", "zone": "east"}, ["10.0.0.1", "10.0.0.2"]),
    (NEAR, {"node_name": "d", "zone": "north"}, ALL),
    (NEAR.replace("node: a}", "node: a, state: down}"), {"node_name": "a"}, ["10.0.0.2", "10.0.0.3"]),
)
"""Backends, where this host is, and who gets its flows: a zone counts only if every backend that is ready has
one, else one that knows of none would get nothing."""


def test_near_backends_are_preferred() -> None:
    found = [addresses(written(service, **settings)[0].endpoints) for service, settings, _ in PLACES]
    assert found == [expected for *_, expected in PLACES]


STATES = st.fixed_dictionaries(
    {},
    optional={
        "state": st.sampled_from(["up", "drain", "down"]),
        "weight": st.integers(0, 3),
        "backup": st.booleans(),
        "node": st.sampled_from(["host-a", "host-b"]),
    },
)
SERVICES = st.tuples(
    st.lists(STATES, max_size=4),
    st.sampled_from([{}, {"traffic_policy": LOCAL}, KEEP, {"fallback": {"backends": ["10.9.9.9"]}}]),
)


@given(st.lists(SERVICES, min_size=20, max_size=20))
@settings(max_examples=examples(30))
def test_every_backend_is_in_one_place_and_none_serves_against_what_is_declared(
    services: list[tuple[list[Json], Json]],
) -> None:
    specs = [
        {
            "name": f"s{n}",
            "address": f"10.96.0.{n + 1}",
            "ports": [80],
            **more,
            "backends": [{"address": f"10.{n}.0.{i}", **state} for i, state in enumerate(states, 1)],
        }
        for n, (states, more) in enumerate(services)
    ]

    async def story(vipd: Vipd) -> None:
        assert (await vipd.ask("POST", "/v1/apply", {"services": specs})).status == 200
        for number, (states, _) in enumerate(services):
            f = only(vipd, f"s{number}")
            groups = (f.endpoints, f.local_endpoints, f.without_new_flows, f.unavailable)
            places = sorted(a for group in groups for a in addresses(group) if a != "10.9.9.9")
            assert places == [f"10.{number}.0.{i}" for i in range(1, len(states) + 1)]
            down = {f"10.{number}.0.{i}" for i, s in enumerate(states, 1) if s.get("state") == "down"}
            assert down.isdisjoint(addresses(f.reachable()))
            assert all(endpoint.weight > 0 for endpoint in f.reachable())
            if f.endpoints:
                assert sum(f.shares().values()) == pytest.approx(1)

    running(story)
