"""What the table is made of: elements grow with services, chains with kinds of services; and what a change
writes, in which order."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dataplane.namespace import Namespace
from tests.dataplane.nftables.declared import numbered
from tests.dataplane.nftables.listed import tables
from tests.dataplane.watched_programs import WatchedPrograms
from tests.lab.inside import Synced, compiled, synced
from vipd.model.flow_limits import FlowLimits
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import (
    Affinity,
    Balance,
    ExternalAddress,
    Family,
    Masquerade,
    Protocol,
    RejectAction,
    Service,
    ServicePort,
    TrafficPolicy,
)

ENDPOINTS = (Endpoint("10.244.0.1", 8080), Endpoint("10.244.0.2", 8080))
PLAIN = Forwarding(
    ForwardingKey("web", "", Protocol.TCP, Family.IPV4), ("10.96.0.1",), 80, ENDPOINTS, Masquerade.FORWARDED
)
FRONTEND = "10.96.0.1 . tcp . 80"
OUTSIDE = (ExternalAddress("203.0.113.1", allow_from=()),)
LIMITED = (ExternalAddress("203.0.113.1", allow_from=("192.0.2.0/24",)),)


class Table:
    """A table as text, taken apart."""

    def __init__(self, *services: Service | Forwarding, family: Family = Family.IPV4) -> None:
        text = compiled(services, "nftables", family)
        self.chains: dict[str, list[str]] = {}
        self.sets: dict[str, dict[str, str]] = {}
        self.declarations: dict[str, str] = {}
        for kind, name, body in re.findall(r"(?ms)^\t(chain|map|set) (\S+) \{\n(.*?)^\t\}", text):
            lines = [re.sub(' comment "#.*"$', "", line.strip()) for line in body.splitlines()]
            if kind == "chain":
                self.chains[name] = lines
                continue
            elements = [line.rstrip(",").partition(" : ") for line in lines if line.endswith(",")]
            self.sets[name] = {key: value for key, _, value in elements}
            self.declarations[name] = "; ".join(line for line in lines if not line.endswith(","))

    def chain_of(self, frontend: str = FRONTEND) -> str:
        """The chain that a frontend leads to."""
        return self.sets["handlers"][self.sets["frontends"][frontend]].rpartition(" ")[2]


def of(**changes: object) -> Table:
    """The table of the plain forwarding with these changes."""
    return Table(replace(PLAIN, **changes))  # type: ignore[arg-type]


def test_chains_do_not_grow_with_services() -> None:
    few, many = (Table(*(numbered(n, "10.244.0.1", "10.244.0.2") for n in range(k))) for k in (2, 300))
    assert many.chains == few.chains
    assert many.sets.keys() == few.sets.keys()
    elements = sum(len(elements) for name, elements in many.sets.items() if name != "handlers")
    assert elements == 300 * 5, "a frontend, two slots, and the VIP in two sets"
    assert compiled([], "nftables") == ""


def test_only_the_dispatch_asks_maps_of_verdicts() -> None:
    """A kernel may look behind every element of such a map: one behind another would be a square."""
    service = replace(numbered(1, "10.244.0.1"), external_addresses=LIMITED, affinity=Affinity(60))
    chains = Table(service).chains
    asking = {name for name, rules in chains.items() if any(" vmap @" in rule for rule in rules)}
    assert asking == {"dispatch", "handover", "limited-24"}
    assert not [rule for rule in chains["dispatch"] if "vmap @frontends" in rule]


WHERE: dict[str, dict[str, object]] = {
    "forwarded-random-2": {},
    "random-2": {"masquerade": Masquerade.HAIRPIN},
    "always-random-2": {"masquerade": Masquerade.ALWAYS},
    "forwarded-random-2-pinned-60": {"affinity_timeout": 60},
    "refuse": {"endpoints": (), "has_endpoints": False},
    "silence": {"endpoints": (), "has_endpoints": True, "internal_policy": TrafficPolicy.LOCAL},
    "silence ": {"endpoints": (), "has_endpoints": False, "refusal": RejectAction.DROP},
    "forwarded-local-random-1": {
        "local_endpoints": ENDPOINTS[:1],
        "internal_policy": TrafficPolicy.LOCAL,
    },
    "forwarded-source-hash-4093": {"balance": Balance.SOURCE_HASH},
}


def test_where_a_frontend_leads() -> None:
    assert {chain: of(**changes).chain_of() for chain, changes in WHERE.items()} == {
        chain: chain.strip() for chain in WHERE
    }
    turns = {"balance": Balance.ROUND_ROBIN}
    assert of(**turns).chain_of() != of(**turns, key=PLAIN.key._replace(service="other")).chain_of()
    everybody = (ExternalAddress("203.0.113.1", allow_from=("0.0.0.0/0", "192.0.2.0/24")),)
    assert of(external_addresses=everybody).chain_of("203.0.113.1 . tcp . 80") == "always-random-2"


NUMBERED_ALIKE = (
    # Services whose chains have the same 32 bits, found by trying timeouts.
    (("10.244.0.1",), 73672, ("10.244.0.1",), 82535),
    (("10.244.0.1",), 57715, ("10.244.0.1", "10.244.0.2"), 17900),
)


def test_no_two_chains_have_the_same_number_nor_that_of_a_slot() -> None:
    for one, first, other, second in NUMBERED_ALIKE:
        services = [
            replace(numbered(n, *nodes), affinity=Affinity(timeout), masquerade=Masquerade.ALWAYS)
            for n, (nodes, timeout) in enumerate(((one, first), (other, second)), 1)
        ]
        alone, both = Table(services[1]), Table(*services)
        assert Table(services[0]).sets["handlers"].keys() == alone.sets["handlers"].keys()
        chains = [both.chain_of(f"10.96.0.{n} . tcp . 80") for n in (1, 2)]
        assert [int(chain.rpartition("-")[2]) for chain in chains] == [first, second]
    # Its 32 bits are 0.111.137.118, as of slots: rules tell by the number whether one was there.
    reserved = of(masquerade=Masquerade.ALWAYS, endpoints=ENDPOINTS[:1], affinity_timeout=275)
    assert reserved.chain_of() == "always-random-1-pinned-275"
    assert not reserved.sets["frontends"][FRONTEND].startswith("0.")


def test_endpoints_whose_names_have_the_same_hash_have_numbers_of_their_own() -> None:
    """The two have the same 23 bits."""
    alike = tuple(Endpoint(address, 8080) for address in ALIKE)
    numbers = [
        of(endpoints=part, affinity_timeout=60).sets["picks"] for part in (alike, alike[:1], alike[1:])
    ]
    assert len({*numbers[0].values()}) == 2
    assert set(numbers[1].values()) == set(numbers[2].values())


def test_a_pin_that_leads_nowhere_is_forgotten_before_the_second_try() -> None:
    """And the last try asks no pins: when a change comes between two lookups, the first may have made one to
    a backend that is gone."""
    rules = of(affinity_timeout=60).chains["random-2-pinned-60"]
    looking = [number for number, rule in enumerate(rules) if rule.endswith("map @pins")]
    forgetting = [number for number, rule in enumerate(rules) if "delete @pins" in rule]
    assert len(looking) == len(forgetting) == 2
    assert looking[0] < forgetting[0] < looking[1] < forgetting[1]
    assert sum("dnat" in rule for rule in rules[forgetting[1] :]) == 1


def test_a_pin_survives_the_others_that_come_and_go() -> None:
    def numbers(*addresses: str) -> dict[str, str]:
        endpoints = tuple(Endpoint(address, 80) for address in addresses)
        elements = of(endpoints=endpoints, affinity_timeout=60).sets["numbered"]
        return {value: key.rpartition(" . ")[2] for key, value in elements.items()}

    all_three = numbers("10.244.0.1", "10.244.0.2", "10.244.0.3")
    assert len(set(all_three.values())) == 3
    assert numbers("10.244.0.1", "10.244.0.3").items() <= all_three.items()


def test_a_service_port_has_one_number_by_whatever_way_and_whatever_comes_and_goes() -> None:
    def numbers(**changes: object) -> set[str]:
        sets = of(affinity_timeout=60, **changes).sets
        ways = {**sets["services"], **sets["node_services"]}
        assert len(ways) == len(sets["frontends"]) + len(sets["node_ports"])
        return set(ways.values())

    (number,) = numbers()
    assert numbers(external_addresses=LIMITED, node_port=30080, endpoints=ENDPOINTS[1:]) == {number}
    assert numbers(addresses=("10.96.0.9",), port=8080) == {number}
    others = [PLAIN.key._replace(service="other"), PLAIN.key._replace(protocol=Protocol.UDP)]
    assert all(number not in numbers(key=key) for key in others)


def test_the_local_policy_has_slots_of_its_own_and_endpoints_one_number() -> None:
    local = {
        "local_endpoints": ENDPOINTS[1:],
        "external_policy": TrafficPolicy.LOCAL,
        "external_addresses": OUTSIDE,
    }
    endpoints = of(**local).sets["endpoints"]
    assert endpoints["203.0.113.1 . tcp . 80 . 0.1.0.0"] == "10.244.0.2 . 8080"
    assert endpoints["203.0.113.1 . tcp . 80 . 0.0.0.1"] == "10.244.0.2 . 8080"
    pinned = of(**local, affinity_timeout=60).sets
    assert set(pinned["local_numbered"].values()) == {"10.244.0.2 . 8080"}
    assert pinned["local_numbered"].items() <= pinned["numbered"].items()


def test_under_the_local_policy_a_backend_may_meet_itself_unmarked() -> None:
    """What comes from outside keeps its source then, whatever the mode: the set `hairpin` must have them."""
    local = {"external_policy": TrafficPolicy.LOCAL, "local_endpoints": ENDPOINTS[:1]}
    for mode in Masquerade:
        for entry in ({"node_port": 30080}, {"external_addresses": OUTSIDE}):
            sets = of(masquerade=mode, **local, **entry).sets
            assert "10.244.0.1 . 10.244.0.1" in sets["hairpin"], (mode, entry)


def test_a_draining_backend_keeps_its_clients_under_the_cluster_policy_alone() -> None:
    draining = {"local_endpoints": ENDPOINTS, "affinity_only": (Endpoint("10.244.0.9", 8080),)}
    for policy, kept in ((TrafficPolicy.CLUSTER, True), (TrafficPolicy.LOCAL, False)):
        sets = of(affinity_timeout=60, internal_policy=policy, **draining).sets
        assert any("10.244.0.9 . 8080" in elements.values() for elements in sets.values()) is kept


LIMITS = FlowLimits(
    new_per_client=3,
    client_burst=100,
    connections_per_client=2,
    new_per_second=7,
    connections=9,
    client_ipv6_prefix=56,
)


def limited(limits: FlowLimits, family: Family = Family.IPV4) -> tuple[Table, str]:
    """A table with a service of these limits, and the name of their chain."""
    node, vip = (("10.244.0.1", "10.96.0.1"), ("fd00:244::1", "fd00:96::1"))[family is Family.IPV6]
    table = Table(replace(numbered(1, node), addresses=(vip,), limits=limits), family=family)
    (name,) = (name for name in table.chains if name.startswith("limits-"))
    return table, name


def test_each_limit_is_one_rule_between_the_number_of_the_service_and_the_next_chain() -> None:
    table, name = limited(LIMITS)
    assert table.chains[name] == [
        "ip daddr set ct original ip daddr . meta l4proto . th dport map @services",
        (
            "update @new_per_client_3_100 { ip daddr . ip saddr timeout 67s"
            " limit rate over 3/second burst 100 packets } goto over-new_per_client-refuse"
        ),
        (
            "add @connections_per_client_2 { ip daddr . ip saddr ct count over 2 }"
            " goto over-connections_per_client-refuse"
        ),
        (
            "update @new_per_second_7_7 { ip daddr timeout 10s limit rate over 7/second burst 7 packets }"
            " goto over-new_per_second-refuse"
        ),
        "add @connections_9 { ip daddr ct count over 9 } goto over-connections-refuse",
        "ip daddr set ct original ip daddr goto random-1",
    ]
    declared = {name: each for name, each in table.declarations.items() if re.search(r"_\d", name)}
    clients, all_clients = "type ipv4_addr . ipv4_addr;", "type ipv4_addr;"
    assert [each.startswith(clients) for each in declared.values()] == [
        "per_client" in name for name in declared
    ]
    assert all(each.startswith((clients, all_clients)) for each in declared.values())
    assert {name for name, each in declared.items() if "flags dynamic,timeout" in each} == {
        "new_per_client_3_100",
        "new_per_second_7_7",
    }
    count = "update @refused_connections { ct original ip daddr . meta l4proto . th dport counter }"
    refusal = table.chains["over-connections-refuse"]
    assert refusal[0] == count
    assert refusal[1:] == of(endpoints=(), has_endpoints=False).chains["refuse"]


def test_an_ipv6_client_is_a_prefix_and_the_name_of_a_chain_changes_with_its_limits() -> None:
    for length, client in (
        (56, "ip6 saddr & ffff:ffff:ffff:ff00::"),
        (128, "ip6 saddr"),
        (32, "ip6 saddr & ffff:ffff::"),
    ):
        table, name = limited(replace(LIMITS, client_ipv6_prefix=length), Family.IPV6)
        _, rate, connections, *_ = table.chains[name]
        assert f"ip6 daddr . {client} timeout" in rate
        assert f"ip6 daddr . {client} ct count" in connections
    names = {limited(replace(LIMITS, connections=n))[1] for n in range(1, 40)}
    assert len(names) == 39
    assert {len(name) for name in names} == {len("limits-1234567812345678-random-1")}


ALIKE = ("10.244.34.41", "10.244.58.51")
UNNAMED = (ServicePort(80, Protocol.TCP, "", 8080),)
COLLIDING = ("tenant-83584", "tenant-141896")
"""Their service ports with tcp have the same 32 bits of blake2b: found by trying 140,000 names."""


@pytest.fixture
def programs() -> WatchedPrograms:
    return WatchedPrograms()


@pytest.fixture
def vipd(namespace: Namespace, programs: WatchedPrograms, tmp_path: Path) -> Synced:
    """A dataplane of which programs write everything."""
    return synced("nftables", namespace.name, tmp_path, through=programs, netlink=False)


def written(vipd: Synced, programs: WatchedPrograms, *services: Service) -> list[str]:
    """The transactions that a change takes."""
    programs.written.clear()
    vipd.become(*services)
    return programs.written.copy()


@pytest.mark.root
def test_a_change_of_one_service_is_a_few_elements_in_one_transaction(
    vipd: Synced, programs: WatchedPrograms
) -> None:
    many = [numbered(n, "10.244.0.1", "10.244.0.2") for n in range(50)]
    many.append(numbered(60, "10.244.0.1"))
    vipd.become(*many)
    changed = [*many[:7], numbered(7, "10.244.0.1", "10.244.0.3"), *many[8:]]
    vipd.declare([*many[:7], numbered(7, "10.244.0.1", "10.244.0.4"), *many[8:]])  # never written
    vipd.declare(changed)
    assert vipd.pending() == (
        "# ipv4\n"
        "-endpoints 10.96.0.7 . tcp . 80 . 0.0.0.1 : 10.244.0.2 . 8080\n"
        "+endpoints 10.96.0.7 . tcp . 80 . 0.0.0.1 : 10.244.0.3 . 8080\n"
    )
    assert len(written(vipd, programs, *changed)) == 1
    vipd.declare(many)
    vipd.declare(changed)
    assert vipd.pending() == "", "as the kernel holds it"
    assert len(written(vipd, programs, *changed[40:])) == 1, "and so are services that end"
    fewer = [replace(service, backends=service.backends[:1]) for service in changed[40:44]] + changed[44:]
    assert len(written(vipd, programs, *fewer)) == 1, "another number of backends is no other kind, if known"
    assert written(vipd, programs)[-1] == "delete table ip vipd\n"
    assert vipd.pending() == ""


@pytest.mark.root
def test_chains_are_made_before_anything_leads_there_and_what_old_ones_look_for_goes_after(
    vipd: Synced, programs: WatchedPrograms
) -> None:
    web = numbered(7, "10.244.0.1", "10.244.0.2")
    texts = written(vipd, programs, web)
    claims = [number for number, text in enumerate(texts) if "element ip vipd claimed" in text]
    serves = [number for number, text in enumerate(texts) if "element ip vipd frontends" in text]
    # A packet that is in the table when both appear would find the claim alone, and be refused.
    assert max(serves) < min(claims)
    made, led, gone, *_ = written(vipd, programs, replace(web, affinity=Affinity(60)))
    assert "add chain ip vipd random-2-pinned-60" in made
    assert "10.96.0.7" not in made
    assert "add chain" not in led
    deleted = [line for line in led.splitlines() if line.startswith("delete element")]
    assert {line.split()[4] for line in deleted} == {"frontends"}
    assert gone.startswith("delete element ip vipd endpoints { ")
    assert gone.count("10.96.0.7 . tcp . 80 . ") == 2


@pytest.mark.root
def test_what_nobody_wants_any_more_goes_after_what_leads_there(
    vipd: Synced, programs: WatchedPrograms
) -> None:
    both = [numbered(n, "10.244.0.1") for n in (7, 8)]
    vipd.become(*both)
    vipd.declare(both[:1])
    vipd.restart()  # which knows of the other only that it is in the kernel
    texts = written(vipd, programs, *both[:1])
    leads, looked_up = (
        next(number for number, text in enumerate(texts) if f"delete element ip vipd {name} " in text)
        for name in ("frontends", "endpoints")
    )
    assert leads < looked_up


@pytest.mark.root
def test_an_element_that_goes_over_to_another_service_waits_for_nothing(
    vipd: Synced, programs: WatchedPrograms, namespace: Namespace
) -> None:
    one, other = numbered(1, "10.244.0.1", "10.244.0.2"), numbered(2, "10.244.0.3", "10.244.0.4")
    vipd.become(one, other)
    moved = replace(one, affinity=Affinity(60), addresses=("10.96.0.9",))
    taking = replace(other, addresses=(*other.addresses, *one.addresses))
    texts = written(vipd, programs, moved, taking)
    assert vipd.drift() == ""
    assert not vipd.refused()
    assert len([text for text in texts if "10.96.0.1 . tcp . 80 . 0.0.0.0" in text]) == 1
    assert "10.96.0.1 . tcp . 80 . 0.0.0.0 : 10.244.0.3 . 8080" in tables(namespace)


@pytest.mark.root
def test_a_new_service_of_a_known_kind_changes_no_verdict(vipd: Synced) -> None:
    """Else the kernel would check all of them again."""
    vipd.become(numbered(1, "10.244.0.1"))
    vipd.declare([numbered(1, "10.244.0.1"), numbered(2, "10.244.0.1")])
    lines = vipd.pending().splitlines()
    assert {line.partition(" ")[0] for line in lines} == {
        "#",
        "+frontends",
        "+endpoints",
        "+claimed",
        "+pinged",
    }
    vipd.declare([numbered(1, "10.244.0.1"), numbered(3, "10.244.0.1", "10.244.0.2")])
    assert "element ip vipd handlers" in vipd.pending()


@pytest.mark.root
@pytest.mark.parametrize("more", [{"affinity": Affinity(60)}, {"limits": FlowLimits(connections=3)}])
def test_services_whose_names_have_the_same_hash_share_no_affinity_and_no_limits(
    more: dict[str, object], vipd: Synced
) -> None:
    services = [
        replace(numbered(n, "10.244.0.1", "10.244.0.2"), name=name, ports=UNNAMED, **more)  # type: ignore[arg-type]
        for n, name in enumerate(COLLIDING, 1)
    ]
    first, second = Table(*services).sets["services"].values()
    assert first != second
    assert {*Table(services[0]).sets["services"].values()} == {*Table(services[1]).sets["services"].values()}
    vipd.become(*services)
    # Neither a change of one nor the end of the other moves a number: the kernel counts by it.
    vipd.declare([replace(service, backends=service.backends[:1]) for service in services])
    assert not re.search("(?m)^[-+]services ", vipd.pending())
    vipd.declare(services[1:])
    assert not re.search(r"(?m)^\+services ", vipd.pending())
    vipd.step()
    vipd.declare([*services[1:], replace(services[0], name="another")])
    vipd.step()
    assert len({*Table(services[1], replace(services[0], name="another")).sets["services"].values()}) == 2


@pytest.mark.root
def test_what_is_lost_goes_with_the_last_of_several_transactions(
    namespace: Namespace, programs: WatchedPrograms, tmp_path: Path
) -> None:
    vipd = synced("nftables", namespace.name, tmp_path, through=programs, netlink=False, batch=2)
    vipd.become(numbered(1, "10.244.0.1"), numbered(2, "10.244.0.1"))
    texts = written(vipd, programs, *(numbered(n, "10.244.0.1") for n in range(2, 6)))
    of_claims = [number for number, text in enumerate(texts) if "delete element ip vipd claimed" in text]
    assert len(texts) > 1
    assert of_claims == [len(texts) - 1]
    assert vipd.drift() == ""
