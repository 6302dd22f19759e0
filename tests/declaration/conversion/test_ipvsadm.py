"""What `ipvsadm-save -n` prints of services that IPVS can have is these services."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

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
    assert [(problem.line, problem.path) for problem in found.problems] == ([] if services else [(0, "")])
