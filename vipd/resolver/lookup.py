"""One lookup: asks the name servers for a name's addresses, or for its SRV records and the addresses of their
targets.

The worker process does it (`worker_lookups.py`), on the event loop by which it checks backends: what is read
of an answer is bounded, so that each takes a few milliseconds at most. A server that fails is asked no more,
one that does not answer is asked again after the others; what is no answer to the own question is passed
over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from vipd.declaration.dns_names import parse_dns_name
from vipd.declaration.syntax import InvalidTextError
from vipd.host.dns_message import HEADER, MalformedError, Record, Reply, encode_query, read_reply
from vipd.host.resolv_conf import resolv_conf_servers
from vipd.model.service import Family, NameKind, socket_text
from vipd.resolver.answers import LookupResult, NameState, Part, Question, Target, limited

LONGEST = 3
"""A lookup takes at most so many times the timeout for one question."""
RESOLV_CONF = Path("/etc/resolv.conf")
DNS_PORT = 53
TRY_SECONDS = 2.0
"""The longest that one server may take before the next one is asked."""
MAX_UDP_BYTES = 1232
"""Largest answer over UDP: it passes every link unfragmented (the DNS flag day of 2020)."""
HOSTS_AT_ONCE = 8
"""Targets of SRV records whose addresses are asked for at the same time."""
_MOST_SHOWN = 3
"""Servers that a fault names."""
_MOST_CANDIDATES = 4
"""Of so many times the addresses that a name may have those are chosen that serve."""
_MOST_ALIASES = 16
_MOST_OTHERS = 100
_READ_AHEAD = 4096
"""Bytes of a connection, besides those that are waited for."""
_TRUNCATED = 0x02
"""The bit TC, in the third byte of a message."""
_TYPES = {Family.IPV4: "A", Family.IPV6: "AAAA"}

Server = tuple[str, int]
"""Address and port."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which name servers are asked, and how long."""

    servers: tuple[Server, ...] = ()
    """None: those in /etc/resolv.conf."""
    timeout: float = 5.0
    """Seconds for the answer to one question by any of the servers."""
    resolv_conf: Path = RESOLV_CONF


class _LookupError(Exception):
    """Why a question has no answer, in one line."""


class _TooLargeError(ValueError):
    """An answer is too large to be read."""


@dataclass(frozen=True, slots=True)
class _Records:
    """Texts of the records of one type, and the smallest TTL on the way to them."""

    texts: Sequence[str] = ()
    ttl: float = 0.0


@dataclass(frozen=True, slots=True)
class _Addresses:
    """The addresses of a host, and why families have no answer. A family without records is an answer if
    another has some; if none has, all have failed."""

    addresses: list[str] = field(default_factory=list)
    ttls: list[float] = field(default_factory=list)
    failed: dict[Family, str] = field(default_factory=dict)
    left_out: int = 0


async def look_up(
    question: Question,
    families: Collection[Family],
    options: ServerOptions,
    known: NameState,
    most: int = 100,
) -> LookupResult:
    """Ask for a name. Returns at most `most` targets, first those that serve already. Takes at most LONGEST
    times the timeout. Never raises for what a server does or does not."""
    try:
        client = _Client(_servers(options), options.timeout, most)
        if question.kind is NameKind.SRV:
            return await _service_targets(client, question.name, families, known)
    except _LookupError as error:
        return LookupResult(fault=str(error))
    result = await _addresses(client, question.name, families)
    if not result.addresses:
        return LookupResult(fault=next(iter(result.failed.values())))
    targets, left_out = limited(map(Target, result.addresses), known, most)
    parts = {Part("", family): why for family, why in result.failed.items()}
    return LookupResult(tuple(targets), min(result.ttls), failed=parts, left_out=left_out)


async def _service_targets(
    client: _Client, name: str, families: Collection[Family], known: NameState
) -> LookupResult:
    """The targets of SRV records, with their addresses."""
    records = await client.ask(name, "SRV")
    hosts = _hosts(records)
    serving = {(target.host, target.address) for target in known.serving}
    established = {target.host for target in known.established}
    order = sorted(hosts, key=lambda host: (host not in established, min(r[1] for r in hosts[host]), host))
    results = await _addresses_of_hosts(client, order[: client.most], families, serving)

    def candidates() -> Iterator[Target]:
        for serves in (True, False):
            for host, result in results.items():
                for address in result.addresses:
                    if ((host, address) in serving) is serves:
                        yield from (Target(address, *record, host) for record in hosts[host])

    targets = list(islice(candidates(), _MOST_CANDIDATES * client.most))
    kept, left_out = limited(targets, known, client.most)
    number = sum((len(r.addresses) + r.left_out) * len(hosts[host]) for host, r in results.items())
    return LookupResult(
        tuple(kept),
        min([records.ttl, *(ttl for result in results.values() for ttl in result.ttls)]),
        failed={Part(h, f): f"{h}: {why}" for h, r in results.items() for f, why in r.failed.items()},
        left_out=left_out + number - len(targets) + len(order) - len(results),
    )


def _hosts(records: _Records) -> dict[str, list[tuple[int, int, int]]]:
    """The targets of SRV records, each with ports, priorities and weights."""
    hosts: dict[str, list[tuple[int, int, int]]] = {}
    for text in records.texts:
        priority, weight, port, host = text.split(" ", 3)
        # A target of "." says that there is no such service (RFC 2782), as does port 0.
        with contextlib.suppress(InvalidTextError):
            if port != "0":
                hosts.setdefault(parse_dns_name(host), []).append((int(port), int(priority), int(weight)))
    return hosts


async def _addresses_of_hosts(
    client: _Client, hosts: Sequence[str], families: Collection[Family], serving: Container[tuple[str, str]]
) -> dict[str, _Addresses]:
    """The addresses of each host, in the time of two questions. Those that serve, and so many others that
    hundreds of answers take little memory."""
    slots, room = asyncio.Semaphore(HOSTS_AT_ONCE), _MOST_CANDIDATES * client.most
    deadline = asyncio.get_running_loop().time() + (LONGEST - 1) * client.timeout

    async def addresses(host: str) -> _Addresses:
        nonlocal room
        try:
            async with asyncio.timeout_at(deadline), slots:
                result = await _addresses(client, host, families)
        except TimeoutError:
            return _Addresses(failed=dict.fromkeys(families, "the lookup took too long"))
        first = [address for address in result.addresses if (host, address) in serving]
        others = [address for address in result.addresses if (host, address) not in serving]
        kept = others[: max(0, room)]
        room -= len(kept)
        return replace(result, addresses=first + kept, left_out=len(others) - len(kept))

    return dict(zip(hosts, await asyncio.gather(*map(addresses, hosts)), strict=True))


async def _addresses(client: _Client, name: str, families: Collection[Family]) -> _Addresses:
    """The addresses of a name."""
    wanted, result, empty = sorted(families), _Addresses(), dict[Family, str]()
    answers = await asyncio.gather(
        *(client.ask(name, _TYPES[family]) for family in wanted), return_exceptions=True
    )
    for family, answer in zip(wanted, answers, strict=True):
        if isinstance(answer, _LookupError):
            result.failed[family] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        elif answer.texts:
            result.ttls.append(answer.ttl)
            result.addresses.extend(answer.texts)
        else:
            empty[family] = f"the name has no {_TYPES[family]} records"
    return result if result.addresses else _Addresses(failed={**empty, **result.failed})


def _servers(options: ServerOptions) -> Sequence[Server]:
    """The servers to ask. /etc/resolv.conf is read each time: it may change while vipd runs. Raises
    _LookupError."""
    why = "it names no usable name server"
    try:
        servers = options.servers or [(a, DNS_PORT) for a in resolv_conf_servers(options.resolv_conf)]
    except OSError as error:
        servers, why = (), error.strerror or why
    if not servers:
        raise _LookupError(f"{options.resolv_conf}: {why}; hint: dns_servers in vipd's settings")
    return servers


class _Client:
    """Asks name servers, and reads no more of an answer than `most` addresses or SRV records need."""

    def __init__(self, servers: Sequence[Server], timeout: float, most: int) -> None:
        self._servers, self.timeout, self.most = servers, timeout, most
        # 40 bytes for each AAAA or SRV record, and some for long names.
        self._most_bytes, self._most_records = 2048 + 40 * most, 100 + 2 * most

    async def ask(self, name: str, kind: str) -> _Records:
        """The records of one type, by the first server that has an answer; none if the name has no such
        records. Raises _LookupError."""
        refusals: dict[str, None] = {}
        servers = list(self._servers)
        try:
            async with asyncio.timeout(self.timeout):
                while servers:
                    server = servers.pop(0)
                    try:
                        async with asyncio.timeout(min(TRY_SECONDS, self.timeout / 2)):
                            reply = await self._exchange(server, name, kind)
                        if reply.rcode == "NOERROR":
                            return _at_end_of_aliases(reply, name, kind)
                        if reply.rcode == "NXDOMAIN":
                            raise _LookupError("the name does not exist (NXDOMAIN)")
                        refusals[f"{_server_text(server)} answered {reply.rcode}"] = None
                    except TimeoutError:
                        servers.append(server)
                    except (OSError, EOFError, ValueError) as error:
                        refusals[f"{_server_text(server)} {_refusal(error)}"] = None
        except TimeoutError:
            shown = ", ".join(map(_server_text, self._servers[:_MOST_SHOWN]))
            more = len(self._servers) - _MOST_SHOWN
            shown += f" and {more} more" if more > 0 else ""
            raise _LookupError(f"no answer within {self.timeout:g} s from {shown}") from None
        raise _LookupError("; ".join(list(refusals)[:_MOST_SHOWN]))

    async def _exchange(self, server: Server, name: str, kind: str) -> Reply:
        """The reply of one server, over TCP if it is too long for UDP. Raises OSError, EOFError and
        ValueError."""
        query = encode_query(secrets.randbelow(1 << 16), name, kind, MAX_UDP_BYTES)
        reply = await _reply_by_udp(server, query)
        if reply.truncated:
            return await self._reply_by_tcp(server, query)
        return reply

    async def _reply_by_tcp(self, server: Server, query: bytes) -> Reply:
        reader, writer = await asyncio.open_connection(*server, limit=_READ_AHEAD)
        try:
            writer.write(len(query).to_bytes(2, "big") + query)
            size = int.from_bytes(await reader.readexactly(2), "big")
            if size > self._most_bytes:
                raise _TooLargeError
            data = await reader.readexactly(min(size, HEADER.size))
            if size >= HEADER.size and sum(HEADER.unpack(data)[2:]) > self._most_records:
                raise _TooLargeError
            data += await reader.readexactly(size - len(data))
        finally:
            writer.transport.abort()
        reply = read_reply(data, query, self._most_records)
        if reply is None:
            raise MalformedError("it is to another question")
        return reply


async def _reply_by_udp(server: Server, query: bytes) -> Reply:
    """The reply to a query. Datagrams that are none are passed over, so that nobody who guesses keeps the
    right one away. Raises OSError and MalformedError."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as connection:
        connection.connect(server)  # from here on it receives from this server alone
        connection.send(query)
        for _ in range(_MOST_OTHERS):
            data = await loop.sock_recv(connection, MAX_UDP_BYTES + 1)
            if len(data) > MAX_UDP_BYTES:  # more than was asked for: as if it were truncated
                data = data[:2] + bytes([data[2] | _TRUNCATED]) + data[3:]
            with contextlib.suppress(MalformedError):
                if (reply := read_reply(data, query)) is not None:
                    return reply
            await asyncio.sleep(0)  # receiving does not wait while there is something to receive
    raise MalformedError(f"{_MOST_OTHERS} datagrams that are no answer")


def _at_end_of_aliases(reply: Reply, name: str, kind: str) -> _Records:
    """The records of a type that a reply has for a name or, by aliases, for another. Raises
    MalformedError."""
    by_owner: dict[tuple[str, str], list[Record]] = {}
    for record in reply.records:
        by_owner.setdefault((record.owner, record.kind), []).append(record)
    ttls = list[int]()
    for _ in range(_MOST_ALIASES):
        if records := by_owner.get((name, kind)):
            ttls += [record.ttl for record in records]
            return _Records([record.text for record in records], float(min(ttls)))
        if not (aliases := by_owner.get((name, "CNAME"))):
            return _Records()
        ttls.append(aliases[0].ttl)
        name = aliases[0].text.lower()
    raise MalformedError("aliases without an end")


def _server_text(server: Server) -> str:
    return socket_text(*server) if server[1] != DNS_PORT else server[0]


def _refusal(error: Exception) -> str:
    """Why the reply of a server is none."""
    if isinstance(error, _TooLargeError):
        return "sent an answer that is too large to be read; hint: dns_max_addresses in vipd's settings"
    if isinstance(error, OSError):
        return f"cannot be reached: {os.strerror(error.errno) if error.errno else error}"
    reason = "its connection ended" if isinstance(error, EOFError) else error
    return f"sent no usable answer ({reason})"
