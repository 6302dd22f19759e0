"""Limits on a service, and on all services read with it: checked before anything is multiplied out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vipd.declaration.fields import Located, Report
from vipd.model import limits
from vipd.model.service import Backend, ExternalAddress, Service, ServicePort

_DIVIDE = "divide it into several services"


def check_size(
    report: Report,
    line: int,
    path: str,
    ports: Sequence[Located[ServicePort]],
    backends: Sequence[Located[Backend]],
    addresses: int,
) -> bool:
    """Whether a service may have this many ports, backends (including the fallback's) and addresses; reports
    why not."""
    kinds = ((len(ports), limits.PORTS, "ports"), (len(backends), limits.BACKENDS, "backends"))
    for number, most, kind in kinds:
        if number > most:
            report.add(line, path, f"{number} {kind} are too many: {most} are the most", _DIVIDE)
            return False
    named = sum(len(backend.value.ports) for backend in backends)
    products = (
        (len(backends), "backends", "endpoints", limits.SERVICE_ENDPOINTS),
        (addresses, "addresses and networks", "frontends", limits.SERVICE_ENDPOINTS),
        (named, "ports named by backends", "combinations", limits.NAMED_PORT_LOOKUPS),
    )
    for number, kind, made, most in products:
        if len(ports) * number > most:
            what = f"{len(ports)} ports and {number} {kind} make {len(ports) * number} {made}"
            report.add(line, path, f"{what}: {most} are the most", _DIVIDE)
            return False
    return True


def check_address_endpoints(report: Report, line: int, path: str, addresses: int, endpoints: int) -> bool:
    """Whether a service may have this many endpoints (ports times backends) at this many addresses; reports
    why not."""
    made = addresses * endpoints
    if made > limits.ADDRESS_ENDPOINTS:
        what = f"{endpoints} endpoints at each of {addresses} addresses make {made}"
        report.add(line, path, f"{what}: {limits.ADDRESS_ENDPOINTS} are the most", _DIVIDE)
    return made <= limits.ADDRESS_ENDPOINTS


def network_count(
    externals: Iterable[Located[ExternalAddress]], allowed: Sequence[str], addresses: Sequence[object]
) -> int:
    """Number of networks that limit addresses; those for all of them count for each, and for a node port."""
    own = sum(len(allowed if e.value.allow_from is None else e.value.allow_from) for e in externals)
    return own + len(allowed) * (len(addresses) + 1)


def service_network_count(service: Service) -> int:
    """The same for a service that has been read."""
    externals = service.external_addresses
    own = sum(len(service.allow_from if e.allow_from is None else e.allow_from) for e in externals)
    return own + len(service.allow_from) * (len(service.addresses) + 1)


def check_total_size(report: Report, service: Service, number: int) -> bool:
    """Whether a service is within the limit together with those read before, being the `number`-th; reports
    a fault, and counts it."""
    report.size += limits.declared_size(service)
    what = ""
    if number > limits.SERVICES:
        what = f"the document has more than {limits.SERVICES} services"
    elif report.size > limits.MAX_UNIT_SIZE:
        what = f"up to here the services have more than {limits.MAX_UNIT_SIZE} endpoints"
    if what:
        report.add(service.origin.line, "", what, "divide it into several files, or write fewer services")
    return not what
