"""One lookup, by dnspython: asks the name servers for a name's addresses, or its SRV records and the
addresses of their targets.

It blocks, and is called in a thread of the worker process (`remote.py`). What dnspython reads of an answer is
bounded: it takes 80 ms for 64 KiB, and threads that compute hold the event loop up, by which the worker
checks backends. dnspython follows aliases, repeats a truncated answer over TCP, accepts only answers to its
own question, and goes on to the next server when one fails. It is imported with the first lookup.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from vipd.host.bounded_threads import BoundedThreads
from vipd.model.service import Family, NameKind, socket_text
from vipd.resolver.answers import LookupResult, NameState, Part, Question, Target, limited

if TYPE_CHECKING:
    import dns.resolver

LOOKUPS_AT_ONCE = 16
"""Threads. A server that does not answer occupies one for the time of a lookup."""
LONGEST = 3
"""A lookup takes at most so many times the timeout for one question."""
RESOLV_CONF = Path("/etc/resolv.conf")
DNS_PORT = 53
TRY_SECONDS = 2.0
"""The longest that one server may take before the next one is asked."""
MAX_UDP_BYTES = 1232
"""Largest answer over UDP: it passes every link unfragmented (the DNS flag day of 2020)."""
MAX_SERVERS_NAMED = 3
_TRUNCATED = 0x02
"""The bit TC, in the third byte of a message."""
_COUNTS = struct.Struct("!4x4H")
"""The numbers of a message's questions and of its records in three sections, in its first 12 bytes."""

_TYPES = {Family.IPV4: "A", Family.IPV6: "AAAA"}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which name servers are asked, and how long."""

    servers: tuple[tuple[str, int], ...] = ()
    """Addresses and ports; none: those in /etc/resolv.conf."""
    timeout: float = 5.0
    """Seconds for the answer to one question by any of the servers."""
    resolv_conf: Path = RESOLV_CONF


class _LookupError(Exception):
    """Why a question has no answer, in one line."""


class _TooLargeError(EOFError):
    """An answer is too large to be read."""


class _BoundedSocket(socket.socket):
    """Receives no more of one answer than `most` addresses or SRV records need."""

    def __init__(self, most: int, *arguments: int) -> None:
        super().__init__(*arguments)
        # 40 bytes for each AAAA or SRV record, and some for long names.
        self._most_bytes, self._most_records = 2048 + 40 * most, 100 + 2 * most
        self._begin = b""

    def recvfrom(self, *_: object) -> tuple[bytes, object]:
        """A datagram. One that is larger than was asked for counts as truncated: TCP is tried then."""
        data, address = super().recvfrom(MAX_UDP_BYTES + 1)
        if len(data) > MAX_UDP_BYTES:
            data = data[:2] + bytes([data[2] | _TRUNCATED]) + data[3:MAX_UDP_BYTES]
        return data, address

    def recv(self, size: int, *_: object) -> bytes:
        """A part of an answer over TCP: two bytes with its length, then it. Raises _TooLargeError."""
        if size > self._most_bytes:
            raise _TooLargeError
        data = super().recv(size)
        if (missing := 2 + _COUNTS.size - len(self._begin)) > 0:
            self._begin += data[:missing]
            if len(data) >= missing and sum(_COUNTS.unpack(self._begin[2:])) > self._most_records:
                raise _TooLargeError
        return data


class _Records(NamedTuple):
    values: tuple[tuple[object, ...], ...]
    ttl: float


def look_up(
    question: Question,
    families: Collection[Family],
    options: ServerOptions,
    known: NameState,
    most: int = 100,
) -> LookupResult:
    """Ask for a name. Returns at most `most` targets, first those that serve already. Takes at most LONGEST
    times the timeout. Never raises for what a server does or does not."""
    try:
        resolver = _resolver(options, most)
        if question.kind is NameKind.SRV:
            return _service_targets(resolver, question.name, families, known, most)
        found, ttl, failed = _addresses(resolver, question.name, families)
    except _LookupError as error:
        return LookupResult(fault=str(error))
    if failed and not found:
        return LookupResult(fault=next(iter(failed.values())))
    targets, left_out = limited(map(Target, found), known, most)
    parts = {Part("", family): why for family, why in failed.items()}
    return LookupResult(tuple(targets), ttl, failed=parts, left_out=left_out)


LookUp = Callable[[Question, Collection[Family], ServerOptions, NameState, int], LookupResult]


class LookupThreads:
    """Looks names up in threads, LOOKUPS_AT_ONCE at once."""

    def __init__(self, function: LookUp = look_up) -> None:
        self._look_up = function
        self._threads = BoundedThreads("vipd resolver", LOOKUPS_AT_ONCE)

    async def __call__(
        self,
        question: Question,
        families: Collection[Family],
        options: ServerOptions,
        known: NameState,
        most: int,
    ) -> LookupResult:
        """As `look_up`."""
        call = partial(self._look_up, question, families, options, known, most)
        return await asyncio.wrap_future(self._threads.submit(call))


def _service_targets(
    resolver: dns.resolver.Resolver,
    name: str,
    families: Collection[Family],
    known: NameState,
    most: int,
) -> LookupResult:
    """The targets of SRV records, with their addresses."""
    records = _ask(resolver, name, "SRV")
    deadline = monotonic() + 2 * resolver.lifetime
    ttl, targets, failed = records.ttl, list[Target](), dict[Part, str]()
    hosts: dict[str, list[tuple[int, int, int]]] = {}
    serving = {target.host for target in known.established}
    for priority, weight, port, host in sorted(records.values, key=partial(_record_order, serving)):
        # A target of "." says that there is no such service (RFC 2782); port 0 is none.
        if host and port and (host in hosts or len(hosts) < most):
            hosts.setdefault(str(host), []).append((int(str(port)), int(str(priority)), int(str(weight))))
    for host, places in hosts.items():
        if monotonic() > deadline:
            failed.update({Part(host, family): "the lookup took too long" for family in families})
            continue
        found, host_ttl, missing = _addresses(resolver, host, families)
        failed.update({Part(host, family): f"{host}: {why}" for family, why in missing.items()})
        ttl = min(ttl, host_ttl) if found else ttl
        targets += [Target(address, *place, host) for address in found for place in places]
    kept, left_out = limited(targets, known, most)
    left_out += max(0, len({r[3] for r in records.values if r[3]}) - len(hosts))
    return LookupResult(tuple(kept), ttl, failed=failed, left_out=left_out)


def _record_order(serving: Container[str], record: tuple[object, ...]) -> tuple[bool, int, str]:
    priority, _, _, host = record
    return str(host) not in serving, int(str(priority)), str(host)


def _addresses(
    resolver: dns.resolver.Resolver, name: str, families: Collection[Family]
) -> tuple[list[str], float, dict[Family, str]]:
    """The addresses of a name, their smallest TTL, and why families have no answer. A family without records
    is an answer if another has some; if none has, all have failed."""
    found, ttls = list[str](), list[float]()
    failed, empty = dict[Family, str](), dict[Family, str]()
    for family in sorted(families):
        try:
            records = _ask(resolver, name, _TYPES[family])
        except _LookupError as error:
            failed[family] = str(error)
            continue
        if not records.values:
            empty[family] = f"the name has no {_TYPES[family]} records"
        else:
            ttls.append(records.ttl)
            found += [str(address) for (address,) in records.values]
    return found, min(ttls, default=0.0), failed if found else {**empty, **failed}


def _ask(resolver: dns.resolver.Resolver, name: str, kind: str) -> _Records:
    """The records of one type; none if the name has no such records. Raises _LookupError."""
    import dns.exception
    import dns.name
    import dns.resolver

    try:
        answer = resolver.resolve(
            dns.name.from_text(f"{name}."), kind, raise_on_no_answer=False, search=False
        )
    except dns.resolver.NXDOMAIN:
        raise _LookupError("the name does not exist (NXDOMAIN)") from None
    except dns.resolver.LifetimeTimeout:
        servers = _servers_text(resolver)
        raise _LookupError(f"no answer within {resolver.lifetime:g} s from {servers}") from None
    except dns.resolver.NoNameservers as error:
        raise _LookupError(_refusals(error)) from None
    except (dns.exception.DNSException, OSError, ValueError) as error:
        raise _LookupError(f"the answer cannot be used: {type(error).__name__}") from None
    if answer.rrset is None:
        return _Records((), 0.0)
    return _Records(tuple(_values(answer.rrset, kind)), float(answer.chaining_result.minimum_ttl))


def _values(records: object, kind: str) -> Iterator[tuple[object, ...]]:
    for record in records:  # type: ignore[attr-defined]
        if kind == "SRV":
            host = record.target.to_text(omit_final_dot=True).lower()
            yield record.priority, record.weight, record.port, "" if host in (".", "@") else host
        else:
            yield (record.address,)


def _resolver(options: ServerOptions, most: int) -> dns.resolver.Resolver:
    """A resolver for these servers. /etc/resolv.conf is read each time: it may change while vipd runs.
    Raises _LookupError."""
    import dns.exception
    import dns.query
    import dns.resolver

    dns.query.socket_factory = partial(_BoundedSocket, most)
    try:
        if options.servers:
            resolver = dns.resolver.Resolver(configure=False)
            resolver.nameservers = [address for address, _ in options.servers]
            resolver.nameserver_ports = dict(options.servers)
        else:
            resolver = dns.resolver.Resolver(str(options.resolv_conf))
    except (dns.exception.DNSException, OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it names no usable name server"
        raise _LookupError(f"{options.resolv_conf}: {why}; hint: dns_servers in vipd's settings") from None
    if not resolver.nameservers:
        what = f"{options.resolv_conf} names no name server"
        raise _LookupError(f"{what}; hint: dns_servers in vipd's settings")
    resolver.lifetime, resolver.timeout = options.timeout, min(TRY_SECONDS, options.timeout / 2)
    resolver.use_edns(0, 0, MAX_UDP_BYTES)
    return resolver


def _servers_text(resolver: dns.resolver.Resolver) -> str:
    ports = resolver.nameserver_ports
    addresses = [str(server) for server in resolver.nameservers]
    named = [socket_text(a, ports[a]) if ports.get(a, DNS_PORT) != DNS_PORT else a for a in addresses]
    more = f" and {len(named) - MAX_SERVERS_NAMED} more" if len(named) > MAX_SERVERS_NAMED else ""
    return ", ".join(named[:MAX_SERVERS_NAMED]) + more


def _refusals(error: dns.resolver.NoNameservers) -> str:
    """What each server answered: `10.0.0.53 answered SERVFAIL`."""
    told = dict.fromkeys(
        f"{server} {_refusal(why)}" for server, _, _, why, _ in error.kwargs.get("errors", ())
    )
    return "; ".join(list(told)[:MAX_SERVERS_NAMED]) or "no server could answer"


def _refusal(why: object) -> str:
    if isinstance(why, _TooLargeError):
        return "sent an answer that is too large to be read; hint: dns_max_addresses in vipd's settings"
    if isinstance(why, OSError):
        return f"cannot be reached: {why.strerror or type(why).__name__}"
    if isinstance(why, Exception):
        return f"sent no usable answer ({type(why).__name__})"
    return f"answered {why}"
