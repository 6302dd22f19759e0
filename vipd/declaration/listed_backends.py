"""The declared backends of a service as one list: those with addresses, then those with names. Pure.

Requests of the API name, add and change them alike (`vipd.declaration.operations`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from vipd.model.service import Backend, NamedBackend, NameKind, Service

B = TypeVar("B", Backend, NamedBackend, Backend | NamedBackend)
Listed = tuple[Backend | NamedBackend, ...]


def as_declared(service: Service) -> Service:
    """The service without backends that registered themselves, or that names resolved to."""
    if all(backend.declared for backend in (*service.backends, *service.fallback)):
        return service
    backends, fallback = (
        tuple(backend for backend in found if backend.declared)
        for found in (service.backends, service.fallback)
    )
    return replace(service, backends=backends, fallback=fallback)


def listed(service: Service) -> Listed:
    """The backends that a service declares; only these are stored."""
    return (*(backend for backend in service.backends if backend.declared), *service.named_backends)


def with_listed(service: Service, backends: Listed) -> Service:
    """The service with these backends in place of its declared ones."""
    return replace(
        service,
        backends=tuple(each for each in backends if isinstance(each, Backend)),
        named_backends=tuple(each for each in backends if isinstance(each, NamedBackend)),
    )


def host_of(backend: Backend | NamedBackend) -> str:
    """Its address, or its name."""
    return backend.address if isinstance(backend, Backend) else backend.name


def named_by(service: Service, backends: Collection[B], wanted: Backend | NamedBackend) -> list[B]:
    """The backends of a service that `ADDR`, `ADDR:PORT`, `dns:NAME:PORT` or `srv:NAME` may mean.

    It is the one that is declared so; else those of this address or name, if no port is said, or a port that
    they have from the service.
    """
    exact = [backend for backend in backends if str(backend) == str(wanted)]
    if exact:
        return exact
    port = _template(wanted).port
    same = [b for b in backends if (type(b), host_of(b)) == (type(wanted), host_of(wanted))]
    if port is None:
        return same
    return [
        b for b in same if _template(b).port is None and port in map(_template(b).port_for, service.ports)
    ]


def _template(backend: Backend | NamedBackend) -> Backend:
    return backend if isinstance(backend, Backend) else backend.template


def weight_of(backend: Backend | NamedBackend) -> int:
    """Its declared weight; 1 for an SRV name."""
    return backend.weight if isinstance(backend, Backend) else backend.template.weight


def is_srv(backend: Backend | NamedBackend) -> bool:
    """Whether its records say its weights."""
    return isinstance(backend, NamedBackend) and backend.kind is NameKind.SRV


def weighted(backend: Backend | NamedBackend, weight: int) -> Backend | NamedBackend:
    """The backend with another weight."""
    if isinstance(backend, Backend):
        return replace(backend, weight=weight)
    return replace(backend, template=replace(backend.template, weight=weight))
