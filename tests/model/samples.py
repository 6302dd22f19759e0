"""Small services and units that many tests are made of."""

from __future__ import annotations

from vipd.declaration.problems import Declaration, Problem
from vipd.declaration.unit import EMPTY_DECLARATION, Unit
from vipd.model.service import Backend, Origin, Protocol, Service, ServicePort

HEAD = "apiVersion: vipd/v1\nservices:\n"


def service(name: str, address: str, path: str = "", line: int = 1, *backends: str) -> Service:
    """A service on 53/udp of one address; from a file when a path is given, else added by vipctl."""
    origin = Origin("file", path, line) if path else Origin("cli")
    known = tuple(Backend(b) for b in backends or ("10.244.0.5",))
    return Service(name, (address,), (ServicePort(53, Protocol.UDP),), known, origin=origin)


def declared(*services: Service) -> Declaration:
    """A declaration without problems."""
    return Declaration(services)


def broken(path: str) -> Declaration:
    """A declaration that cannot be accepted."""
    return Declaration(problems=(Problem(path, 3, "services[0]", "it is wrong"),))


def unit(candidate: Declaration, accepted: Declaration = EMPTY_DECLARATION) -> Unit:
    """A unit that says `candidate` now and was last accepted saying `accepted`."""
    return Unit(candidate, accepted)


def block(address: str, name: str = "", *backends: str) -> str:
    """One item of `services:` as text, on 53/udp."""
    named = f"name: {name}, " if name else ""
    return f"  - {{{named}address: {address}, ports: [53/udp], backends: [{', '.join(backends)}]}}\n"


def many_declared(count: int, backends: int = 5) -> str:
    """Services with one TCP port each and backends of their own, as a vipd/v1 document."""
    return HEAD + "".join(_one_of_many(index, backends) for index in range(count))


def _one_of_many(index: int, backends: int) -> str:
    servers = ", ".join(_numbered(10, 128, index * backends + n) for n in range(backends))
    return (
        f"  - name: bench/web-{index}\n"
        f"    address: {_numbered(10, 96, index)}\n"
        f"    ports: [{{name: http, port: 80, protocol: tcp, target: 8080}}]\n"
        f"    backends: [{servers}]\n"
    )


def _numbered(first: int, second: int, number: int) -> str:
    high, low = divmod(number, 250)
    return f"{first}.{second + high // 256}.{high % 256}.{low + 1}"
