"""What is told of services that claim what others have, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vipd.control.address_policy import AddressPolicy, admit_service
from vipd.control.admission import Admission
from vipd.control.claim_warnings import MAX_LINES, NEIGHBOUR_LIVE_SECONDS, ClaimIndex, PortClaim, warnings_of
from vipd.declaration.problems import Declaration
from vipd.declaration.unit import Unit
from vipd.host.facts import NO_FACTS, HostFacts, LocalSocket, Subnet
from vipd.host.local_sockets import LocalSockets
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Masquerade, Origin, Protocol, Service, ServicePort

SUBNET = Subnet(4, 10 << 16 | 1, 24, "10.0.1.0/24 on eth0")
LIVE = "02:00:00:00:00:01 on eth0"
GATEWAY = HostFacts(gateways={"10.0.1.1": "eth0"}, subnets=(SUBNET,))
SSHD = LocalSocket(Protocol.TCP, "0.0.0.0", 22, "the SSH server of this host", protected=True)


def service(name: str, *addresses: str, node_port: int | None = None) -> Service:
    """A service of a file."""
    ports = (ServicePort(80, Protocol.TCP, node_port=node_port),)
    return Service(name, addresses, ports, origin=Origin("file", "/web.yaml", 3))


def forwarding(name: str, *addresses: str, port: int = 80) -> Forwarding:
    """One port of a service."""
    key = ForwardingKey(name, str(port), Protocol.TCP, Family.IPV4)
    return Forwarding(key, addresses, port, (), Masquerade.FORWARDED)


def test_all_ports_and_addresses_of_a_service_make_one_line_and_all_services_a_few() -> None:
    claims = ClaimIndex()
    for port in (80, 443):
        for number in range(30):
            one = forwarding(f"s{number:02}", "10.0.1.5", *(f"10.0.1.{n}" for n in range(6, 10)), port=port)
            claims.put(one.key, PortClaim.of(one))
    lines = claims.warnings(GATEWAY, 0.0)
    assert len(lines) == MAX_LINES + 1
    assert lines[0].startswith("service s00: 10.0.1.5, 10.0.1.6, 10.0.1.7 and 2 more: lies in 10.0.1.0/24 on")
    assert lines[-1] == "and 20 more such warnings of what services claim"
    assert claims.warnings(GATEWAY, 1.0) == lines


def test_an_address_of_a_subnet_for_which_this_host_answers_is_fine() -> None:
    web = service("web", "10.0.1.5")
    assert warnings_of([web], GATEWAY)
    assert warnings_of([web], replace(GATEWAY, proxied_addresses=frozenset({"10.0.1.5"}))) == ()


def test_what_ends_is_told_no_more() -> None:
    claims, one = ClaimIndex(), forwarding("web", "10.0.1.5")
    claims.put(one.key, PortClaim.of(one))
    assert claims.warnings(GATEWAY, 0.0)
    assert claims.warnings(NO_FACTS, 0.0) == ()
    assert claims.warnings(GATEWAY, 0.0)
    claims.put(one.key, None)
    assert claims.warnings(GATEWAY, 0.0) == ()


def test_a_neighbour_that_comes_and_goes_makes_one_warning_that_stays() -> None:
    claims, one = ClaimIndex(), forwarding("web", "203.0.113.5")
    claims.put(one.key, PortClaim.of(one))
    known = replace(NO_FACTS, neighbours={"203.0.113.5": LIVE})
    (line,) = claims.warnings(known, 0.0)
    assert claims.warnings(NO_FACTS, NEIGHBOUR_LIVE_SECONDS - 1) == (line,)
    assert claims.warnings(known, NEIGHBOUR_LIVE_SECONDS) == (line,)
    assert claims.warnings(NO_FACTS, 2 * NEIGHBOUR_LIVE_SECONDS - 1) == (line,)
    assert claims.warnings(NO_FACTS, 2 * NEIGHBOUR_LIVE_SECONDS) == ()


def test_of_an_address_the_weightiest_is_told_and_of_this_hosts_own_nothing() -> None:
    facts = replace(GATEWAY, neighbours={"10.0.1.1": LIVE, "10.0.1.2": LIVE, "10.0.1.4": LIVE})
    facts = replace(facts, own_addresses=frozenset({"10.0.1.4"}))
    web = service("web", "10.0.1.1", "10.0.1.2", "10.0.1.3", "10.0.1.4")
    told = [line.removeprefix("service web: ").partition(";")[0] for line in warnings_of([web], facts)]
    asked = "where hosts ask for it by ARP, which vipd does not answer"
    assert told == [
        "10.0.1.1: a gateway of this host, on eth0",
        f"10.0.1.2: another host has it ({LIVE}) and loses what passes here",
        f"10.0.1.3: lies in 10.0.1.0/24 on eth0, {asked}",
    ]


@pytest.mark.parametrize(
    ("address", "refused", "changed"),
    [
        ("0.0.0.0", True, {}),
        ("::", True, {}),
        ("192.0.2.1", True, {}),
        ("192.0.2.1", False, {"node_port_addresses": {Family.IPV4: frozenset({"198.51.100.1"})}}),
        ("0.0.0.0", True, {"node_port_addresses": {Family.IPV4: frozenset({"198.51.100.1"})}}),
        ("0.0.0.0", False, {"node_port_addresses": {Family.IPV4: frozenset()}}),
        ("127.0.0.1", False, {}),
        ("127.0.0.1", True, {"localhost_node_ports": True}),
        ("::1", False, {"localhost_node_ports": True}),
        ("2001:db8::1", False, {}),
    ],
)
def test_a_node_port_takes_only_what_reaches_it(address: str, refused: bool, changed: dict[str, Any]) -> None:
    facts = replace(NO_FACTS, protected_sockets=(SSHD._replace(address=address),), **changed)
    web = service("web", "10.96.0.1", node_port=22)
    assert bool(admit_service(web, AddressPolicy(host=facts))) is refused


def test_a_refusal_names_file_line_fault_and_way_out() -> None:
    facts = replace(GATEWAY, protected_sockets=(SSHD,))
    web = service("web", "10.0.1.1", node_port=22)
    gateway, port = map(str, admit_service(web, AddressPolicy(host=facts)))
    assert gateway.startswith(
        "/web.yaml:3: web: 10.0.1.1 is a gateway of this host, on eth0; choose an address"
    )
    assert port.startswith("/web.yaml:3: web: node port 22/tcp is the port of the SSH server of this host; ")


def test_an_own_address_keeps_a_socket_of_its_own_and_not_one_of_all_addresses() -> None:
    web, own = service("web", "192.0.2.1"), frozenset({"192.0.2.1"})
    for address, refused in (("192.0.2.1", True), ("0.0.0.0", False)):
        sockets = (LocalSocket(Protocol.TCP, address, 80, "your own session", protected=True),)
        facts = replace(NO_FACTS, protected_sockets=sockets, sockets=sockets, own_addresses=own)
        assert bool(admit_service(web, AddressPolicy(host=facts))) is refused
        assert len(warnings_of([web], facts)) == 1


def test_neighbours_and_sockets_that_refuse_nothing_make_no_other_policy() -> None:
    other = replace(GATEWAY, neighbours={"10.0.1.9": LIVE}, sockets=(SSHD,), subnets=())
    assert AddressPolicy(host=other) == AddressPolicy(host=GATEWAY)
    assert AddressPolicy(host=replace(GATEWAY, gateways={})) != AddressPolicy(host=GATEWAY)


def proc(root: Path, user: int, state: str = "0A") -> Path:
    """A /proc on which port 22 is held by a process that cannot be looked into."""
    (root / "proc/net").mkdir(parents=True)
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout\n"
    rows = [f"0100007F:00{port}" for port in ("16", "17")] + ["00000000:0016"]
    lines = [
        f"   {n}: {row} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 {user:5} 0 {7 + n} 1\n"
        for n, row in enumerate(rows)
    ]
    (root / "proc/net/tcp").write_text(head + "".join(lines))
    return root


@pytest.mark.parametrize(("user", "guarded"), [(0, True), (1000, False)])
def test_where_processes_are_hidden_port_22_of_root_is_the_ssh_server(
    tmp_path: Path, user: int, guarded: bool
) -> None:
    found = {(s.address, s.port): s.protected for s in LocalSockets(proc(tmp_path, user)).read()}
    assert found == {("127.0.0.1", 22): guarded, ("127.0.0.1", 23): False, ("0.0.0.0", 22): guarded}


def test_connections_are_no_listening_sockets(tmp_path: Path) -> None:
    assert LocalSockets(proc(tmp_path, 0, "01")).read() == ()


@pytest.mark.slow
def test_ten_thousand_services_cost_a_look_nothing_and_the_first_admission_little() -> None:
    many = [service(f"s{n}", f"10.96.{n // 250}.{n % 250 + 1}", node_port=None) for n in range(10_000)]
    facts = replace(
        GATEWAY, neighbours={f"10.0.1.{n}": LIVE for n in range(2, 200)}, protected_sockets=(SSHD,)
    )
    plain, claims = AddressPolicy(), ClaimIndex()
    for one in many:
        new = forwarding(one.name, *one.addresses)
        claims.put(new.key, PortClaim.of(new))
    unit = Unit(Declaration(tuple(many)))

    def first_load(policy: AddressPolicy) -> Callable[[], object]:
        def load() -> None:
            admission = Admission()
            admission.admit(admission.update_units([{"a": unit}], policy))

        return load

    before = took(first_load(plain))
    assert took(first_load(AddressPolicy(host=facts))) < 3 * before
    claims.warnings(facts, 0.0)
    assert took(lambda: claims.warnings(facts, 1.0)) < before / 20
    admission = Admission()
    admission.admit(admission.update_units([{"a": unit}], AddressPolicy(host=facts)))
    assert took(lambda: admission.update_units([{"a": unit}], AddressPolicy(host=facts))) < before / 20


def took(work: Callable[[], object]) -> float:
    """Seconds of this CPU, the best of some."""
    found = []
    for _ in range(3):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)
