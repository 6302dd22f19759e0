"""What every converter collects: drafts of services, and what cannot be converted. Pure.

A converter reads its own format into `ServiceDraft`s; `Conversion` makes services of them, in the forms that
vipd/v1 has, and accepts only what the reader of vipd/v1 accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vipd.declaration.conflicts import claim_problem, conflicts_of
from vipd.declaration.dns_names import is_bare_name, parse_backend_address, parse_dns_name
from vipd.declaration.fields import Located, Report
from vipd.declaration.formatting import service_to_spec
from vipd.declaration.native import parse_service
from vipd.declaration.problems import Declaration
from vipd.declaration.service_rules import FORBIDDEN_BACKEND_KINDS, address_kind, required_protocol
from vipd.declaration.service_size import check_total_size
from vipd.declaration.syntax import MAX_PORT, InvalidTextError, parse_address, quoted
from vipd.model import limits
from vipd.model.check import (
    MAX_CHECK_SECONDS,
    MAX_COUNT,
    MIN_CHECK_SECONDS,
    UNCHECKED,
    Check,
    InitialHealth,
    Timing,
)
from vipd.model.flow_limits import MAX_CONNECTIONS
from vipd.model.service import (
    MAX_AFFINITY_SECONDS,
    MAX_SLOW_START_SECONDS,
    MAX_WEIGHT,
    Affinity,
    Backend,
    BackendState,
    Balance,
    Family,
    Frontend,
    Masquerade,
    NamedBackend,
    NameKind,
    Origin,
    Protocol,
    Service,
    ServicePort,
    family_of,
)
from vipd.model.text import shortened

ANY_ADDRESS = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}  # noqa: S104  it is read, and no socket is bound
"""The address of a listener on every address of the host."""

_NO_NAME = re.compile(r"[^A-Za-z0-9._/-]+")
_FAMILIES = "vipd translates no address into one of the other family"
_MAX_NAME_LENGTH = 120
_MAX_SHOWN_LENGTH = 120
"""Characters of a line of the configuration that a message quotes."""
_INTEGER = re.compile(r"[0-9]{1,10}")
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True)
class Listener:
    """An address and port that clients connect to, with its place in the configuration."""

    address: str
    port: int
    protocol: Protocol
    line: int
    what: str
    node_port: int | None = None


@dataclass(slots=True)
class ServiceDraft:
    """A service as it is read. A backend has its own check, or UNCHECKED; its `path` names it in messages."""

    line: int
    what: str
    """How messages name it: `virtual_server 10.96.0.10 80`."""
    name: str = ""
    listeners: list[Listener] = field(default_factory=list)
    backends: list[Located[Backend]] = field(default_factory=list)
    names: list[Located[NamedBackend]] = field(default_factory=list)
    fallback: list[Located[Backend]] = field(default_factory=list)
    lost_backends: bool = False
    """A server of it could not be converted."""
    balance: Balance = Balance.RANDOM
    affinity: Affinity | None = None
    masquerade: Masquerade | None = None
    slow_start: int = 0


@dataclass(frozen=True, slots=True)
class _Servers:
    """The backends of a draft in the form of vipd/v1: what they have in common belongs to the service."""

    backends: tuple[Backend, ...]
    names: tuple[NamedBackend, ...]
    fallback: tuple[Backend, ...]
    check: Check
    ports: tuple[ServicePort, ...]


class Conversion:
    """The services of one file, and every line of it that has no counterpart."""

    def __init__(self, path: str, addresses: Sequence[str] = ()) -> None:
        """`addresses`: virtual IPs in place of listeners on every address of the host, one of each family."""
        self._report = Report(path, most=limits.ALL_PROBLEMS)
        self._path = path
        self._virtual = {family_of(address): address for address in addresses}
        self._services: list[Service] = []
        self._names: set[str] = set()

    def lost(self, line: int, what: str, why: str, hint: str = "") -> None:
        """Report a part that changes where flows go, or fails, and that the services do not have."""
        self._report.add(line, shortened(what, _MAX_SHOWN_LENGTH), why, hint)

    def note(self, line: int, what: str, why: str) -> None:
        """Report a part that was left out, and changes nothing about flows that vipd could do."""
        self._report.note(line, f"{shortened(what, _MAX_SHOWN_LENGTH)}: {why}")

    def reading(self) -> Report:
        """For problems of the text itself, and to contain faults."""
        return self._report

    def address(self, line: int, what: str, text: str) -> str | None:
        """A canonical address; None after reporting why the text is none."""
        try:
            return parse_address(text)
        except InvalidTextError as error:
            self.lost(line, what, error.what, error.hint)
            return None

    def integer(self, line: int, what: str, text: str, low: int, high: int) -> int | None:
        """A whole number within limits; None after a report."""
        if _INTEGER.fullmatch(text) and low <= int(text) <= high:
            return int(text)
        self.lost(line, what, f"{quoted(text)} is not a whole number from {low} to {high}")
        return None

    def port(self, line: int, what: str, text: str) -> int | None:
        """A port number; None after a report."""
        return self.integer(line, what, text, 1, MAX_PORT)

    def weight(self, line: int, what: str, text: str) -> int:
        """A weight. A larger one than vipd has is reported, and becomes the largest; any other text 1."""
        if _INTEGER.fullmatch(text) and int(text) > MAX_WEIGHT:
            self.lost(line, what, f"the largest weight is {MAX_WEIGHT}", "divide all weights of this service")
            return MAX_WEIGHT
        found = self.integer(line, what, text, 0, MAX_WEIGHT)
        return 1 if found is None else found

    def max_connections(self, line: int, what: str, backend: Backend, text: str) -> Backend:
        """The backend with a limit of its connections, 0 meaning none; unchanged after a report."""
        most = self.integer(line, what, text, 0, MAX_CONNECTIONS)
        return replace(backend, max_connections=most) if most else backend

    def seconds(self, line: int, what: str, text: str) -> float | None:
        """A decimal number of seconds; None after a report."""
        if _SECONDS.fullmatch(text):
            return float(text)
        self.lost(line, what, f"{quoted(text)} is not a number of seconds")
        return None

    def affinity(self, line: int, what: str, seconds: float | None) -> Affinity:
        """Affinity for so long; None: for ever. What vipd cannot do is reported, and shortened."""
        if seconds is None or seconds > MAX_AFFINITY_SECONDS:
            self.lost(line, what, "a client keeps its backend for one day at most", "1d was written")
            return Affinity(MAX_AFFINITY_SECONDS)
        return Affinity(max(1, round(seconds)))

    def timing(self, line: int, what: str, timing: Timing) -> Timing:
        """The timing within the limits of vipd/v1; a note says what was changed."""
        interval = _within(timing.interval, MIN_CHECK_SECONDS, MAX_CHECK_SECONDS)
        found = replace(
            timing,
            interval=interval,
            timeout=_within(timing.timeout, MIN_CHECK_SECONDS, interval),
            rise=min(max(timing.rise, 1), MAX_COUNT),
            fall=min(max(timing.fall, 1), MAX_COUNT),
        )
        for name in ("interval", "timeout", "rise", "fall"):
            was, became = getattr(timing, name), getattr(found, name)
            if abs(was - became) > 0.001:
                self.note(line, what, f"{name} {was:g} became {became:g}: a check of vipd allows no other")
        return found

    def listen(self, draft: ServiceDraft, each: Listener, ports: str, *, both: bool = False) -> None:
        """Add the listener for `80`, or for each port of `80-90`. `both`: for any address of each family, if
        its own is any of IPv6."""
        address = self.address(each.line, each.what, each.address)
        first, dash, last = ports.partition("-")
        low = self.port(each.line, each.what, first)
        high = self.port(each.line, each.what, last) if dash else low
        if address is None or low is None or high is None:
            return
        if not 0 <= high - low < limits.PORTS:
            self.lost(each.line, each.what, f"is no range of 1 to {limits.PORTS} ports")
            return
        addresses = ANY_ADDRESS.values() if both and address == ANY_ADDRESS[Family.IPV6] else (address,)
        draft.listeners += [
            replace(each, address=found, port=port) for found in addresses for port in range(low, high + 1)
        ]

    def set_slow_start(self, draft: ServiceDraft, times: Mapping[float, int]) -> None:
        """Give a draft the longest of its servers' times, which have lines. What that changes is reported."""
        if not times:
            return
        longest = max(times)
        draft.slow_start = min(max(round(longest), 1), MAX_SLOW_START_SECONDS)
        if len(times) > 1 or abs(draft.slow_start - longest) > 0.001:
            why = f"is that of the whole service: {draft.slow_start} s was written"
            self.lost(times[longest], f"slow start of {longest:g} s", why)

    def backend(self, line: int, what: str, address: str, port: int | None) -> Backend | None:
        """A backend at this address; None after reporting why it can be none."""
        try:
            found = parse_backend_address(address)
        except InvalidTextError as error:
            self.lost(line, what, error.what, error.hint)
            return None
        kind = address_kind(found)
        if kind in FORBIDDEN_BACKEND_KINDS and not (kind == "link-local" and ":" not in found):
            why = f"{found} is {kind}, and cannot be a backend"
            self.lost(line, what, why, FORBIDDEN_BACKEND_KINDS[kind])
            return None
        return Backend(found, port, check=UNCHECKED)

    def server(self, line: int, what: str, host: str, port: int | None) -> Backend | None:
        """A backend like `backend`; without an address, for `named_backend`, if the host is a name."""
        return (
            Backend("", port, check=UNCHECKED) if is_bare_name(host) else self.backend(line, what, host, port)
        )

    def named_backend(
        self, line: int, what: str, kind: NameKind, name: str, template: Backend
    ) -> NamedBackend | None:
        """The backends that DNS has for a name, with the keys of `template`; None after a report. With SRV
        records it has no port and weight; a weight is reported."""
        try:
            found = parse_dns_name(name)
        except InvalidTextError as error:
            self.lost(line, what, error.what, error.hint)
            return None
        if kind is NameKind.SRV:
            if template.weight != 1:
                self.lost(line, what, "the records say the weights")
            template = replace(template, port=None, weight=1)
        return NamedBackend(kind, found, template)

    def unqualified(self, line: int, what: str, name: str) -> bool:
        """Whether the host's own resolver would look for a name elsewhere than in DNS; reports it."""
        if "." in name.rstrip("."):
            return False
        why = "is not converted: such a name is from /etc/hosts, or below a search domain"
        self.lost(line, what, why, f"write its address, or dns:{name}.DOMAIN")
        return True

    def add(self, draft: ServiceDraft) -> None:
        """Make services of a draft: one for all addresses with the same ports."""
        listeners = list(self._virtual_listeners(draft))
        self._drop_duplicates(draft)
        if not listeners:
            self.lost(draft.line, draft.what, "is not converted: no address and port of it is left")
        elif not (draft.backends or draft.names) and draft.lost_backends:
            self.lost(draft.line, draft.what, "is not converted: no server of it is left")
        else:
            if draft.affinity and len({(each.port, each.protocol) for each in listeners}) > 1:
                self.note(draft.line, draft.what, "a client keeps its backend for each port separately")
            for group in _by_ports(listeners):
                self._add_service(draft, group)

    def finish(self) -> Declaration:
        """All services that claim nothing twice, and what was not converted, by line."""
        kept = {id(service): service for service in self._services}
        for service, claim, owner in conflicts_of(self._services):
            self._report.problems.add(claim_problem(service, claim, owner))
            kept.pop(id(service), None)
        services = tuple(kept.values())
        if not services and not self._report.problems:
            self.lost(0, "", "nothing in it is a service that vipd could serve")
        self._add_advice(services)
        return Declaration(services, self._report.problems.by_line(), self._report.notes())

    def _add_advice(self, services: Sequence[Service]) -> None:
        """Note, once a file, what its services need of the host."""
        given = set(self._virtual.values())
        claiming = [service for service in services if not given.issuperset(service.addresses)]
        if claiming:
            first = next(address for address in claiming[0].addresses if address not in given)
            why = "vipd refuses an address that a host has: remove it from all interfaces, and route it here"
            self.note(claiming[0].origin.line, f"address {first}", why)
        for service in services:
            if service.balance is Balance.SOURCE_HASH:
                why = "needs the nftables dataplane; with iptables write affinity: client-ip"
                self.note(service.origin.line, "balance: source-hash", why)
                break

    def _virtual_listeners(self, draft: ServiceDraft) -> Iterator[Listener]:
        """The listeners, with a virtual IP and a node port for those on every address of the host."""
        for each in draft.listeners:
            if each.address not in ANY_ADDRESS.values():
                yield each
                continue
            family = family_of(each.address)
            address = self._virtual.get(family)
            if address is None:
                example = "fd00:96::10" if family is Family.IPV6 else "10.96.0.10"
                why = "listens on every address of the host, and a service needs a virtual IP"
                self.lost(each.line, each.what, why, f"name one: --address {example}")
                continue
            yield replace(each, address=address, node_port=each.port)

    def _drop_duplicates(self, draft: ServiceDraft) -> None:
        for servers in (draft.backends, draft.fallback):
            seen: set[tuple[str, int | None]] = set()
            for server in list(servers):
                place = (server.value.address, server.value.port)
                if place in seen:
                    why = f"{server.value} stands already in this service"
                    self.lost(server.line, server.path, why, "add its weight to that of the first")
                    servers.remove(server)
                seen.add(place)
        first: dict[str, Located[NamedBackend]] = {}
        for name in list(draft.names):
            earlier = first.setdefault(str(name.value), name)
            if earlier is name:
                continue
            draft.names.remove(name)
            if earlier.value == name.value:
                self.note(name.line, name.path, f"every address of {name.value} serves already")
            else:
                why = f"{name.value} stands already in this service, with other parameters"
                self.lost(name.line, name.path, why, "leave one of them")

    def _servers_for(
        self, draft: ServiceDraft, servers: Sequence[Located[Backend]], listeners: Sequence[Listener]
    ) -> list[Located[Backend]]:
        """The servers of the listeners' families; reports the others."""
        families = {family_of(each.address) for each in listeners}
        kept = [server for server in servers if family_of(server.value.address) in families]
        for server in servers:
            if family_of(server.value.address) not in families:
                self.lost(server.line, server.path, _FAMILIES)
        if len({family_of(server.value.address) for server in kept}) > 1:
            self.note(draft.line, draft.what, "clients reach the servers of their own address family alone")
        return kept

    def _add_service(self, draft: ServiceDraft, listeners: Sequence[Listener]) -> None:
        """Make a service of listeners with the same ports."""
        backends = self._servers_for(draft, draft.backends, listeners)
        serving = {family_of(server.value.address) for server in backends}
        if draft.backends and not draft.names:
            for each in listeners:
                if family_of(each.address) not in serving:
                    self.lost(each.line, each.what, _FAMILIES, "name servers of this family")
            listeners = [each for each in listeners if family_of(each.address) in serving]
        if not listeners:
            self.lost(draft.line, draft.what, "is not converted: no address and port of it is left")
            return
        addresses = tuple(dict.fromkeys(each.address for each in listeners))
        ports = _ports_of(listeners, addresses[0])
        fallback = self._servers_for(draft, draft.fallback, listeners)
        servers = _servers(backends, draft.names, fallback, ports)
        origin = Origin("file", self._path, draft.line)
        made = Service(
            name=self._name(draft.name, Frontend(addresses[0], ports[0].port, ports[0].protocol)),
            addresses=addresses,
            ports=servers.ports,
            backends=servers.backends,
            named_backends=servers.names,
            fallback=servers.fallback,
            check=servers.check,
            affinity=draft.affinity,
            balance=draft.balance,
            masquerade=draft.masquerade,
            slow_start=draft.slow_start,
            origin=origin,
        )
        service, problems = parse_service(service_to_spec(made), origin)
        for problem in problems:
            path = f"{draft.what}: {problem.path}" if problem.path else draft.what
            self.lost(draft.line, path, problem.what, problem.hint)
        if problems or service is None:
            self.lost(draft.line, draft.what, "is not converted")
        elif check_total_size(self._report, service, len(self._services) + 1):
            self._services.append(service)
            self._names.add(service.name)

    def _name(self, wanted: str, first: Frontend) -> str:
        """A valid name like the wanted one, which no service has yet; else the first frontend."""
        name = _NO_NAME.sub("-", wanted)[:_MAX_NAME_LENGTH].strip("._/-")
        if not name:
            return str(first)
        number, found = 1, name
        while found in self._names:
            number += 1
            found = f"{name}-{number}"
        return found


def start_of(healthy: bool) -> InitialHealth:
    """What a backend counts as before its first answer."""
    return InitialHealth.HEALTHY if healthy else InitialHealth.UNHEALTHY


def _within(seconds: float, low: float, high: float) -> float:
    """The seconds within limits, in whole milliseconds."""
    return round(min(max(seconds, low), high) * 1000) / 1000


def _ports_of(listeners: Iterable[Listener], address: str) -> tuple[ServicePort, ...]:
    """The ports of one address, each once."""
    found = [
        ServicePort(each.port, each.protocol, node_port=each.node_port)
        for each in listeners
        if each.address == address
    ]
    return tuple(dict.fromkeys(found))


def _by_ports(listeners: Iterable[Listener]) -> list[list[Listener]]:
    """The listeners of all addresses that have the same ports, together."""
    addresses: dict[str, list[Listener]] = {}
    for each in listeners:
        addresses.setdefault(each.address, []).append(each)
    groups: dict[tuple[ServicePort, ...], list[Listener]] = {}
    for address, found in addresses.items():
        groups.setdefault(_ports_of(found, address), []).extend(found)
    return list(groups.values())


def _servers(
    served: Iterable[Located[Backend]],
    names: Sequence[Located[NamedBackend]],
    last: Iterable[Located[Backend]],
    ports: tuple[ServicePort, ...],
) -> _Servers:
    """Backends, those with names, and those of the fallback, in the form of vipd/v1."""
    numbers = {port.port for port in ports}
    own = next(iter(numbers)) if len(numbers) == 1 else None
    backends = [_with_check_port(each.value, ports, own) for each in served]
    fallback = [_with_check_port(each.value, ports, own) for each in last]
    named = [
        _with_check_port(name.template, ports, None if name.kind is NameKind.SRV else own)
        for name in (each.value for each in names)
    ]
    checks = {backend.check for backend in (*backends, *named)}
    check = (checks.pop() or UNCHECKED) if len(checks) == 1 else UNCHECKED
    by_dns = [
        template for template, each in zip(named, names, strict=True) if each.value.kind is NameKind.DNS
    ]
    targets = {backend.port or own for backend in (*backends, *by_dns, *fallback)}
    target = targets.pop() if len(targets) == 1 else None
    common = target is not None and own is not None
    if common:
        ports = tuple([replace(port, target=None if target == own else target) for port in ports])

    def shared(backend: Backend) -> Backend:
        return replace(
            backend,
            port=None if common else backend.port,
            check=None if backend.check == check else backend.check,
        )

    found = [
        replace(each.value, template=shared(template)) for each, template in zip(names, named, strict=True)
    ]
    return _Servers(tuple(map(shared, backends)), tuple(found), tuple(map(shared, fallback)), check, ports)


def _with_check_port(backend: Backend, ports: tuple[ServicePort, ...], own: int | None) -> Backend:
    """The backend with a port in its check only where the check would find another one, or none."""
    if backend.check is None or backend.check.probe is None:
        return backend
    probe = backend.check.probe
    protocol = required_protocol(backend.check)
    found = protocol is None or protocol in {port.protocol for port in ports}
    port = probe.port
    if found and port is not None and port == (backend.port or own):
        port = None
    elif not found and port is None:
        port = backend.port or ports[0].port
    return replace(backend, check=replace(backend.check, probe=replace(probe, port=port)))


def with_state(backend: Backend, *, down: bool, backup: bool) -> Backend:
    """The backend as one that takes no flows, or only while no other can."""
    return replace(backend, state=BackendState.DOWN if down else BackendState.UP, backup=backup)
