"""Services and backends as frozen values.

Pure: nothing here reads a file, a clock or the kernel. Addresses are canonical text (`ipaddress` spelling,
IPv6 compressed and lower case); ports are 1..65535; times are whole seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from vipd.model.check import UNCHECKED, Check
from vipd.model.flow_limits import FlowLimits

MAX_WEIGHT = 65535
"""Largest backend weight: a share is a weight over the sum of the weights of the service."""

DEFAULT_AFFINITY_SECONDS = 10800
"""Three hours, Kubernetes' default for ClientIP affinity (contract 1.7)."""

MAX_AFFINITY_SECONDS = 86400

MAX_SLOW_START_SECONDS = 3600


class Family(IntEnum):
    """IP address family."""

    IPV4 = 4
    IPV6 = 6

    def __str__(self) -> str:
        return f"ipv{self.value}"

    @property
    def bits(self) -> int:
        """Length of a full address prefix: 32 or 128."""
        return 32 if self is Family.IPV4 else 128


def family_of(address: str) -> Family:
    """The family of a canonical address or CIDR."""
    return Family.IPV6 if ":" in address else Family.IPV4


def socket_text(address: str, port: int) -> str:
    """`10.0.0.1:80`, or `[fd00::1]:80`: the spelling of iptables, URLs and Kubernetes."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Protocol(StrEnum):
    """Transport protocols that can be balanced."""

    TCP = "tcp"
    UDP = "udp"
    SCTP = "sctp"


class Masquerade(StrEnum):
    """New flows whose source becomes this host's address, besides hairpin flows, which always get it."""

    ALWAYS = "always"
    FORWARDED = "forwarded"
    """Those that do not originate on this host."""
    OFF_CLUSTER = "off-cluster"
    """Flows whose source is outside `cluster_cidrs`."""
    HAIRPIN = "hairpin"
    """No other flows."""


class RejectAction(StrEnum):
    """How a new flow is refused when no backend can serve it."""

    REJECT = "reject"
    """Refused at once: ICMP port unreachable, which TCP clients see as "connection refused"."""
    DROP = "drop"
    """Silence, so that a client behind an outer load balancer tries elsewhere."""


class Balance(StrEnum):
    """How the backend of a new flow is chosen, by weight."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    SOURCE_HASH = "source-hash"
    """By the client's address: a client gets the same backend on every host."""
    LEAST_CONNECTIONS = "least-connections"
    """At random, by weights that the daemon lowers where a backend has more live flows than its share."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where something is declared: the kind of its source, and the file and line if it has one."""

    source: str
    """`file`, `cli` or `etcd`."""
    path: str = ""
    line: int = 0
    part: str = field(default="", compare=False)
    """The object of the file that is accepted or refused by itself, such as a Service of Kubernetes; empty:
    the file is taken as a whole."""
    written_by: str = field(default="", compare=False)
    """Who writes it, if several files or keys may be one author's: the user, or the namespace in etcd."""

    def at(self, line: int) -> Origin:
        """The same file at a line."""
        return Origin(self.source, self.path, line, written_by=self.written_by)

    @property
    def owner(self) -> str:
        """The owner that may change it: `file:/etc/vipd/services.d/web.yaml`, `cli`, or
        `etcd:/vipd/v1/services/web`."""
        return self.source if self.source == "cli" else f"{self.source}:{self.path}"

    @property
    def author(self) -> str:
        """Whose share of the daemon's work it takes: that of the file's user (of root's files each has its
        own), of the namespace of a key in etcd (`etcd:/vipd/v1/services/team-a/`), or of `cli`."""
        return self.written_by or self.owner

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.path else self.source


class Frontend(NamedTuple):
    """One address, port and protocol that clients connect to. Globally unique among services."""

    address: str
    """Empty for a port of this host itself: a node port or a health port."""
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        place = socket_text(self.address, self.port) if self.address else f"node port {self.port}"
        return f"{place}/{self.protocol}"


@dataclass(frozen=True, slots=True)
class ServicePort:
    """One port of a service. `target` is the backends' port when it differs."""

    port: int
    protocol: Protocol
    name: str = ""
    target: int | None = None
    node_port: int | None = None
    """Port on this host's own addresses that leads here too."""

    def __str__(self) -> str:
        return f"{self.port}/{self.protocol}"


class BackendState(StrEnum):
    """Declared readiness of a backend (contract 4)."""

    UP = "up"
    DRAIN = "drain"
    """Takes new flows only if no backend that is up can: Kubernetes' serving and terminating."""
    DOWN = "down"


class TrafficPolicy(StrEnum):
    """Which backends traffic may go to."""

    CLUSTER = "cluster"
    LOCAL = "local"
    """Only backends on this host."""


class TrafficDistribution(StrEnum):
    """Which of the ready backends serve first, where the policy is `cluster`."""

    PREFER_SAME_ZONE = "prefer-same-zone"
    """Those for this host's zone, if every one names its zones and any names this one."""
    PREFER_SAME_NODE = "prefer-same-node"
    """Those on this host; if there are none, as `PREFER_SAME_ZONE`."""


@dataclass(frozen=True, slots=True)
class ExternalAddress:
    """An address for clients from outside: an external IP, or a load balancer's ingress IP."""

    address: str
    load_balancer: bool = False
    allow_from: tuple[str, ...] | None = None
    """Client networks that may use it; None: the service's; empty: all."""


class AnnounceMethod(StrEnum):
    """How other hosts learn where an address is."""

    ROUTES = "routes"
    """By a host route that a routing daemon announces; several hosts at once."""
    L2 = "l2"
    """One host at a time answers ARP and neighbour discovery for it."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """That a service's addresses are announced beyond this host."""

    by: AnnounceMethod
    inside: bool = False
    """Its `address`, too, besides its external and load balancer addresses."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One server of a service. Its own port, if any, overrides the service port's target."""

    address: str
    port: int | None = None
    weight: int = 1
    """0..65535; 0: no new flows."""
    state: BackendState = BackendState.UP
    node: str = ""
    """The host that it runs on; empty: unknown."""
    zones: tuple[str, ...] = ()
    """Zones whose clients it should serve; empty: all."""
    ports: tuple[tuple[str, int], ...] = ()
    """Names of the only service ports that it serves, each with its own port for it; empty: it serves all."""
    backup: bool = False
    """Serves only while no backend without this flag can."""
    check: Check | None = None
    """None: the service's."""
    max_connections: int | None = None
    """With so many live flows of its service it gets no new ones; None: no limit."""
    registered: bool = False
    """It registered itself, and is no part of the service's declaration."""
    resolved_from: str = ""
    """The `NamedBackend` whose answer lists it, which is declared in its place; empty: none."""

    @property
    def declared(self) -> bool:
        """Whether it is part of the service's declaration."""
        return not (self.registered or self.resolved_from)

    def __str__(self) -> str:
        return self.address if self.port is None else socket_text(self.address, self.port)

    def port_for(self, port: ServicePort) -> int | None:
        """Its port for a service port; None if it does not serve that port."""
        if self.ports:
            return next((number for name, number in self.ports if name and name == port.name), None)
        return self.port or port.target or port.port


class NameKind(StrEnum):
    """The DNS records that backends are read from. Its values are the keys of the declaration."""

    DNS = "dns"
    """A and AAAA: the addresses of the name."""
    SRV = "srv"
    """SRV: targets with their ports, weights and priorities."""


@dataclass(frozen=True, slots=True)
class NamedBackend:
    """Backends that the DNS answer for a name lists."""

    kind: NameKind
    name: str
    """Lower case, without the final dot."""
    template: Backend = Backend("")
    """What each backend gets besides its address; those of `srv` have port and weight of their own."""

    def __str__(self) -> str:
        port = f":{self.template.port}" if self.template.port else ""
        return f"{self.kind}:{self.name}{port}"


class RegisteredBackend(NamedTuple):
    """A backend that registered itself, and where: `etcd:/vipd/v1/backends/web/10.0.0.1:80`."""

    origin: str
    backend: Backend


@dataclass(frozen=True, slots=True)
class Affinity:
    """A client address keeps its backend until it has made no new flow for `timeout` seconds."""

    timeout: int = DEFAULT_AFFINITY_SECONDS


@dataclass(frozen=True, slots=True)
class Service:
    """A declared service. Equality ignores where it was declared."""

    name: str
    addresses: tuple[str, ...]
    ports: tuple[ServicePort, ...]
    backends: tuple[Backend, ...] = ()
    affinity: Affinity | None = None
    masquerade: Masquerade | None = None
    """None: the setting of the daemon."""
    refusal: RejectAction = RejectAction.REJECT
    fallback: tuple[Backend, ...] = ()
    """Backends that serve only while no other one can."""
    external_addresses: tuple[ExternalAddress, ...] = ()
    allow_from: tuple[str, ...] = ()
    """Networks that may use its addresses and node ports; empty: all. An external address may have others."""
    internal_policy: TrafficPolicy = TrafficPolicy.CLUSTER
    external_policy: TrafficPolicy = TrafficPolicy.CLUSTER
    health_port: int | None = None
    """TCP port on which this host reports whether it has a ready local backend."""
    ends_flows: bool = False
    """Established TCP and SCTP flows to a backend that leaves are cut (`on_remove: reset`)."""
    answers_ping: bool = True
    """Its addresses answer ICMP echo while it has a backend that serves."""
    balance: Balance = Balance.RANDOM
    check: Check = UNCHECKED
    """Health check for backends that define none of their own."""
    keeps_unhealthy: bool = False
    """While no backend is healthy, all serve as if they were (`fallback: keep`)."""
    slow_start: int = 0
    """Seconds in which the share of a backend that became healthy again rises to its full value."""
    weight_from_check: bool = False
    """Whether a backend's answer to an HTTP check may set its weight."""
    registrations: bool | None = None
    """Whether backends that registered themselves in etcd take part; None: the default of its source."""
    traffic_distribution: TrafficDistribution = TrafficDistribution.PREFER_SAME_ZONE
    announcement: Announcement | None = None
    """None: its addresses are not announced."""
    flow_takeover: bool = False
    """Established TCP flows whose host is lost go on through this one."""
    limits: FlowLimits | None = None
    """Limits on new flows; None: there are none."""
    named_backends: tuple[NamedBackend, ...] = ()
    """Backends by DNS name, whose addresses are added to `backends`."""
    named_fallback: tuple[NamedBackend, ...] = ()
    """The same, added to `fallback`."""
    description: str = ""
    """What it is for, in its administrator's words; no packet depends on it."""
    origin: Origin = field(default=Origin("cli"), compare=False)

    def all_addresses(self) -> tuple[str, ...]:
        """Every address that the service claims, those for inside first."""
        return (*self.addresses, *(external.address for external in self.external_addresses))

    @property
    def names(self) -> tuple[NamedBackend, ...]:
        """Every DNS name that it declares, those of the fallback last."""
        return (*self.named_backends, *self.named_fallback)

    def announced_addresses(self) -> tuple[str, ...]:
        """The addresses that are to be announced beyond this host."""
        if self.announcement is None:
            return ()
        inside = self.addresses if self.announcement.inside else ()
        return (*inside, *(external.address for external in self.external_addresses))

    @property
    def accepts_registrations(self) -> bool:
        """Whether registered backends take part: by default only if the service, too, is declared in etcd."""
        return self.origin.source == "etcd" if self.registrations is None else self.registrations

    def frontends(self) -> tuple[Frontend, ...]:
        """Every frontend of the service, in declared order; ports of the host are last."""
        addressed = [Frontend(a, p.port, p.protocol) for a in self.all_addresses() for p in self.ports]
        on_host = [Frontend("", p.node_port, p.protocol) for p in self.ports if p.node_port]
        health = [Frontend("", self.health_port, Protocol.TCP)] if self.health_port else []
        return (*addressed, *on_host, *health)


def port_names(ports: tuple[ServicePort, ...]) -> tuple[str, ...]:
    """The effective name of each port, in order.

    A named port keeps its name. An unnamed port has none while it is the only such port of its protocol, as
    in Kubernetes; several get their number as a name, which no declared name can equal (those contain a
    letter).
    """
    if len(ports) == 1:
        return (ports[0].name,)
    unnamed = Counter(p.protocol for p in ports if not p.name)
    return tuple(p.name or ("" if unnamed[p.protocol] == 1 else str(p.port)) for p in ports)
