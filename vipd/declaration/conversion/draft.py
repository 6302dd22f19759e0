"""Services as a converter reads them, and the services of vipd/v1 that are made of them. Pure.

A converter fills a `ServiceDraft`; `Conversion` makes services of the drafts, in the forms that vipd/v1 has,
and accepts only what the reader of vipd/v1 accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vipd.declaration.conflicts import claim_problem, conflicts_of
from vipd.declaration.conversion.directives import Directive, Keys, Report
from vipd.declaration.problems import Declaration
from vipd.declaration.reader import NO_DEFAULTS, read_service
from vipd.declaration.rules import DIVIDE_FILE, beyond_total
from vipd.declaration.service import ADDRESS, BACKENDS
from vipd.model import limits
from vipd.model.service import (
    MAX_SLOW_START_SECONDS,
    Balance,
    Family,
    Origin,
    Protocol,
    Service,
    ServicePort,
    family_of,
)

_ANY = {"0.0.0.0": Family.IPV4, "::": Family.IPV6}  # noqa: S104  it is read, and no socket is bound
"""The addresses of listeners on every address of the host."""
_EXAMPLES = {Family.IPV4: "10.96.0.10", Family.IPV6: "fd00:96::10"}
UNCHECKED = "none"
_ASKED_BY = {"udp": Protocol.UDP, "dns": Protocol.UDP, "exec": None}
"""The protocol of the port that a check of this type asks at; those of all others ask by TCP."""

_NO_NAME = re.compile(r"[^A-Za-z0-9._/-]+")
_FAMILIES = "vipd translates no address into one of the other family"
_NOTHING_LEFT = "is not converted: no address and port of it is left"
_NO_ADDRESS = "vipd refuses an address that a host has: remove it from all interfaces, and route it here"
_MAX_NAME_LENGTH = 120


class Listener(NamedTuple):
    """An address and port that clients connect to."""

    at: Directive
    address: str
    port: ServicePort


class Server(NamedTuple):
    """A backend: its keys in the declaration, among them `address`, `dns` or `srv`."""

    at: Directive
    keys: Keys

    @property
    def family(self) -> Family | None:
        """None of a server with a name."""
        return family_of(self.keys["address"]) if "address" in self.keys else None


@dataclass(slots=True)
class ServiceDraft:
    """A service as it is read. `keys`: those of the declaration that it has besides these fields."""

    conversion: Conversion
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

    def listen(self, at: Directive, protocol: Protocol, host: str, ports: str, *, both: bool = False) -> None:
        """Add a listener for `80`, or for each port of `80-90`. `*` is any address of IPv4; `both`: of each
        family, if it is any address of IPv6."""
        first, dash, last = ports.partition("-")
        address = at.read(ADDRESS.read, "0.0.0.0" if host == "*" else host)  # noqa: S104
        low = at.port(first)
        high = at.port(last) if dash else low
        if address is None or low is None or high is None:
            return
        if not 0 <= high - low < limits.PORTS:
            at.lost(f"is no range of 1 to {limits.PORTS} ports")
            return
        for own in _ANY if both and address == "::" else (address,):
            virtual = self.conversion.virtual.get(_ANY[own]) if own in _ANY else own
            if virtual is None:
                reason = "listens on every address of the host, and a service needs a virtual IP"
                at.lost(reason, f"name one: --address {_EXAMPLES[_ANY[own]]}")
                continue
            for number in range(low, high + 1):
                port = ServicePort(number, protocol, node_port=number if own in _ANY else None)
                self.listeners.append(Listener(at, virtual, port))

    @property
    def only_port(self) -> int | None:
        """The port of all listeners, if they have the same; a server without a port has it, too."""
        ports = {listener.port.port for listener in self.listeners}
        return ports.pop() if len(ports) == 1 else None

    def add(self, at: Directive, keys: Keys, *, resolved: bool = True, fallback: bool = False) -> bool:
        """Add a server, or one that serves when no other one can; reports an invalid address or name.

        A name that is not `resolved` by DNS is looked up by the host, whose resolver knows more names. SRV
        records say port and weight."""
        kind = next(kind for kind in ("address", "dns", "srv") if kind in keys)
        backends = None
        if kind != "address" and not resolved and "." not in keys[kind].rstrip("."):
            reason = "is not converted: such a name is from /etc/hosts, or below a search domain"
            at.lost(reason, f"write its address, or dns:{keys[kind]}.DOMAIN")
        else:
            backends = at.read(BACKENDS.read, {kind: keys[kind]}, ())
        if backends is None:
            self.lost_servers = self.lost_servers or not fallback
            return False
        if kind != "address":
            at.note("every address of the name serves, and vipd follows DNS")
        if kind == "srv" and keys.get("weight", 1) != 1:
            at.lost("the records say the weights")
        own = ("port", "weight") if kind == "srv" else ()
        keys = {key: value for key, value in keys.items() if value is not None and key not in own}
        (canonical,) = backends.by_address or backends.by_name
        keys[kind] = canonical.value.address if kind == "address" else canonical.value.name
        (self.fallback if fallback else self.servers).append(Server(at, {"check": UNCHECKED, **keys}))
        return True

    def slow_start(self) -> Keys:
        """The longest of its servers' times. What that changes is reported."""
        if not self.slow_starts:
            return {}
        longest = max(self.slow_starts)
        seconds = min(max(round(longest), 1), MAX_SLOW_START_SECONDS)
        if len(self.slow_starts) > 1 or abs(seconds - longest) > 0.001:
            at = self.slow_starts[longest].part(f"slow start of {longest:g} s")
            at.lost(f"is that of the whole service: {seconds} s was written")
        return {"slow_start": f"{seconds}s"}


class Conversion:
    """The services of one file."""

    def __init__(self, report: Report, addresses: Sequence[str] = ()) -> None:
        """`addresses`: virtual IPs in place of listeners on every address of the host, one of each family."""
        self.report = report
        self.virtual = {family_of(address): address for address in addresses}
        self._services: list[Service] = []
        self._size = 0
        """Of the services, in the units of `declared_size`."""
        self._names: set[str] = set()

    def add(self, draft: ServiceDraft) -> None:
        """Make services of a draft: one for all addresses with the same ports."""
        if not draft.listeners:
            draft.at.lost(_NOTHING_LEFT)
            return
        draft.servers, draft.fallback = _once(draft.servers), _once(draft.fallback)
        if not draft.servers and draft.lost_servers:
            draft.at.lost("is not converted: no server of it is left")
            return
        if "affinity" in draft.keys and len({listener.port for listener in draft.listeners}) > 1:
            draft.at.note("a client keeps its backend for each port separately")
        for listeners in _by_ports(draft.listeners):
            self._add_service(draft, listeners)

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
        for service in services:
            if address := next((a for a in service.addresses if a not in self.virtual.values()), ""):
                self.report.note(service.origin.line, f"address {address}", _NO_ADDRESS)
                break
        for service in services:
            if service.balance is Balance.SOURCE_HASH:
                reason = "needs the nftables dataplane; with iptables write affinity: client-ip"
                self.report.note(service.origin.line, "balance: source-hash", reason)
                break

    def _add_service(self, draft: ServiceDraft, listeners: Sequence[Listener]) -> None:
        """Make a service of listeners with the same ports."""
        families = {family_of(listener.address) for listener in listeners}
        servers = _of_families(draft, draft.servers, families)
        if draft.servers and all(server.family for server in draft.servers):
            families &= {server.family for server in servers if server.family}
            for listener in listeners:
                if family_of(listener.address) not in families:
                    listener.at.lost(_FAMILIES, "name servers of this family")
            listeners = [listener for listener in listeners if family_of(listener.address) in families]
        if not listeners:
            draft.at.lost(_NOTHING_LEFT)
            return
        keys = _service_keys(draft, listeners, servers, _of_families(draft, draft.fallback, families))
        if name := self._name(draft.name):
            keys["name"] = name
        origin = Origin("file", self.report.file, draft.at.line)
        service: Service | None = draft.at.read(
            lambda value, path, faults: read_service(value, path, faults, NO_DEFAULTS, origin), keys
        )
        if service is None:
            draft.at.lost("is not converted")
            return
        self._size += limits.declared_size(service)
        if beyond := beyond_total(self._size, len(self._services) + 1):
            self.report.problem(draft.at.line, "", beyond, DIVIDE_FILE)
            return
        self._services.append(service)
        self._names.add(service.name)

    def _name(self, wanted: str) -> str:
        """A valid name like the wanted one, which no service has yet; empty if nothing of it is valid."""
        name = _NO_NAME.sub("-", wanted)[:_MAX_NAME_LENGTH].strip("._/-")
        number, numbered = 1, name
        while numbered in self._names:
            number += 1
            numbered = f"{name}-{number}"
        return numbered


def _once(servers: Iterable[Server]) -> list[Server]:
    """The servers without those that repeat an address and port, or a name; reports these."""
    first: dict[tuple[str | int | None, ...], Server] = {}
    for server in servers:
        identity = tuple(server.keys.get(key) for key in ("address", "dns", "srv", "port"))
        earlier = first.setdefault(identity, server)
        if earlier is server:
            continue
        if not server.family and earlier.keys == server.keys:
            server.at.note("every address of this name serves already")
        else:
            server.at.lost("stands already in this service")
    return list(first.values())


def _of_families(draft: ServiceDraft, servers: Sequence[Server], families: set[Family]) -> list[Server]:
    """The servers by name, and those of the families; reports the others."""
    kept = [server for server in servers if not server.family or server.family in families]
    for server in servers:
        if server.family and server.family not in families:
            server.at.lost(_FAMILIES)
    if len({server.family for server in kept} - {None}) > 1:
        draft.at.note("clients reach the servers of their own address family alone")
    return kept


def _by_ports(listeners: Iterable[Listener]) -> list[list[Listener]]:
    """The listeners of all addresses that have the same ports, together."""
    addresses: dict[str, list[Listener]] = {}
    for listener in listeners:
        addresses.setdefault(listener.address, []).append(listener)
    groups: dict[tuple[ServicePort, ...], list[Listener]] = {}
    for same_address in addresses.values():
        ports = tuple(dict.fromkeys(listener.port for listener in same_address))
        groups.setdefault(ports, []).extend(same_address)
    return list(groups.values())


def _service_keys(
    draft: ServiceDraft, listeners: Sequence[Listener], servers: Iterable[Server], fallback: Iterable[Server]
) -> Keys:
    """The keys of a service but its name: what its backends have in common belongs to it."""
    ports = list(dict.fromkeys(listener.port for listener in listeners))
    numbers = {port.port for port in ports}
    only = ports[0].port if len(numbers) == 1 else None
    backends = [_with_check_port(server.keys, ports, only) for server in servers]
    last = [_with_check_port(server.keys, ports, only) for server in fallback]
    checks = [keys["check"] for keys in backends]
    common: Keys = {"check": checks[0] if checks and all(c == checks[0] for c in checks) else UNCHECKED}
    targets = {keys.get("port", only) for keys in (*backends, *last) if "srv" not in keys}
    if only and len(targets) == 1:
        common["port"] = targets.pop()

    def alone(keys: Keys) -> Keys:
        """What a backend has for itself."""
        return {key: value for key, value in keys.items() if common.get(key) != value}

    return {
        **draft.keys,
        "address": list(dict.fromkeys(listener.address for listener in listeners)),
        "ports": [_port_keys(port, common.get("port")) for port in ports],
        "backends": [alone(keys) for keys in sorted(backends, key=lambda keys: "address" not in keys)],
        **({"fallback": {"backends": [alone(keys) for keys in last]}} if last else {}),
        "check": common["check"],
        **draft.slow_start(),
    }


def _port_keys(port: ServicePort, target: int | None) -> Keys:
    keys = {"port": port.port, "protocol": port.protocol.value, "node_port": port.node_port}
    keys["target"] = None if target == port.port else target
    return {key: value for key, value in keys.items() if value is not None}


def _with_check_port(keys: Keys, ports: Sequence[ServicePort], only: int | None) -> Keys:
    """The keys of a backend with a port in its check only where the check would find another one, or none.
    `only`: the only port of the service."""
    if keys["check"] == UNCHECKED:
        return keys
    check = dict(keys["check"])
    port = check.pop("port", None)
    protocol = _ASKED_BY.get(check["type"], Protocol.TCP)
    if port is None and protocol and protocol not in {port.protocol for port in ports}:
        port = keys.get("port") or ports[0].port
    elif port == keys.get("port", None if "srv" in keys else only):
        port = None
    return {**keys, "check": check if port is None else {**check, "port": port}}
