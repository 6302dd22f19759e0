"""What the table is made of, without a kernel: elements grow with services, chains with kinds of services."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.dataplane.nftables.declared import numbered
from vipd.control.selection import SelectionPolicy, select_backends
from vipd.dataplane.nftables import compile, plan
from vipd.dataplane.nftables.balance_chain import BalanceChain
from vipd.dataplane.nftables.base_chains import ENTRANCES, HOOKS, fixed_chains
from vipd.dataplane.nftables.chains import TableNumbers
from vipd.dataplane.nftables.compile import ElementKey, Fragment, compile_forwarding, first_chain
from vipd.dataplane.nftables.layout import LOCAL_OFFSET, name_address, number_address
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.plan import (
    FoundChain,
    Installed,
    Plan,
    make_plan,
    merge_dependent_steps,
    must_replace,
)
from vipd.dataplane.nftables.table import DesiredTable, Step
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
    TrafficPolicy,
)

OPTIONS = TableOptions(Family.IPV4)
POLICY = SelectionPolicy(dict.fromkeys(Family, Masquerade.FORWARDED))
ENDPOINTS = (Endpoint("10.244.0.1", 8080), Endpoint("10.244.0.2", 8080))
PLAIN = Forwarding(
    ForwardingKey("web", "", Protocol.TCP, Family.IPV4), ("10.96.0.1",), 80, ENDPOINTS, Masquerade.FORWARDED
)
FRONTEND = ElementKey("frontends", "10.96.0.1 . tcp . 80")


def table(*services: Service) -> DesiredTable:
    made = DesiredTable(OPTIONS)
    for service in services:
        for forwarding in select_backends(service, POLICY):
            made.update(forwarding.key, forwarding)
    return made


def compiled(forwarding: Forwarding) -> Fragment:
    return compile_forwarding(forwarding, OPTIONS, TableNumbers(Family.IPV4))


def handler(**changes: object) -> str:
    """The chain that a frontend's number stands for."""
    found = compiled(replace(PLAIN, **changes))  # type: ignore[arg-type]
    return found.chain_numbers[found.elements[FRONTEND]]


def test_chains_do_not_grow_with_services() -> None:
    few = table(*(numbered(n, "10.244.0.1", "10.244.0.2") for n in range(2)))
    many = table(*(numbered(n, "10.244.0.1", "10.244.0.2") for n in range(300)))
    assert many.structure() == few.structure()
    assert len(dict(many.elements())) == 300 * 5, "a frontend, two slots, and the VIP in two sets"


def test_a_change_of_one_service_is_a_few_elements_in_one_transaction() -> None:
    made = table(*(numbered(n, "10.244.0.1", "10.244.0.2") for n in range(50)))
    made.mark_clean()
    installed = make_plan(OPTIONS, made.structure(), Installed(), *made.dirty()).installed_after
    assert installed is not None
    (forwarding,) = select_backends(numbered(7, "10.244.0.1", "10.244.0.3"), POLICY)
    made.update(forwarding.key, forwarding)
    plan = make_plan(OPTIONS, made.structure(), installed, *made.dirty())
    assert str(plan) == (
        "-endpoints 10.96.0.7 . tcp . 80 . 0.0.0.1 : 10.244.0.2 . 8080\n"
        "+endpoints 10.96.0.7 . tcp . 80 . 0.0.0.1 : 10.244.0.3 . 8080\n"
    )
    assert len(list(plan.transactions())) == 1


def test_a_change_compiles_the_old_form_and_the_new_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = table(*(numbered(n, "10.244.0.1", "10.244.0.2") for n in range(3))), list[Forwarding]()

    def noted(forwarding: Forwarding, options: TableOptions, numbers: TableNumbers) -> Fragment:
        asked.append(forwarding)
        return compile_forwarding(forwarding, options, numbers)

    made.mark_clean()
    monkeypatch.setattr("vipd.dataplane.nftables.table.compile_forwarding", noted)
    first, second, last = (
        select_backends(numbered(1, "10.244.0.1", f"10.244.0.{n}"), POLICY)[0] for n in (3, 4, 2)
    )
    made.update(first.key, first)
    assert len(asked) == 2
    made.update(second.key, second)
    (step,), _ = made.dirty()
    assert "10.244.0.2 . 8080" in step.deleted.values(), "what the kernel holds, not what was never written"
    assert "10.244.0.4 . 8080" in step.added.values()
    assert len(asked) == 3
    made.update(last.key, last)
    assert made.dirty()[0] == [], "as the kernel holds it"


def changed(made: DesiredTable, service: Service) -> Plan:
    """What has to be written when one service is declared anew, all others being written."""
    installed = make_plan(OPTIONS, made.structure(), Installed(), *made.dirty()).installed_after
    made.mark_clean()
    assert installed is not None
    for forwarding in select_backends(service, POLICY):
        made.update(forwarding.key, forwarding)
    return make_plan(OPTIONS, made.structure(), installed, *made.dirty())


def test_chains_are_made_before_anything_leads_there_and_what_old_ones_look_for_goes_after() -> None:
    web = numbered(7, "10.244.0.1", "10.244.0.2")
    plan = changed(table(web), replace(web, affinity=Affinity(60)))
    made, led = (transaction.text() for transaction in plan.transactions())
    assert "add chain ip vipd random-2-pinned-60" in made
    assert "10.96.0.7" not in made
    assert "add chain" not in led
    assert {line.split()[4] for line in led.splitlines() if line.startswith("delete element")} == {
        "frontends"
    }
    (gone,) = plan.deferred_deletes()
    assert gone.startswith("delete element ip vipd endpoints { ")
    assert gone.count("10.96.0.7 . tcp . 80 . ") == 2
    assert str(plan).count("-endpoints ") == 2


def test_a_vip_is_claimed_after_its_services_are_there() -> None:
    """A packet that is in the table when both appear would find the claim alone, and be refused."""
    everything = table(numbered(7, "10.244.0.1"))
    plan = make_plan(OPTIONS, everything.structure(), Installed(), *everything.dirty())
    _, served, claimed = (transaction.text() for transaction in plan.transactions())
    assert "add element ip vipd frontends" in served
    assert "claimed" not in served
    assert claimed.startswith("add element ip vipd claimed")


def test_another_number_of_backends_is_no_other_kind() -> None:
    web, other = numbered(7, "10.244.0.1", "10.244.0.2"), numbered(8, "10.244.0.1")
    plan = changed(table(web, other), replace(web, backends=web.backends[:1]))
    assert len(list(plan.transactions())) == 1
    assert list(plan.deferred_deletes()) == []


def test_a_service_that_ends_ends_in_one_transaction() -> None:
    made = table(numbered(7, "10.244.0.1"), numbered(8, "10.244.0.1"))
    installed = make_plan(OPTIONS, made.structure(), Installed(), *made.dirty()).installed_after
    made.mark_clean()
    assert installed is not None
    (forwarding,) = select_backends(numbered(7, "10.244.0.1"), POLICY)
    made.update(forwarding.key, None)
    plan = make_plan(OPTIONS, made.structure(), installed, *made.dirty())
    assert len(list(plan.transactions())) == 1
    assert list(plan.deferred_deletes()) == []


def test_what_nobody_wants_any_more_goes_after_what_leads_there() -> None:
    made, left = table(numbered(7, "10.244.0.1")), table(numbered(8, "10.244.0.1"))
    steps, _ = made.compare({**dict(made.elements()), **dict(left.elements())}, ("frontends", "endpoints"))
    (step,) = steps
    assert {slot.set_name for slot in step.deleted} == {"frontends"}
    assert {slot.set_name for slot in step.deferred_deletes} == {"endpoints"}


def test_an_element_that_goes_over_to_another_service_waits_for_nothing() -> None:
    one, another = ElementKey("endpoints", "a"), ElementKey("endpoints", "b")
    steps = [Step((), {}, {}, {one: "1", another: "2"}), Step((), {}, {one: "3"})]
    (step,) = merge_dependent_steps(steps)
    assert (step.deleted, step.added, step.deferred_deletes) == ({one: "1"}, {one: "3"}, {another: "2"})


def test_a_table_that_is_replaced_refuses_nobody_first() -> None:
    made = table(numbered(7, "10.244.0.1"))
    older = Installed("vipd format 0", chains={"unused": FoundChain(None, ("refuses",))})
    first, whole = (
        each.text() for each in make_plan(OPTIONS, made.structure(), older, *made.dirty()).transactions()
    )
    assert first == "flush chain ip vipd unused\nadd rule ip vipd unused drop\n"
    assert whole.startswith("delete table ip vipd\n")
    assert "10.96.0.7" in whole


def test_without_services_the_table_is_deleted() -> None:
    made = table(numbered(7, "10.244.0.1"))
    installed = make_plan(OPTIONS, made.structure(), Installed(), *made.dirty()).installed_after
    assert installed is not None
    empty = table()
    plan = make_plan(OPTIONS, empty.structure(), installed, *empty.dirty())
    assert [each.text() for each in plan.transactions()] == ["delete table ip vipd\n"]
    assert not make_plan(OPTIONS, empty.structure(), Installed(), *empty.dirty())


def test_entrances_are_the_base_chains_that_lead_to_services() -> None:
    chains = fixed_chains(OPTIONS)
    assert {name for name in HOOKS if chains[name] == ("goto dispatch",)} == set(ENTRANCES)


def test_replies_of_flows_of_other_hosts_are_known_by_address_and_port() -> None:
    chains = fixed_chains(OPTIONS, takeover=True)
    (marked, _), (replied, _) = (
        chains[name][i : i + 2] for name, i in (("prerouting", 0), ("postrouting", 1))
    )
    assert "ip saddr . tcp sport @reply_sources ct mark set" in marked
    assert "snat ip to ip saddr . tcp sport map @reply_frontends" in replied


def test_a_service_without_a_frontend_leads_nowhere() -> None:
    unreachable = replace(PLAIN, addresses=())
    assert first_chain(unreachable, OPTIONS) == ""
    assert first_chain(replace(unreachable, node_port=30080), OPTIONS) == "gate-always-node-random-2"


def test_one_set_of_another_declaration_is_reason_enough_to_replace_a_table() -> None:
    made = table(numbered(7, "10.244.0.1"))
    installed = make_plan(OPTIONS, made.structure(), Installed(), *made.dirty()).installed_after
    assert installed is not None
    assert not must_replace(OPTIONS, made.structure(), installed)
    other = replace(installed, sets={**installed.sets, "claimed": "another"})
    assert must_replace(OPTIONS, made.structure(), other)


def test_only_the_dispatch_asks_maps_of_verdicts() -> None:
    """A kernel may look behind every element of such a map: one behind another would be a square."""
    limited = (ExternalAddress("203.0.113.1", allow_from=("192.0.2.0/24",)),)
    service = replace(numbered(1, "10.244.0.1"), external_addresses=limited, affinity=Affinity(60))
    chains = table(service).structure().chains
    asking = {name for name, rules in chains.items() if any(" vmap @" in rule for rule in rules)}
    assert asking == {"dispatch", "handover", "limited-24"}
    assert not [rule for rule in chains["dispatch"] if "vmap @frontends" in rule]


def test_a_new_service_of_a_known_kind_changes_no_verdict() -> None:
    """Else the kernel would check all of them again."""
    made = table(numbered(1, "10.244.0.1"))
    installed = make_plan(OPTIONS, made.structure(), Installed(), *made.dirty()).installed_after
    made.mark_clean()
    assert installed is not None
    for forwarding in select_backends(numbered(2, "10.244.0.1"), POLICY):
        made.update(forwarding.key, forwarding)
    plan = make_plan(OPTIONS, made.structure(), installed, *made.dirty())
    assert {line.partition(" ")[0] for line in str(plan).splitlines()} == {
        "+frontends",
        "+endpoints",
        "+claimed",
        "+pinged",
    }
    for forwarding in select_backends(numbered(3, "10.244.0.1", "10.244.0.2"), POLICY):
        made.update(forwarding.key, forwarding)
    assert "element ip vipd handlers" in str(make_plan(OPTIONS, made.structure(), installed, *made.dirty()))


def test_no_two_chains_have_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what follows from their names were the same."""
    monkeypatch.setattr(
        "vipd.dataplane.nftables.chains.name_address",
        lambda _, name: "10.0.0.2" if name.endswith(" 1") else "10.0.0.1",
    )
    handlers = TableNumbers(Family.IPV4)
    assert [handlers.chain(chain) for chain in ("random-1", "random-2", "random-1")] == [
        "10.0.0.1",
        "10.0.0.2",
        "10.0.0.1",
    ]
    handlers.keep_chains({"random-2"})
    assert handlers.chain("random-3") == "10.0.0.1"
    assert handlers.chain("random-2") == "10.0.0.2"


COLLIDING = ("tenant-83584", "tenant-141896")
"""Their service ports with tcp have the same 32 bits of blake2b: found by trying 140,000 names."""


def service_numbers(made: DesiredTable) -> dict[str, str]:
    """The number of the service port at each frontend."""
    return {slot.key: value for slot, value in made.elements() if slot.set_name == "services"}


@pytest.mark.parametrize("more", [{"affinity": Affinity(60)}, {"limits": FlowLimits(connections=3)}])
def test_services_whose_names_have_the_same_hash_share_no_affinity_and_no_limits(
    more: dict[str, Any],
) -> None:
    services = [
        replace(numbered(n, "10.244.0.1", "10.244.0.2"), name=name, **more)
        for n, name in enumerate(COLLIDING)
    ]
    assert name_address(Family.IPV4, f"{COLLIDING[0]}/tcp") == name_address(
        Family.IPV4, f"{COLLIDING[1]}/tcp"
    )
    made = table(*services)
    (_, first), (frontend, second) = service_numbers(made).items()
    assert first != second
    made.mark_clean()
    # Neither a change of one nor the end of the other moves a number: the kernel counts by it.
    for service in services:
        (changed,) = select_backends(replace(service, backends=service.backends[:1]), POLICY)
        made.update(changed.key, changed)
    steps, _ = made.dirty()
    assert not any(slot.set_name == "services" for step in steps for slot in (*step.deleted, *step.added))
    made.mark_clean()
    made.update(select_backends(services[0], POLICY)[0].key, None)
    made.mark_clean()
    assert service_numbers(made) == {frontend: second}
    (again,) = select_backends(replace(services[0], name="other"), POLICY)
    made.update(again.key, again)
    assert len({*service_numbers(made).values()}) == 2


@pytest.mark.parametrize(("family", "slot"), [(Family.IPV4, "0.0.0.1"), (Family.IPV6, "100::1")])
def test_a_chain_has_no_number_that_a_slot_may_have(
    monkeypatch: pytest.MonkeyPatch, family: Family, slot: str
) -> None:
    """Rules tell by the number whether one was found."""
    names = {"random-1": slot, "random-1 1": "77.0.0.1"}
    monkeypatch.setattr("vipd.dataplane.nftables.chains.name_address", lambda _, name: names[name])
    assert TableNumbers(family).chain("random-1") == "77.0.0.1"


def test_a_pin_that_leads_nowhere_is_forgotten_before_the_second_try() -> None:
    """And the last try asks no pins: when a change comes between two lookups, the first may have made one to
    a backend that is gone."""
    rules = BalanceChain(2, Balance.RANDOM, timeout=60).rules(TableOptions(Family.IPV4))
    looking = [number for number, rule in enumerate(rules) if rule.endswith("map @pins")]
    forgetting = [number for number, rule in enumerate(rules) if "delete @pins" in rule]
    assert len(looking) == len(forgetting) == 2
    assert looking[0] < forgetting[0] < looking[1] < forgetting[1]
    assert sum("dnat" in rule for rule in rules[forgetting[1] :]) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "forwarded-random-2"),
        ({"masquerade": Masquerade.HAIRPIN}, "random-2"),
        ({"masquerade": Masquerade.ALWAYS}, "always-random-2"),
        ({"affinity_timeout": 60}, "forwarded-random-2-pinned-60"),
        ({"endpoints": (), "has_endpoints": False}, "refuse"),
        ({"endpoints": (), "has_endpoints": False, "refusal": RejectAction.DROP}, "silence"),
        ({"endpoints": (), "has_endpoints": True, "internal_policy": TrafficPolicy.LOCAL}, "silence"),
        (
            {"local_endpoints": ENDPOINTS[:1], "internal_policy": TrafficPolicy.LOCAL},
            "forwarded-local-random-1",
        ),
        ({"balance": Balance.SOURCE_HASH}, "forwarded-source-hash-4093"),
    ],
)
def test_where_a_frontend_leads(changes: dict[str, object], expected: str) -> None:
    assert handler(**changes) == expected


def test_each_round_robin_service_counts_its_own_turns() -> None:
    one = handler(balance=Balance.ROUND_ROBIN)
    other = handler(balance=Balance.ROUND_ROBIN, key=PLAIN.key._replace(service="other"))
    assert one != other


def test_a_pin_survives_the_others_that_come_and_go() -> None:
    def numbers(*addresses: str) -> dict[str, str]:
        endpoints = tuple(Endpoint(address, 80) for address in addresses)
        found = compiled(replace(PLAIN, endpoints=endpoints, affinity_timeout=60)).elements
        return {v: s.key.rpartition(" . ")[2] for s, v in found.items() if s.set_name == "numbered"}

    all_three = numbers("10.244.0.1", "10.244.0.2", "10.244.0.3")
    assert len(set(all_three.values())) == 3
    assert numbers("10.244.0.1", "10.244.0.3").items() <= all_three.items()


def test_a_service_port_has_one_number_by_whatever_way_and_whatever_comes_and_goes() -> None:
    def numbers(**changes: object) -> set[str]:
        forwarding = replace(PLAIN, affinity_timeout=60, **changes)  # type: ignore[arg-type]
        elements = compiled(forwarding).elements
        ways = {s: v for s, v in elements.items() if s.set_name in ("services", "node_services")}
        assert len(ways) == len([s for s in elements if s.set_name in ("frontends", "node_ports")])
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
        external_policy=TrafficPolicy.LOCAL,
        external_addresses=external,
    )
    elements = compiled(forwarding).elements
    numbered = {s.key: v for s, v in elements.items() if s.set_name == "numbered"}
    local = {s.key: v for s, v in elements.items() if s.set_name == "local_numbered"}
    assert set(local.values()) == {"10.244.0.2 . 8080"}
    assert local.items() <= numbered.items()


def test_the_local_policy_has_slots_of_its_own() -> None:
    external = (ExternalAddress("203.0.113.1", allow_from=()),)
    forwarding = replace(
        PLAIN, local_endpoints=ENDPOINTS[1:], external_policy=TrafficPolicy.LOCAL, external_addresses=external
    )
    elements = compiled(forwarding).elements
    local = number_address(Family.IPV4, LOCAL_OFFSET)
    assert elements[ElementKey("endpoints", f"203.0.113.1 . tcp . 80 . {local}")] == "10.244.0.2 . 8080"
    assert elements[ElementKey("endpoints", "203.0.113.1 . tcp . 80 . 0.0.0.1")] == "10.244.0.2 . 8080"


def test_limits_with_every_address_are_none() -> None:
    external = (ExternalAddress("203.0.113.1", allow_from=("0.0.0.0/0", "192.0.2.0/24")),)
    fragment = compiled(replace(PLAIN, external_addresses=external))
    assert not fragment.source_sets
    number = fragment.elements[ElementKey("frontends", "203.0.113.1 . tcp . 80")]
    assert fragment.chain_numbers[number] == "always-random-2"


def test_nothing_declared_nothing_there() -> None:
    made = table(numbered(1, "10.244.0.1"))
    for forwarding in list(made.forwardings()):
        made.update(forwarding.key, None)
    assert made.structure().chains == {}
    assert not dict(made.elements())


@pytest.mark.parametrize("mode", list(Masquerade))
@pytest.mark.parametrize("place", ["external address", "node port"])
def test_under_the_local_policy_a_backend_may_meet_itself_unmarked(mode: Masquerade, place: str) -> None:
    """What comes from outside keeps its source then, whatever the mode: the set `hairpin` must have them."""
    entry: dict[str, object] = (
        {"node_port": 30080}
        if place == "node port"
        else {"external_addresses": (ExternalAddress("203.0.113.1"),)}
    )
    local = replace(
        PLAIN,
        masquerade=mode,
        external_policy=TrafficPolicy.LOCAL,
        local_endpoints=ENDPOINTS[:1],
        **entry,  # type: ignore[arg-type]
    )
    assert compiled(local).hairpins >= {ENDPOINTS[0].address}


def test_a_number_that_is_taken_gives_way_to_the_next_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "NUMBER_BITS", 2)
    four = [Endpoint(f"10.244.0.{number}", 8080) for number in range(4)]
    assert sorted(compile._numbers(four).values()) == [0, 1, 2, 3]


def test_a_large_plan_is_several_transactions_the_last_with_what_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "BATCH_ELEMENTS", 2)
    steps = tuple(
        Step((), {}, {ElementKey("frontends", f"10.96.0.{n} . tcp . 80"): "drop"}) for n in range(3)
    )
    late = Step((), {FRONTEND: "drop"}, {})
    made = Plan("ip vipd", steps=steps, late=late)
    first, last = made.transactions()
    assert (first.steps, last.steps) == ([*steps[:2]], [steps[2]])
    assert ("delete element" in first.text(), "delete element" in last.text()) == (False, True)
    (everything,) = replace(made, replaces=True).transactions()
    assert everything.steps == [*steps]
    assert [bool(each) for each in (made, Plan("ip vipd"), Plan("ip vipd", late=late))] == [True, False, True]


def test_a_chain_at_another_hook_makes_the_table_anew() -> None:
    made = table(numbered(1, "10.244.0.1"))
    installed = make_plan(OPTIONS, made.structure(), Installed(), *made.dirty()).installed_after
    assert installed
    assert any(found.hook for found in installed.chains.values())
    assert not make_plan(OPTIONS, made.structure(), installed, (), Step((), {}, {})).replaces
    for name, found in installed.chains.items():
        moved = replace(found, hook=(3, -99) if found.hook is None else (found.hook[0], found.hook[1] + 1))
        there = replace(installed, chains={**installed.chains, name: moved})
        assert make_plan(OPTIONS, made.structure(), there, (), Step((), {}, {})).replaces, name


@pytest.mark.parametrize(("policy", "kept"), [(TrafficPolicy.CLUSTER, True), (TrafficPolicy.LOCAL, False)])
def test_a_draining_backend_keeps_its_clients_under_the_cluster_policy_alone(
    policy: TrafficPolicy, kept: bool
) -> None:
    forwarding = replace(
        PLAIN,
        affinity_timeout=60,
        internal_policy=policy,
        local_endpoints=ENDPOINTS,
        affinity_only=(Endpoint("10.244.0.9", 8080),),
    )
    elements = compile_forwarding(forwarding, OPTIONS, TableNumbers(Family.IPV4)).elements
    assert ("10.244.0.9 . 8080" in elements.values()) is kept


def taken_over(name: str, *outside: str, to: str = "10.244.0.1") -> Service:
    """A service that continues flows of other hosts."""
    return replace(
        numbered(len(name), to),
        name=name,
        addresses=(),
        external_addresses=tuple(ExternalAddress(address, True, ()) for address in outside),
        balance=Balance.SOURCE_HASH,
        masquerade=Masquerade.HAIRPIN,
        flow_takeover=True,
    )


def replies(desired: DesiredTable) -> dict[str, dict[str, str]]:
    """The elements of the two holders for replies."""
    found: dict[str, dict[str, str]] = {"reply_sources": {}, "reply_frontends": {}}
    for slot, value in desired.shared_elements():
        if slot.set_name in found:
            found[slot.set_name][slot.key] = value
    return found


def test_a_reply_has_the_only_service_of_its_endpoint() -> None:
    one, both = taken_over("one", "192.0.2.1"), taken_over("both", "192.0.2.2")
    desired, port = table(one), "10.244.0.1 . 8080"
    assert replies(desired)["reply_frontends"] == {port: "192.0.2.1 . 80"}
    (forwarding,) = select_backends(both, POLICY)
    desired.update(forwarding.key, forwarding)
    assert replies(desired) == {"reply_sources": {port: ""}, "reply_frontends": {}}, "which is unknown"
    desired.update(forwarding.key, None)
    assert replies(desired)["reply_frontends"] == {port: "192.0.2.1 . 80"}
    two = table(taken_over("two", "192.0.2.1", "192.0.2.3"))
    assert replies(two) == {"reply_sources": {port: ""}, "reply_frontends": {}}


def test_rules_for_replies_exist_only_with_a_service_that_needs_them() -> None:
    plain = table(numbered(1, "10.244.0.1"))
    before = plain.structure()
    assert not any("reply" in rule for rules in before.chains.values() for rule in rules)
    (forwarding,) = select_backends(taken_over("one", "192.0.2.1"), POLICY)
    plain.update(forwarding.key, forwarding)
    during = plain.structure()
    assert {"reply_sources", "reply_frontends"} == during.sets.keys() - before.sets.keys()
    assert [r for r in during.chains["prerouting"] if "@reply_sources ct mark set" in r]
    plain.update(forwarding.key, None)
    assert plain.structure().chains["postrouting"] == before.chains["postrouting"]
    assert plain.structure().sets == before.sets
