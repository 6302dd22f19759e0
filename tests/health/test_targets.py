"""Which backend is asked where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lab.inside import declare
from vipd.model.check import UNCHECKED, Check, DnsProbe, ExecProbe, HttpProbe, TcpProbe, Timing, UdpProbe
from vipd.model.check_target import CheckTarget, backends_without_check_port, check_targets
from vipd.model.service import Backend, Protocol, Service, ServicePort

TCP = Check(TcpProbe())
PORTS = (
    ServicePort(53, Protocol.UDP, "dns"),
    ServicePort(80, Protocol.TCP, "web", target=8080),
    ServicePort(443, Protocol.TCP, "tls"),
)


def service(*backends: Backend, check: Check = TCP, ports: tuple[ServicePort, ...] = PORTS) -> Service:
    return Service("s", ("10.96.0.1",), ports, backends, check=check)


def place(found: Service, backend: str = "10.0.0.1") -> tuple[int, Protocol]:
    target = check_targets(found)[backend]
    return target.port, target.protocol


def test_a_check_asks_where_the_first_port_of_its_protocol_is_served() -> None:
    backend = Backend("10.0.0.1")
    assert place(service(backend)) == (8080, Protocol.TCP)
    assert place(service(backend, check=Check(HttpProbe()))) == (8080, Protocol.TCP)
    assert place(service(backend, check=Check(DnsProbe()))) == (53, Protocol.UDP)
    assert place(service(backend, check=Check(UdpProbe()))) == (53, Protocol.UDP)
    assert place(service(backend, check=Check(ExecProbe()))) == (53, Protocol.UDP)


def test_a_target_is_named_by_how_it_is_asked() -> None:
    probes = (TcpProbe(), HttpProbe(), HttpProbe(tls=True), UdpProbe(), DnsProbe(), ExecProbe())
    made = [CheckTarget("10.0.0.1", 80, Protocol.TCP, probe, Timing()) for probe in probes]
    kinds = ("tcp", "http", "https", "udp", "dns", "exec")
    assert list(map(str, made)) == [f"{kind} 10.0.0.1:80" for kind in kinds]


def test_a_port_of_its_own_wins() -> None:
    assert place(service(Backend("10.0.0.1"), check=Check(TcpProbe(port=9)))) == (9, Protocol.TCP)
    assert place(service(Backend("10.0.0.1", port=81)), "10.0.0.1:81") == (81, Protocol.TCP)
    some = Backend("10.0.0.1", ports=(("tls", 8443),))
    assert place(service(some)) == (8443, Protocol.TCP)


def test_without_a_port_nothing_is_asked_and_it_is_told() -> None:
    only_udp, only_dns = (ServicePort(53, Protocol.UDP),), Backend("10.0.0.1", ports=(("dns", 53),))
    for found in (service(Backend("10.0.0.1"), ports=only_udp), service(only_dns)):
        assert check_targets(found) == {}
        assert backends_without_check_port(found) == found.backends
    fixed = service(Backend("10.0.0.1"), check=Check(TcpProbe(port=8053)), ports=only_udp)
    assert place(fixed) == (8053, Protocol.TCP)
    assert backends_without_check_port(fixed) == ()


@pytest.mark.parametrize(
    ("check", "own", "wanted"),
    [
        ("check: tcp", "", "finds no tcp port: it serves dns alone"),
        ("check: {type: tcp, port: 9}", "", ""),
        ("check: {type: exec, command: [/bin/true]}", "", ""),
        ("check: {type: dns}", "", ""),
        ("check: tcp", ", check: none", ""),
        ("check: tcp", ", check: {type: http, port: 8080}", ""),
        ("check: none", ", check: http", "finds no tcp port: it serves dns alone"),
    ],
)
def test_a_backend_that_its_check_cannot_ask_is_a_problem(check: str, own: str, wanted: str) -> None:
    """Not silence: it would serve for ever, alive or dead."""
    text = f"""apiVersion: vipd/v1
services:
  - name: names
    address: 10.96.0.1
    ports: [{{port: 53, protocol: udp, name: dns}}, {{port: 80, name: web}}]
    backends:
      - 10.244.0.1
      - {{address: 10.244.0.2, ports: {{dns: 5353}}{own}}}
    {check}
"""
    problems = declare(text, "x.yaml").problems
    if not wanted:
        assert problems == ()
        return
    (problem,) = problems
    assert (problem.line, problem.path) == (8, "services[0].backends[1]")
    assert problem.what == f"the check of 10.244.0.2 {wanted}"
    assert problem.hint == "add port to the check, or give this backend check: none"


def test_a_backend_may_have_its_own_check_or_none() -> None:
    own, none = Check(HttpProbe(path="/own")), Backend("10.0.0.2", check=UNCHECKED)
    found = check_targets(service(Backend("10.0.0.1", check=own), none, Backend("10.0.0.3")))
    assert {name: target.kind for name, target in found.items()} == {"10.0.0.1": "http", "10.0.0.3": "tcp"}


def test_the_last_resort_is_asked_as_other_backends_are() -> None:
    own = Check(HttpProbe(path="/sorry"))
    spare = (Backend("10.0.0.7", check=UNCHECKED), Backend("10.0.0.8"), Backend("10.0.0.9", check=own))
    found = Service("s", ("10.96.0.1",), PORTS, (), check=TCP, fallback=spare)
    assert {name: target.kind for name, target in check_targets(found).items()} == {
        "10.0.0.8": "tcp",
        "10.0.0.9": "http",
    }


def test_a_last_resort_that_the_services_check_cannot_ask_is_no_problem() -> None:
    """It was none, and is better than a refusal; a check of its own must work."""
    odd = Backend("10.0.0.8", ports=(("dns", 53),))
    found = Service("s", ("10.96.0.1",), PORTS, (), check=TCP, fallback=(odd,))
    assert check_targets(found) == {}
    assert backends_without_check_port(found) == ()
    own = replace(found, fallback=(replace(odd, check=TCP),))
    assert backends_without_check_port(own) == own.fallback


def test_services_share_equal_targets() -> None:
    one = service(Backend("10.0.0.1"), check=Check(TcpProbe(port=8080)))
    other = service(Backend("10.0.0.1"))
    assert check_targets(one) == check_targets(other)
    assert len({*check_targets(one).values(), *check_targets(other).values()}) == 1
    slower = service(Backend("10.0.0.1"), check=Check(TcpProbe(), Timing(interval=9.0)))
    assert check_targets(slower) != check_targets(other)


def test_a_target_reads_well() -> None:
    assert (
        str(CheckTarget("fd00::1", 443, Protocol.TCP, HttpProbe(tls=True), Timing())) == "https [fd00::1]:443"
    )
