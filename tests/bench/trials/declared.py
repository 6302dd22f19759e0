"""Services to measure with: one TCP port each, on 10.96.0.0/12, their own backends in 10.128.0.0/9. Pure."""

from __future__ import annotations

from dataclasses import replace

from vipd.model.service import Backend, Protocol, Service, ServicePort

PORT, TARGET = 80, 8080
_USED_OF_256 = 250
_SPARE = 64_000 * 100
"""First number of backends that belong to no service: changes use those."""


def many_services(count: int, backends: int = 5) -> tuple[Service, ...]:
    """`count` services, the same for every call; 200,000 fit the addresses, at five backends each."""
    return tuple(_service(index, backends) for index in range(count))


def with_one_backend_changed(service: Service, number: int) -> Service:
    """The service with another first backend, a different one for each number."""
    spare = Backend(_address(10, 128, _SPARE + number))
    return replace(service, backends=(spare, *service.backends[1:]))


def _service(index: int, backends: int) -> Service:
    return Service(
        name=f"bench/web-{index}",
        addresses=(_address(10, 96, index),),
        ports=(ServicePort(PORT, Protocol.TCP, "http", TARGET),),
        backends=tuple(Backend(_address(10, 128, index * backends + n)) for n in range(backends)),
    )


def _address(first: int, second: int, number: int) -> str:
    high, low = divmod(number, _USED_OF_256)
    return f"{first}.{second + high // 256}.{high % 256}.{low + 1}"
