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
    ExternalAddress,
    Family,
    Masquerade,
    Protocol,
    Service,
    ServicePort,
    TrafficPolicy,
)

ENDPOINTS = (Endpoint("10.244.0.1", 8080), Endpoint("10.244.0.2", 8080))
PLAIN = Forwarding(
    ForwardingKey("web", "", Protocol.TCP, Family.IPV4), ("10.96.0.1",), 80, ENDPOINTS, Masquerade.FORWARDED
)
FRONTEND = "10.96.0.1 . tcp . 80"
LIMITED = (ExternalAddress("203.0.113.1", allow_from=("192.0.2.0/24",)),)


class Table:
    """A table as text, taken apart."""

    def __init__(self, *services: Service | Forwarding, family: Family = Family.IPV4) -> None:
        text = compiled(services, "nftables", family)
        self.chains: dict[str, list[str]] = {}
        self.sets: dict[str, dict[str, str]] = {}
        for kind, name, body in re.findall(r"(?ms)^\t(chain|map|set) (\S+) \{\n(.*?)^\t\}", text):
            lines = [re.sub(' comment "#.*"$', "", line.strip()) for line in body.splitlines()]
            if kind == "chain":
                self.chains[name] = lines
                continue
            elements = [line.rstrip(",").partition(" : ") for line in lines if line.endswith(",")]
            self.sets[name] = {key: value for key, _, value in elements}

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


def test_under_the_local_policy_a_backend_may_meet_itself_unmarked() -> None:
    """What comes from outside keeps its source then, whatever the mode: the set `hairpin` must have them."""
    local = {"external_policy": TrafficPolicy.LOCAL, "local_endpoints": ENDPOINTS[:1]}
    for mode in Masquerade:
        for entry in ({"node_port": 30080}, {"external_addresses": LIMITED}):
            sets = of(masquerade=mode, **local, **entry).sets
            assert "10.244.0.1 . 10.244.0.1" in sets["hairpin"], (mode, entry)


def test_a_draining_backend_keeps_its_clients_under_the_cluster_policy_alone() -> None:
    draining = {"local_endpoints": ENDPOINTS, "affinity_only": (Endpoint("10.244.0.9", 8080),)}
    for policy, kept in ((TrafficPolicy.CLUSTER, True), (TrafficPolicy.LOCAL, False)):
        sets = of(affinity_timeout=60, internal_policy=policy, **draining).sets
        assert any("10.244.0.9 . 8080" in elements.values() for elements in sets.values()) is kept


def test_the_name_of_a_chain_changes_with_its_limits() -> None:
    chains = [
        name
        for n in range(1, 40)
        for name in Table(replace(numbered(1, "10.244.0.1"), limits=FlowLimits(connections=n))).chains
        if name.startswith("limits-")
    ]
    assert len({*chains}) == 39
    assert {len(name) for name in chains} == {len("limits-1234567812345678-random-1")}


ALIKE = ("10.244.34.41", "10.244.58.51")
UNNAMED = (ServicePort(80, Protocol.TCP, "", 8080),)
COLLIDING = ("tenant-83584", "tenant-141896")
"""Their service ports with tcp have the same 32 bits of blake2b: found by trying 140,000 names."""


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
