import time
from dataclasses import replace

import pytest

from vipd.control.address_policy import AddressPolicy, admit_service, checks_to_query
from vipd.control.admission import admit, admit_unit
from vipd.declaration.problems import Declaration, Note, Problem
from vipd.declaration.unit import Unit
from vipd.model.check import Check, HttpProbe
from vipd.model.flow_limits import FlowLimits
from vipd.model.limits import PROBLEMS
from vipd.model.service import (
    Announcement,
    AnnounceMethod,
    Backend,
    ExternalAddress,
    Origin,
    Protocol,
    Service,
    ServicePort,
)

PORTS = (ServicePort(53, Protocol.UDP),)


def service(*addresses: str, line: int = 4, external: tuple[ExternalAddress, ...] = ()) -> Service:
    origin = Origin("file", "a.yaml", line)
    return Service("dns", addresses, PORTS, external_addresses=external, origin=origin)


def problems_of(found: Service, *allowed: str, host: tuple[str, ...] = ()) -> list[str]:
    return [str(problem) for problem in admit_service(found, AddressPolicy(allowed, host))]


def test_without_a_list_every_address_is_allowed() -> None:
    assert problems_of(service("10.96.0.10", "fd00::10")) == []


def test_an_address_outside_the_list_is_told_with_its_place() -> None:
    assert problems_of(service("10.97.0.10"), "10.96.0.0/16") == [
        (
            "a.yaml:4: dns: 10.97.0.10 lies outside allowed_addresses; "
            "choose another address, or widen allowed_addresses in vipd's settings"
        )
    ]


@pytest.mark.parametrize(
    ("address", "inside"),
    [
        ("10.95.255.255", False),
        ("10.96.0.0", True),
        ("10.96.255.255", True),
        ("10.97.0.0", False),
        ("10.99.0.7", True),
        ("10.99.0.8", False),
        ("0.0.0.1", False),
        ("fd00::1", True),
        ("fd00::1:0:0:0:0", False),
        ("::10.96.0.1", False),
    ],
)
def test_networks_hold_their_first_and_last_address(address: str, inside: bool) -> None:
    allowed = ("10.99.0.7/32", "10.96.64.0/24", "10.96.0.0/16", "fd00::/64")
    assert (problems_of(service(address), *allowed) == []) is inside


def test_a_list_of_one_family_allows_nothing_of_the_other() -> None:
    assert len(problems_of(service("10.96.0.1", "fd00::1"), "10.0.0.0/8")) == 1


def test_networks_side_by_side_are_one_range() -> None:
    assert (
        problems_of(service("10.96.0.255", "10.96.1.0", "10.96.1.255"), "10.96.0.0/24", "10.96.1.0/24") == []
    )


def test_addresses_for_outside_obey_too() -> None:
    external = (ExternalAddress("203.0.113.1"), ExternalAddress("203.0.113.2", load_balancer=True))
    assert len(problems_of(service("10.96.0.1", external=external), "10.96.0.0/16")) == 2


def test_no_service_takes_an_address_of_this_host() -> None:
    external = (ExternalAddress("192.168.1.1"),)
    found = problems_of(service("FD00::1".lower(), external=external), host=("192.168.1.1", "FD00:0::1"))
    assert found[1] == (
        "a.yaml:4: dns: 192.168.1.1 is an address of this host itself; "
        "choose an address that no host has; for a port of this host itself use node_port"
    )
    assert len(found) == 2


def test_being_allowed_does_not_make_a_host_address_free() -> None:
    assert len(problems_of(service("10.96.0.1"), "10.0.0.0/8", host=("10.96.0.1",))) == 1


def test_only_an_address_in_a_named_network_may_be_announced() -> None:
    for policy, allowed in (
        (AddressPolicy(), False),
        (AddressPolicy(("10.96.0.0/16",)), True),
        (AddressPolicy(("10.97.0.0/16",)), False),
        (AddressPolicy(announced=("10.96.0.0/16",)), True),
        (AddressPolicy(announced=("10.97.0.0/16",)), False),
    ):
        assert policy.announces("10.96.0.10") is allowed


def test_rules_that_are_exactly_those_of_kube_proxy_have_no_limits() -> None:
    limited, without = replace(service("10.96.0.10"), limits=FlowLimits(connections=9)), service("10.96.0.11")
    policy = AddressPolicy(flow_limits=False)
    (problem,) = admit_service(limited, policy)
    assert "kube-proxy's chains have no place for limits" in str(problem)
    assert admit_service(without, policy) == admit_service(limited, AddressPolicy()) == ()


def test_problems_of_a_declaration_come_in_line_order_and_the_rest_stays() -> None:
    earlier, later = Problem("a.yaml", 2, "", "it is wrong"), Problem("a.yaml", 9, "", "it is wrong")
    notes = (Note("a.yaml", 1, "something"),)
    declared = Declaration((service("10.97.0.1"), service("10.96.0.1", line=6)), (earlier, later), notes)
    admitted = admit(declared, AddressPolicy(("10.96.0.0/16",)))
    assert [problem.line for problem in admitted.problems] == [2, 4, 9]
    assert (admitted.services, admitted.notes, admitted.ok) == (declared.services, notes, False)


def test_what_is_admitted_stays_the_same_object() -> None:
    declared = Declaration((service("10.96.0.1"),))
    assert admit(declared, AddressPolicy(("10.0.0.0/8",), ("192.168.1.1",))) is declared


def test_what_is_no_network_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="does not appear"):
        AddressPolicy(("10.0.0.0/8", "x"))
    with pytest.raises(ValueError, match="does not appear"):
        AddressPolicy(host_addresses=("10.0.0.0/8",))


def test_services_without_a_file_are_named_by_their_source() -> None:
    found = replace(service("10.97.0.1"), origin=Origin("cli"))
    assert problems_of(found, "10.96.0.0/16")[0].startswith("cli: dns: ")


def test_ten_thousand_services_and_a_thousand_networks_take_a_moment() -> None:
    services = tuple(service(f"10.{i // 250}.{i % 250}.1") for i in range(10_000))
    policy = AddressPolicy(tuple(f"10.{i // 25}.{i % 25 * 10}.0/24" for i in range(1_000)))
    began = time.thread_time()
    problems = admit(Declaration(services), policy).problems
    assert len(problems) == PROBLEMS + 1
    assert problems[-1].what == f"and {9_000 - PROBLEMS} more problems"
    # A fiftieth of this CPU time is usual; a walk over every network for every address would take minutes.
    assert time.thread_time() - began < 10


def with_check(check: Check, source: str, of_backend: bool = False) -> Service:
    found = replace(service("10.96.0.10"), origin=Origin(source, "", 4))
    if of_backend:
        return replace(found, backends=(Backend("10.1.0.1", check=check),))
    return replace(found, check=check)


@pytest.mark.parametrize("of_backend", [False, True])
def test_what_stands_in_etcd_names_no_file_of_this_host(of_backend: bool) -> None:
    """Who may write to etcd learns nothing of what a host has on its disk, and has nothing opened there."""
    check = Check(HttpProbe(tls=True, ca="/etc/shadow"))
    asked = list[Check]()

    def ask(check: Check) -> tuple[str, ...]:
        asked.extend([check] if check.probe else [])
        return ()

    policy = AddressPolicy(check_problems=ask)
    for source in ("file", "cli"):
        assert admit_service(with_check(check, source, of_backend), policy) == ()
    assert len(asked) == 2
    (problem,) = admit_service(with_check(check, "etcd", of_backend), policy)
    assert "dns: ca names a file of this host, which a service in etcd may not; leave it out" in str(problem)
    assert len(asked) == 2, "the file is not looked at"
    assert list(checks_to_query(with_check(check, "etcd", of_backend), policy)) == []
    assert admit_service(with_check(Check(HttpProbe(tls=True)), "etcd", of_backend), policy) == ()


def test_an_address_of_a_lan_that_serves_since_before_that_rule_serves_on() -> None:
    announced = replace(service("203.0.113.10"), announcement=Announcement(AnnounceMethod.L2))
    policy = AddressPolicy(announced=("203.0.113.0/24",), lan_holders=False)
    (problem,) = admit_service(announced, policy)
    assert "dns: announce: l2 needs etcd" in str(problem)
    assert "keepalived with vipctl ready" in str(problem)
    assert admit_service(announced, replace(policy, lan_holders=True)) == ()
    assert admit_service(announced, policy.for_accepted()) == ()
    assert admit_service(replace(announced, backends=(Backend("10.244.0.9"),)), policy, announced) == ()
    by_routes = replace(announced, announcement=Announcement(AnnounceMethod.ROUTES))
    assert admit_service(by_routes, policy) == ()


def test_a_service_in_etcd_that_serves_since_before_that_rule_serves_on() -> None:
    found = with_check(Check(HttpProbe(tls=True, ca="/etc/ssl/own.pem")), "etcd")
    accepted = Declaration((found,))
    assert admit_unit(Unit(accepted, accepted), AddressPolicy()).accepted.services == (found,)
    changed = Declaration((replace(found, answers_ping=False),))
    unit = admit_unit(Unit(changed, accepted), AddressPolicy())
    assert not unit.candidate.ok
    assert unit.accepted.services == (found,)
