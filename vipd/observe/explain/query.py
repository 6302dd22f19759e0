"""Parses a query of `explain`: the texts of source and target become the first packet of a flow. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from vipd.declaration.syntax import InvalidTextError, parse_address, parse_backend, parse_frontend
from vipd.model.forwarding import Forwarding
from vipd.model.misspelling import nearest
from vipd.model.service import Family, Frontend, family_of, socket_text
from vipd.observe.simulator import Arrival, Packet

LOCAL = "local"
"""The source that means a process of this host."""

DEFAULT_SOURCE_PORT = 40000
"""The port if `--from` names none; no rule of vipd matches on it."""


class QueryError(ValueError):
    """A query without an answer: what, why, hint. `unknown`: its target is no known service."""

    def __init__(self, what: str, why: str = "", hint: str = "", *, unknown: bool = False) -> None:
        super().__init__(what)
        self.what, self.why, self.hint, self.unknown = what, why, hint, unknown


@dataclass(frozen=True, slots=True)
class Source:
    """The source of the packet. The address is empty for a process of this host without one."""

    address: str
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """One packet, and whether its source address is only the one that this host would probably choose."""

    packet: Packet
    assumed: bool = False


def parse_source(text: str) -> Source:
    """`10.10.0.9`, `10.10.0.9:40000`, `[fd00::9]:40000` or `local`. Raises QueryError."""
    if text == LOCAL:
        return Source("")
    try:
        if "@" in text:
            raise InvalidTextError(f"{text} has a weight", f"write {text.partition('@')[0]}")
        backend = parse_backend(text)
    except InvalidTextError as error:
        hint = error.hint or "an address, ADDRESS:PORT, or local for a process of this host"
        raise QueryError(error.what, hint=hint) from None
    return Source(backend.address, backend.port)


def ask(
    source: str, target: str, forwardings: Collection[Forwarding], host_addresses: Collection[str]
) -> Query:
    """The packet from `source` to `target`, `ADDR:PORT[/PROTO]` or a service's name.

    A name means the service's first frontend in the source's family. The packet starts on this host if its
    source is `local` or one of the host's addresses. Raises QueryError.
    """
    if not target:
        raise QueryError("no target is given", hint="ADDRESS:PORT/PROTOCOL, or the name of a service")
    sender = parse_source(source)
    family = family_of(sender.address) if sender.address else None
    frontend = _frontend(target, forwardings, family)
    if family not in (None, family_of(frontend.address)):
        raise QueryError(
            f"{sender.address} and {frontend.address} are of different families",
            hint=f"give an {family_of(frontend.address)} address with --from",
        )
    address = sender.address or _chosen_source(frontend.address, host_addresses)
    local = is_own(address, host_addresses)
    packet = Packet(
        address,
        frontend.address,
        str(frontend.protocol),
        frontend.port,
        sender.port or DEFAULT_SOURCE_PORT,
        Arrival.LOCAL if local else Arrival.FORWARDED,
    )
    return Query(packet, assumed=not sender.address and address != frontend.address)


def is_own(address: str, host_addresses: Collection[str]) -> bool:
    """Whether an address is one of this host's; loopback always is."""
    return address in host_addresses or ip_address(address).is_loopback


def _frontend(target: str, forwardings: Collection[Forwarding], family: Family | None) -> Frontend:
    named = [forwarding for forwarding in forwardings if forwarding.key.service == target]
    if named:
        return _first_frontend(target, named, family)
    if at_address := _frontends_at(target, forwardings):
        first, *others = at_address
        if others:
            hint = f"name one: {', '.join(map(str, at_address))}"
            raise QueryError(f"{target} has several ports", hint=hint)
        return first
    try:
        return parse_frontend(target)
    except InvalidTextError as error:
        if _meant_as_address(target):
            raise QueryError(error.what, hint=error.hint) from None
        close = nearest(target, {forwarding.key.service: None for forwarding in forwardings})
        hint = f"did you mean {' or '.join(close)}?" if close else "vipctl list shows them"
        raise QueryError(f"no service {target}", hint=hint, unknown=True) from None


def _frontends_at(target: str, forwardings: Iterable[Forwarding]) -> list[Frontend]:
    """The frontends of an address alone."""
    try:
        address = parse_address(target)
    except InvalidTextError:
        return []
    found = (frontend for forwarding in forwardings for frontend in _frontends(forwarding))
    return [frontend for frontend in found if frontend.address == address]


def _first_frontend(name: str, named: Sequence[Forwarding], family: Family | None) -> Frontend:
    found = [frontend for forwarding in named for frontend in _frontends(forwarding)]
    if not found:
        raise QueryError(f"{name} has no address", hint="give ADDRESS:PORT/PROTOCOL, such as a node port")
    fitting = [f for f in found if family in (None, family_of(f.address))]
    if not fitting:
        raise QueryError(f"{name} has no {family} address", hint=f"it has {found[0].address}")
    first = fitting[0]
    same = [f for f in fitting if f.address == first.address]
    if len(same) > 1:
        raise QueryError(f"{name} has several ports", hint=f"name one: {', '.join(map(str, same))}")
    return first


def _frontends(forwarding: Forwarding) -> list[Frontend]:
    addresses = (*forwarding.addresses, *(external.address for external in forwarding.external_addresses))
    return [Frontend(address, forwarding.port, forwarding.key.protocol) for address in addresses]


def _meant_as_address(target: str) -> bool:
    """Whether a target that is no frontend was intended as one: then its fault is the better message."""
    if target.startswith("[") or ":" in target:
        return True
    try:
        parse_address(target.partition("/")[0])
    except InvalidTextError:
        return False
    return True


def _chosen_source(destination: str, host_addresses: Collection[str]) -> str:
    """The probable source of a local process: the destination itself if that is local, else an own address.

    The kernel chooses by its routes, which this does not read.
    """
    if is_own(destination, host_addresses):
        return destination
    wanted = (ip_address(a) for a in host_addresses if family_of(a) is family_of(destination))
    usable = sorted(int(a) for a in wanted if not (a.is_loopback or a.is_link_local))
    if not usable:
        raise QueryError(
            f"this host has no address to reach {socket_text(destination, 0).removesuffix(':0')} from",
            hint="give one with --from",
        )
    return str(type(ip_address(destination))(usable[0]))
