"""Services as a converter reads them, and the services of vipd/v1 that are made of them. Pure.

A converter fills a `ServiceDraft`; `Conversion` makes services of the drafts, in the forms that vipd/v1 has,
and accepts only what the reader of vipd/v1 accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from vipd.declaration.conflicts import claim_problem, conflicts_of
from vipd.declaration.conversion.directives import Directive, Report
from vipd.declaration.dns_names import parse_dns_name
from vipd.declaration.problems import Declaration
from vipd.declaration.reader import parse_service
from vipd.declaration.rules import DIVIDE_FILE, beyond_total
from vipd.declaration.syntax import InvalidTextError
from vipd.model import limits
from vipd.model.service import (
    MAX_SLOW_START_SECONDS,
    Balance,
    Family,
    Origin,
    Protocol,
    Service,
    family_of,
    socket_text,
)

ANY_ADDRESS = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104  it is read, and no socket is bound
"""The address of a listener on every address of the host."""

Keys: TypeAlias = dict[str, Any]
"""Keys of a declaration with their values; None: not written."""
UNCHECKED = "none"
_ASKED_BY = {"udp": Protocol.UDP, "dns": Protocol.UDP, "exec": None}
"""The protocol of the port that a check of this type asks at; those of all others ask by TCP."""

_NO_NAME = re.compile(r"[^A-Za-z0-9._/-]+")
_FAMILIES = "vipd translates no address into one of the other family"
_NOTHING_LEFT = "is not converted: no address and port of it is left"
_MAX_NAME_LENGTH = 120


class Port(NamedTuple):
    """A port of a service, without its target."""

    port: int
    protocol: Protocol
    node_port: int | None = None


class Listener(NamedTuple):
    """An address and port that clients connect to."""

    at: Directive
    address: str
    port: Port


@dataclass(slots=True)
class Server:
    """A backend: its keys in the declaration, among them `address`, `dns` or `srv`."""

    at: Directive
    keys: Keys

    @property
    def address(self) -> str:
        """Empty for a server with a name."""
        return str(self.keys.get("address", ""))

    def __str__(self) -> str:
        port = self.keys.get("port")
        if self.address:
            return socket_text(self.address, port) if port else self.address
        kind = "srv" if "srv" in self.keys else "dns"
        return f"{kind}:{self.keys[kind]}" + (f":{port}" if port else "")


def server_keys(**keys: Any) -> Keys:
    """The keys of a backend, with those that a configuration does not name."""
    return {"weight": 1, "max_connections": None, "check": UNCHECKED, **keys}


@dataclass(slots=True)
class ServiceDraft:
    """A service as it is read. `keys`: those of the declaration that it has besides these fields."""

    at: Directive
    name: str = ""
    listeners: list[Listener] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    fallback: list[Server] = field(default_factory=list)
    lost_servers: bool = False
    """A server of it could not be converted."""
    keys: Keys = field(default_factory=dict)
    slow_starts: dict[float, Directive] = field(default_factory=dict)
    """The seconds that its servers have."""

    def listen(
        self, at: Directive, protocol: Protocol, address: str, ports: str, *, both: bool = False
    ) -> None:
        """Add a listener for `80`, or for each port of `80-90`. `both`: for any address of each family, if
        its own is any of IPv6."""
        canonical = at.address(address)
        first, dash, last = ports.partition("-")
        low = at.port(first)
        high = at.port(last) if dash else low
        if canonical is None or low is None or high is None:
            return
        if not 0 <= high - low < limits.PORTS:
            at.lost(f"is no range of 1 to {limits.PORTS} ports")
            return
        addresses = ANY_ADDRESS.values() if both and canonical == ANY_ADDRESS[Family.IPV6] else (canonical,)
        numbers = range(low, high + 1)
        self.listeners += [Listener(at, host, Port(port, protocol)) for host in addresses for port in numbers]

    def add_named(self, at: Directive, kind: str, name: str, keys: Keys, *, by_host: bool) -> bool:
        """Add a server by `dns` or `srv`, unless its name is none of DNS; without a dot it is none where the
        host's own resolver looks it up. SRV records say port and weight; another weight is reported."""
        if by_host and "." not in name.rstrip("."):
            reason = "is not converted: such a name is from /etc/hosts, or below a search domain"
            at.lost(reason, f"write its address, or dns:{name}.DOMAIN")
            self.lost_servers = True
            return False
        try:
            keys = {**keys, kind: parse_dns_name(name)}
        except InvalidTextError as error:
            at.lost(error.what, error.hint)
            self.lost_servers = True
            return False
        del keys["address"]
        if kind == "srv":
            if keys["weight"] != 1:
                at.lost("the records say the weights")
            del keys["port"], keys["weight"]
        self.servers.append(Server(at, keys))
        return True

    def slow_start(self) -> int:
        """The longest of its servers' times. What that changes is reported."""
        longest = max(self.slow_starts, default=0)
        seconds = min(max(round(longest), 1), MAX_SLOW_START_SECONDS) if self.slow_starts else 0
        if len(self.slow_starts) > 1 or abs(seconds - longest) > 0.001:
            at = self.slow_starts[longest].part(f"slow start of {longest:g} s")
            at.lost(f"is that of the whole service: {seconds} s was written")
        return seconds


class Conversion:
    """The services of one file."""

    def __init__(self, report: Report, addresses: Sequence[str] = ()) -> None:
        """`addresses`: virtual IPs in place of listeners on every address of the host, one of each family."""
        self.report = report
        self._virtual = {family_of(address): address for address in addresses}
        self._services: list[Service] = []
        self._size = 0
        """Of the services, in the units of `declared_size`."""
        self._names: set[str] = set()

    def add(self, draft: ServiceDraft) -> None:
        """Make services of a draft: one for all addresses with the same ports."""
        listeners = list(self._virtual_listeners(draft))
        draft.servers, draft.fallback = self._once(draft.servers), self._once(draft.fallback)
        if not listeners:
            draft.at.lost(_NOTHING_LEFT)
        elif not draft.servers and draft.lost_servers:
            draft.at.lost("is not converted: no server of it is left")
        else:
            if "affinity" in draft.keys and len({listener.port for listener in listeners}) > 1:
                draft.at.note("a client keeps its backend for each port separately")
            for group in _by_ports(listeners):
                self._add_service(draft, group)

    def finish(self) -> Declaration:
        """All services that claim nothing twice, and what was not converted, by line."""
        kept = {id(service): service for service in self._services}
        for service, claim, owner in conflicts_of(self._services):
            self.report.problems.add(claim_problem(service, claim, owner))
            kept.pop(id(service), None)
        services = tuple(kept.values())
        if not services and not self.report.problems:
            self.report.problem(0, "", "nothing in it is a service that vipd could serve")
        self._advise(services)
        return Declaration(services, self.report.problems.by_line(), self.report.notes())

    def _advise(self, services: Sequence[Service]) -> None:
        """Note, once a file, what its services need of the host."""
        virtual = set(self._virtual.values())
        claiming = [service for service in services if not virtual.issuperset(service.addresses)]
        if claiming:
            first = next(address for address in claiming[0].addresses if address not in virtual)
            reason = (
                "vipd refuses an address that a host has: remove it from all interfaces, and route it here"
            )
            self.report.note(claiming[0].origin.line, f"address {first}", reason)
        hashed = [service for service in services if service.balance is Balance.SOURCE_HASH]
        if hashed:
            reason = "needs the nftables dataplane; with iptables write affinity: client-ip"
            self.report.note(hashed[0].origin.line, "balance: source-hash", reason)

    def _virtual_listeners(self, draft: ServiceDraft) -> Iterator[Listener]:
        """The listeners, with a virtual IP and a node port for those on every address of the host."""
        for listener in draft.listeners:
            family = family_of(listener.address)
            if listener.address != ANY_ADDRESS[family]:
                yield listener
            elif family in self._virtual:
                port = listener.port._replace(node_port=listener.port.port)
                yield Listener(listener.at, self._virtual[family], port)
            else:
                example = "fd00:96::10" if family is Family.IPV6 else "10.96.0.10"
                reason = "listens on every address of the host, and a service needs a virtual IP"
                listener.at.lost(reason, f"name one: --address {example}")

    def _once(self, servers: Iterable[Server]) -> list[Server]:
        """The servers without those that repeat an address and port, or a name; reports these."""
        first: dict[str, Server] = {}
        for server in servers:
            earlier = first.setdefault(str(server), server)
            if earlier is server:
                continue
            if server.address:
                reason = f"{server} stands already in this service"
                server.at.lost(reason, "add its weight to that of the first")
            elif earlier.keys == server.keys:
                server.at.note(f"every address of {server} serves already")
            else:
                reason = f"{server} stands already in this service, with other parameters"
                server.at.lost(reason, "leave one of them")
        return list(first.values())

    def _of_families(
        self, draft: ServiceDraft, servers: Sequence[Server], families: set[Family]
    ) -> list[Server]:
        """The servers by name, and those of the families; reports the others."""
        kept = [s for s in servers if not s.address or family_of(s.address) in families]
        for server in servers:
            if server.address and family_of(server.address) not in families:
                server.at.lost(_FAMILIES)
        if len({family_of(server.address) for server in kept if server.address}) > 1:
            draft.at.note("clients reach the servers of their own address family alone")
        return kept

    def _add_service(self, draft: ServiceDraft, listeners: Sequence[Listener]) -> None:
        """Make a service of listeners with the same ports."""
        families = {family_of(listener.address) for listener in listeners}
        servers = self._of_families(draft, draft.servers, families)
        if draft.servers and all(server.address for server in draft.servers):
            serving = {family_of(server.address) for server in servers}
            for listener in listeners:
                if family_of(listener.address) not in serving:
                    listener.at.lost(_FAMILIES, "name servers of this family")
            listeners = [listener for listener in listeners if family_of(listener.address) in serving]
            families &= serving
        if not listeners:
            draft.at.lost(_NOTHING_LEFT)
            return
        fallback = self._of_families(draft, draft.fallback, families)
        keys = _service_keys(draft, listeners, servers, fallback)
        if name := self._name(draft.name):
            keys["name"] = name
        service = self._read(draft, keys)
        if service is None:
            draft.at.lost("is not converted")
            return
        self._size += limits.declared_size(service)
        if beyond := beyond_total(self._size, len(self._services) + 1):
            self.report.problem(draft.at.line, "", beyond, DIVIDE_FILE)
            return
        self._services.append(service)
        self._names.add(service.name)

    def _read(self, draft: ServiceDraft, keys: Keys) -> Service | None:
        """The service of these keys; None after reporting what the reader of vipd/v1 does not accept."""
        service, problems = parse_service(keys, Origin("file", self.report.file, draft.at.line))
        for problem in problems:
            path = f"{draft.at}: {problem.path}" if problem.path else str(draft.at)
            self.report.problem(draft.at.line, path, problem.what, problem.hint)
        return None if problems else service

    def _name(self, wanted: str) -> str:
        """A valid name like the wanted one, which no service has yet; empty if nothing of it is valid."""
        name = _NO_NAME.sub("-", wanted)[:_MAX_NAME_LENGTH].strip("._/-")
        number, numbered = 1, name
        while numbered in self._names:
            number += 1
            numbered = f"{name}-{number}"
        return numbered


def _ports_of(listeners: Iterable[Listener]) -> tuple[Port, ...]:
    """The ports of listeners at one address, each once."""
    return tuple(dict.fromkeys(listener.port for listener in listeners))


def _by_ports(listeners: Iterable[Listener]) -> list[list[Listener]]:
    """The listeners of all addresses that have the same ports, together."""
    addresses: dict[str, list[Listener]] = {}
    for listener in listeners:
        addresses.setdefault(listener.address, []).append(listener)
    groups: dict[tuple[Port, ...], list[Listener]] = {}
    for same_address in addresses.values():
        groups.setdefault(_ports_of(same_address), []).extend(same_address)
    return list(groups.values())


def _service_keys(
    draft: ServiceDraft, listeners: Sequence[Listener], servers: Iterable[Server], fallback: Iterable[Server]
) -> Keys:
    """The keys of a service but its name: what its backends have in common belongs to it."""
    addresses = list(dict.fromkeys(listener.address for listener in listeners))
    ports = _ports_of(listener for listener in listeners if listener.address == addresses[0])
    numbers = {port.port for port in ports}
    only = numbers.pop() if len(numbers) == 1 else None
    backends = [_with_check_port(server.keys, ports, only) for server in servers]
    last = [_with_check_port(server.keys, ports, only) for server in fallback]
    checks = [keys["check"] for keys in backends]
    check = checks[0] if checks and all(other == checks[0] for other in checks) else UNCHECKED
    targets = {keys["port"] or only for keys in (*backends, *last) if "srv" not in keys}
    target = targets.pop() if len(targets) == 1 and only is not None else None

    def alone(keys: Keys) -> Keys:
        """What a backend has for itself."""
        common = {"check": check} if target is None else {"check": check, "port": keys.get("port")}
        return {key: value for key, value in _present(keys).items() if common.get(key) != value}

    keys = {
        **draft.keys,
        "address": addresses,
        "ports": [_port_keys(port, None if target == only else target) for port in ports],
        "backends": [alone(keys) for keys in sorted(backends, key=lambda keys: "address" not in keys)],
        "fallback": {"backends": [alone(keys) for keys in last]} if last else None,
        "check": check,
        "slow_start": f"{seconds}s" if (seconds := draft.slow_start()) else None,
    }
    return _present(keys)


def _present(keys: Keys) -> Keys:
    return {key: value for key, value in keys.items() if value is not None}


def _port_keys(port: Port, target: int | None) -> Keys:
    return _present({**port._asdict(), "protocol": port.protocol.value, "target": target})


def _with_check_port(keys: Keys, ports: Sequence[Port], only: int | None) -> Keys:
    """The keys of a backend with a port in its check only where the check would find another one, or none.
    `only`: the only port of the service."""
    check = keys["check"]
    if check == UNCHECKED:
        return keys
    port = check.get("port")
    protocol = _ASKED_BY.get(check["type"], Protocol.TCP)
    if port is None and protocol and protocol not in {port.protocol for port in ports}:
        port = keys.get("port") or ports[0].port
    elif port == (keys.get("port") or (None if "srv" in keys else only)):
        port = None
    return {**keys, "check": _present({**check, "port": port})}
