"""What the table is made of, without a kernel: elements grow with services, chains with kinds of services."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.nftables.declared import numbered
from vipd.dataplane.nftables.compile import Slot, compile_forwarding
from vipd.dataplane.nftables.layout import LOCAL_OFFSET, number_address
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.plan import Installed, make_plan
from vipd.dataplane.nftables.table import WantedTable
from vipd.model import (
    Affinity,
    Balance,
    Endpoint,
    ExternalAddress,
    Family,
    Forwarding,
    ForwardingKey,
    Masquerade,
    Policy,
    Protocol,
    Refusal,
    Service,
)
from vipd.selection import SelectionPolicy, choose

OPTIONS = TableOptions(Family.IPV4)
POLICY = SelectionPolicy(dict.fromkeys(Family, Masquerade.FORWARDED))
ENDPOINTS = (Endpoint("10.244.0.1", 8080), Endpoint("10.244.0.2", 8080))
PLAIN = Forwarding(
    ForwardingKey("web", "", Protocol.TCP, Family.IPV4), ("10.96.0.1",), 80, ENDPOINTS, Masquerade.FORWARDED
)
FRONTEND = Slot("frontends", "10.96.0.1 . tcp . 80")


def table(*services: Service) -> WantedTable:
    made = WantedTable(OPTIONS)
    for service in services:
        for forwarding in choose(service, POLICY):
            made.update(forwarding.key, forwarding)
    return made


def verdict(**changes: object) -> str:
    return compile_forwarding(replace(PLAIN, **changes), OPTIONS).elements[FRONTEND]  # type: ignore[arg-type]


def test_chains_do_not_grow_with_services() -> None:
    few = table(*(numbered(n, "10.244.0.1", "10.244.0.2") for n in range(2)))
    many = table(*(numbered(n, "10.244.0.1", "10.244.0.2") for n in range(300)))
    assert many.structure() == few.structure()
    assert len(dict(many.elements())) == 300 * 5, "a frontend, two slots, and the VIP in two sets"


def test_a_change_of_one_service_is_a_few_elements_in_one_transaction() -> None:
    made = table(*(numbered(n, "10.244.0.1", "10.244.0.2") for n in range(50)))
    made.written()
    installed = make_plan(OPTIONS, made.structure(), Installed(), *made.touched()).leaves
    assert installed is not None
    (forwarding,) = choose(numbered(7, "10.244.0.1", "10.244.0.3"), POLICY)
    made.update(forwarding.key, forwarding)
    plan = make_plan(OPTIONS, made.structure(), installed, *made.touched())
    assert str(plan) == (
        "-endpoints 10.96.0.7 . tcp . 80 . 0.0.0.1 : 10.244.0.2 . 8080\n"
        "+endpoints 10.96.0.7 . tcp . 80 . 0.0.0.1 : 10.244.0.3 . 8080\n"
    )
    assert len(list(plan.transactions())) == 1


def test_only_the_dispatch_asks_maps_of_verdicts() -> None:
    """A kernel may look behind every element of such a map: one behind another would be a square."""
    limited = (ExternalAddress("203.0.113.1", allow_from=("192.0.2.0/24",)),)
    service = replace(numbered(1, "10.244.0.1"), external_addresses=limited, affinity=Affinity(60))
    chains = table(service).structure().chains
    asking = {name for name, rules in chains.items() if any(" vmap @" in rule for rule in rules)}
    assert asking == {"dispatch", "limited"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "goto forwarded-random-2"),
        ({"masquerade": Masquerade.HAIRPIN}, "goto random-2"),
        ({"masquerade": Masquerade.ALWAYS}, "goto always-random-2"),
        ({"affinity_timeout": 60}, "goto forwarded-random-2-pinned-60"),
        ({"endpoints": (), "served": False}, "goto refuse"),
        ({"endpoints": (), "served": False, "refusal": Refusal.DROP}, "goto silence"),
        ({"endpoints": (), "served": True, "internal_policy": Policy.LOCAL}, "goto silence"),
        (
            {"local_endpoints": ENDPOINTS[:1], "internal_policy": Policy.LOCAL},
            "goto forwarded-local-random-1",
        ),
        ({"balance": Balance.SOURCE_HASH}, "goto forwarded-source-hash-4093"),
    ],
)
def test_where_a_frontend_leads(changes: dict[str, object], expected: str) -> None:
    assert verdict(**changes) == expected


def test_each_round_robin_service_counts_its_own_turns() -> None:
    one = verdict(balance=Balance.ROUND_ROBIN)
    other = verdict(balance=Balance.ROUND_ROBIN, key=PLAIN.key._replace(service="other"))
    assert one != other


def test_a_pin_survives_the_others_that_come_and_go() -> None:
    def numbers(*addresses: str) -> dict[str, str]:
        endpoints = tuple(Endpoint(address, 80) for address in addresses)
        found = compile_forwarding(replace(PLAIN, endpoints=endpoints, affinity_timeout=60), OPTIONS).elements
        return {v: s.key.rpartition(" . ")[2] for s, v in found.items() if s.holder == "numbered"}

    all_three = numbers("10.244.0.1", "10.244.0.2", "10.244.0.3")
    assert len(set(all_three.values())) == 3
    assert numbers("10.244.0.1", "10.244.0.3").items() <= all_three.items()


def test_a_service_port_has_one_number_by_whatever_way_and_whatever_comes_and_goes() -> None:
    def numbers(**changes: object) -> set[str]:
        forwarding = replace(PLAIN, affinity_timeout=60, **changes)  # type: ignore[arg-type]
        elements = compile_forwarding(forwarding, OPTIONS).elements
        ways = {s: v for s, v in elements.items() if s.holder in ("services", "node_services")}
        assert len(ways) == len([s for s in elements if s.holder in ("frontends", "node_ports")])
        return set(ways.values())

    (number,) = numbers()
    external = (ExternalAddress("203.0.113.1", allow_from=("192.0.2.0/24",)),)
    assert numbers(external_addresses=external, node_port=30080, endpoints=ENDPOINTS[1:]) == {number}
    assert numbers(addresses=("10.96.0.9",), port=8080) == {number}
    others = [PLAIN.key._replace(service="other"), PLAIN.key._replace(protocol=Protocol.UDP)]
    assert all(number not in numbers(key=key) for key in others)


def test_an_endpoint_has_one_number_under_both_policies() -> None:
    external = (ExternalAddress("203.0.113.1", allow_from=()),)
    forwarding = replace(
        PLAIN,
        affinity_timeout=60,
        local_endpoints=ENDPOINTS[1:],
        external_policy=Policy.LOCAL,
        external_addresses=external,
    )
    elements = compile_forwarding(forwarding, OPTIONS).elements
    numbered = {s.key: v for s, v in elements.items() if s.holder == "numbered"}
    local = {s.key: v for s, v in elements.items() if s.holder == "local_numbered"}
    assert set(local.values()) == {"10.244.0.2 . 8080"}
    assert local.items() <= numbered.items()


def test_the_local_policy_has_slots_of_its_own() -> None:
    external = (ExternalAddress("203.0.113.1", allow_from=()),)
    forwarding = replace(
        PLAIN, local_endpoints=ENDPOINTS[1:], external_policy=Policy.LOCAL, external_addresses=external
    )
    elements = compile_forwarding(forwarding, OPTIONS).elements
    local = number_address(Family.IPV4, LOCAL_OFFSET)
    assert elements[Slot("endpoints", f"203.0.113.1 . tcp . 80 . {local}")] == "10.244.0.2 . 8080"
    assert elements[Slot("endpoints", "203.0.113.1 . tcp . 80 . 0.0.0.1")] == "10.244.0.2 . 8080"


def test_limits_with_every_address_are_none() -> None:
    external = (ExternalAddress("203.0.113.1", allow_from=("0.0.0.0/0", "192.0.2.0/24")),)
    fragment = compile_forwarding(replace(PLAIN, external_addresses=external), OPTIONS)
    assert not fragment.lengths
    assert fragment.elements[Slot("frontends", "203.0.113.1 . tcp . 80")] == "goto always-random-2"


def test_nothing_declared_nothing_there() -> None:
    made = table(numbered(1, "10.244.0.1"))
    for forwarding in list(made.forwardings()):
        made.update(forwarding.key, None)
    assert made.structure().chains == {}
    assert not dict(made.elements())
