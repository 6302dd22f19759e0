"""The declared backends of a service as one list: those with addresses, then those with names. Pure.

Requests of the API name, add and change them alike (`vipd.declaration.operations`).
"""

from __future__ import annotations

from dataclasses import replace

from vipd.model.service import Backend, NamedBackend, NameKind, Service

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
