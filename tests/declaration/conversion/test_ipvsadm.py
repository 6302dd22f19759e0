"""`ipvsadm-save -n` as services, and what of it has no counterpart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.declaration.conversion.reading import convert, lost, noted, only
from tests.declaration.strategies import PATIENT, PORTS, VIPS
from tests.lab.inside import declare
from vipd.model.service import (
    Affinity,
    Backend,
    Balance,
    Masquerade,
    Protocol,
    Service,
    ServicePort,
    family_of,
    socket_text,
)

OPTIONS = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}
SCHEDULERS = {Balance.ROUND_ROBIN: "wrr", Balance.SOURCE_HASH: "mh"}


def saved(services: list[Service]) -> str:
    """What ipvsadm-save -n prints for services that IPVS can have."""
    lines = []
    for service in services:
        (port,) = service.ports
        place = f"{OPTIONS[port.protocol]} {socket_text(service.addresses[0], port.port)}"
        sticky = f" -p {service.affinity.timeout}" if service.affinity else ""
        lines.append(f"-A {place} -s {SCHEDULERS[service.balance]}{sticky}")
        for backend in service.backends:
            server = socket_text(backend.address, backend.port_for(port) or 0)
            lines.append(f"-a {place} -r {server} -m -w {backend.weight}")
    return "".join(f"{line}\n" for line in lines)


@st.composite
def ipvs_services(draw: st.DrawFn) -> list[Service]:
    """Services with one port at one address, as IPVS has them."""
    found = []
    places = draw(st.lists(st.tuples(VIPS, PORTS, st.sampled_from(Protocol)), unique=True, max_size=4))
    for address, port, protocol in places:
        base = "fd01::" if family_of(address) == 6 else "10.1.0."
        hosts = draw(st.lists(st.integers(1, 99), unique=True, max_size=4))
        own = draw(st.booleans())
        target = draw(st.none() | PORTS)
        target = None if target == port else target
        backends = [
            Backend(f"{base}{host}", draw(PORTS) if own else None, draw(st.integers(0, 65535)))
            for host in hosts
        ]
        service = Service(
            name="",
            addresses=(address,),
            ports=(ServicePort(port, protocol, target=None if own or not hosts else target),),
            backends=tuple(backends),
            balance=draw(st.sampled_from(list(SCHEDULERS))),
            affinity=draw(st.none() | st.builds(Affinity, st.integers(1, 86400))),
            masquerade=Masquerade.HAIRPIN if hosts else None,
        )
        # Backends with the same port are written as the port's target.
        ports = {backend.port for backend in backends}
        if own and len(ports) == 1:
            common = ports.pop()
            service = replace(
                service,
                ports=(ServicePort(port, protocol, target=None if common == port else common),),
                backends=tuple(replace(backend, port=None) for backend in backends),
            )
        found.append(replace(service, name=str(service.frontends()[0])))
    return found


@PATIENT
@given(ipvs_services())
def test_what_ipvsadm_saves_of_services_is_these_services(services: list[Service]) -> None:
    found = declare(saved(services), form="ipvsadm")
    assert list(found.services) == services
    assert lost(found) == ([] if services else [(0, "")])


def test_a_service_with_nat_keeps_the_address_of_clients() -> None:
    service = only(
        convert(
            """
            -A -t 10.96.0.10:80 -s wrr -p 600
            -a -t 10.96.0.10:80 -r 10.244.0.11:8080 -m -w 2
            -a -t 10.96.0.10:80 -r 10.244.0.12:8080 -m -w 0
            """,
            form="ipvsadm",
        )
    )
    assert service == Service(
        name="10.96.0.10:80/tcp",
        addresses=("10.96.0.10",),
        ports=(ServicePort(80, Protocol.TCP, target=8080),),
        backends=(Backend("10.244.0.11", weight=2), Backend("10.244.0.12", weight=0)),
        affinity=Affinity(600),
        balance=Balance.ROUND_ROBIN,
        masquerade=Masquerade.HAIRPIN,
    )
    assert service.origin.line == 1


def test_long_options_and_the_name_of_the_program_are_read() -> None:
    service = only(
        convert(
            """
            # written by hand
            ipvsadm --add-service --tcp-service=10.96.0.10:80 --scheduler rr --persistent
            /sbin/ipvsadm --add-server --tcp-service 10.96.0.10:80 --real-server 10.244.0.11 --masquerading
            """,
            form="ipvsadm",
        )
    )
    assert (service.affinity, service.backends) == (Affinity(300), (Backend("10.244.0.11"),))


def test_round_robin_without_weights_has_none() -> None:
    found = convert("-A -t 10.0.0.1:80 -s rr\n-a -t 10.0.0.1:80 -r 10.1.0.1:80 -m -w 5\n")
    assert only(found).backends == (Backend("10.1.0.1"),)
    assert (2, "-r 10.1.0.1") in noted(found)


@pytest.mark.parametrize("method", ["-g", "-i", "-i --tun-type gue --tun-port 6080 --tun-nocsum"])
def test_direct_routing_and_tunnels_are_lost_and_masqueraded(method: str) -> None:
    found = convert(f"-A -t 10.0.0.1:80 -s wrr\n-a -t 10.0.0.1:80 -r 10.1.0.1:80 {method} -w 1\n")
    assert lost(found) == [(2, f"-r 10.1.0.1:80 {method[:2]}")]
    assert found.services[0].masquerade is None


def test_the_upper_threshold_is_max_connections() -> None:
    found = convert("-A -t 10.0.0.1:80 -s wrr\n-a -t 10.0.0.1:80 -r 10.1.0.1:80 -m -w 1 -x 9 -y 0\n")
    assert lost(found) == []
    assert [b.max_connections for b in found.services[0].backends] == [9]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("-A -f 3 -s rr", "-A -f 3"),
        ("-A -t 10.0.0.2:0 -s rr -p 300", "-A -t 10.0.0.2:0"),
        ("-A -t www:http -s rr", "-A -t www:http"),
        ("-a -t 10.0.0.9:80 -r 10.1.0.1:80 -m", "-a -t 10.0.0.9:80"),
        ("-A -t 10.0.0.1:80 -s wrr", "-A -t 10.0.0.1:80"),
        ("-D -t 10.0.0.1:80", "-D -t 10.0.0.1:80"),
        ("--start-daemon master --syncid 1", "--start-daemon master --syncid"),
        ("-a -t 10.0.0.1:80 -r 127.0.0.1:80 -m", "-r 127.0.0.1:80"),
        ("-a -t 10.0.0.1:80 -r [fd00::1]:80 -m", "-r [fd00::1]:80"),
        ("-a -t 10.0.0.1:80 -r 10.1.0.2:80 -m -x nine", "-r 10.1.0.2:80 -x nine"),
        ("-a -t 10.0.0.1:80 -r 10.1.0.2:80 -m -w 99999", "-r 10.1.0.2:80 -w"),
        ("-a -t 10.0.0.1:80 -r 10.1.0.1:80 -m", "-r 10.1.0.1:80"),
        ("-a -t 10.0.0.1:80 -r 10.1.0.2:80 -m --new", "--new"),
    ],
)
def test_each_line_without_a_counterpart_is_named(line: str, what: str) -> None:
    found = convert(f"-A -t 10.0.0.1:80 -s wrr\n-a -t 10.0.0.1:80 -r 10.1.0.1:80 -m\n{line}\n")
    assert lost(found) == [(3, what)]
    (service,) = found.services
    assert service.backends[0] == Backend("10.1.0.1")


@pytest.mark.parametrize(
    ("options", "what", "balance"),
    [
        ("-s sed", "scheduler sed", Balance.RANDOM),
        ("-s fo", "scheduler fo", Balance.RANDOM),
        ("-s new", "scheduler new", Balance.RANDOM),
        ("-s sh -b sh-port", "sh-port", Balance.RANDOM),
        ("-s mh -b mh-fallback,mh-port", "mh-port", Balance.RANDOM),
        ("-s wrr -p 90000", "-p 90000", Balance.ROUND_ROBIN),
        ("-s wrr -p 60 -M 255.255.255.0", "-M 255.255.255.0", Balance.ROUND_ROBIN),
        ("-s wrr -o", "-o", Balance.ROUND_ROBIN),
        ("-s wrr -p 60 --pe sip", "--pe sip", Balance.ROUND_ROBIN),
    ],
)
def test_what_a_service_cannot_have_is_named(options: str, what: str, balance: Balance) -> None:
    found = convert(f"-A -u 10.0.0.1:53 {options}\n-a -u 10.0.0.1:53 -r 10.1.0.1:53 -m -w 1\n")
    assert lost(found) == [(1, what)]
    assert found.services[0].balance is balance


@pytest.mark.parametrize("options", ["-s wlc", "-s lc", ""])
def test_least_connections(options: str) -> None:
    found = convert(f"-A -u 10.0.0.1:53 {options}\n-a -u 10.0.0.1:53 -r 10.1.0.1:53 -m -w 1\n")
    assert (lost(found), found.services[0].balance) == ([], Balance.LEAST_CONNECTIONS)


def test_a_service_without_a_server_that_can_be_converted_is_left_out() -> None:
    found = convert("-A -t 10.0.0.1:80 -s rr\n-a -t 10.0.0.1:80 -r 127.0.0.1:80 -m\n")
    assert (found.services, lost(found)) == ((), [(1, "-A -t 10.0.0.1:80"), (2, "-r 127.0.0.1:80")])


def test_one_note_says_that_no_host_may_have_the_addresses() -> None:
    found = convert("-A -t 10.0.0.1:80 -s wrr\n-A -t 10.0.0.2:80 -s wrr\n-A -u 10.0.0.3:1 -s sh\n")
    assert noted(found) == [(1, "address 10.0.0.1"), (3, "balance")]


def test_a_service_that_another_one_prevents_is_left_out() -> None:
    found = convert(
        "-A -t 10.0.0.1:80 -s wrr\n-A -t 10.0.0.2:80 -s wrr\n-a -t 10.0.0.2:80 -r 10.0.0.1:8080 -m\n"
    )
    assert [service.addresses for service in found.services] == [("10.0.0.1",)]
    assert [each.line for each in found.problems] == [2]
