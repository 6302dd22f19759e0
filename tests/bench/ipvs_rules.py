"""The same services for IPVS, as text for `ipvsadm --restore`: round robin, and translated (`-m`)."""

from __future__ import annotations

from collections.abc import Iterable

from vipd.model.service import Service


def all_services(services: Iterable[Service]) -> str:
    return "".join(
        f"-A {virtual} -s rr\n" + "".join(f"-a {virtual} {real} -m\n" for real in servers)
        for service in services
        for virtual, servers in _virtual_servers(service).items()
    )


def changed_service(before: Service, after: Service) -> str:
    """The backends that came, then those that went."""
    old, new = _virtual_servers(before), _virtual_servers(after)
    added = [f"-a {key} {real} -m\n" for key, servers in new.items() for real in servers - old[key]]
    removed = [f"-d {key} {real}\n" for key, servers in old.items() for real in servers - new[key]]
    return "".join(added + removed)


def _virtual_servers(service: Service) -> dict[str, set[str]]:
    """For each port of a service its name in ipvsadm, and those of its backends."""
    return {
        f"-{port.protocol[0]} {service.addresses[0]}:{port.port}": {
            f"-r {backend.address}:{port.target or port.port}" for backend in service.backends
        }
        for port in service.ports
    }
