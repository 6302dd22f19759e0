"""Facts about a host, as frozen values: the input of all checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vipd.dataplane.refusals import ForwardedFlow
from vipd.model.service import Family, Protocol
from vipd.observe.doctor.rules import NftForward, Ruleset

if TYPE_CHECKING:  # pydantic is slow to import, and the checks only read settings
    from vipd.host.settings.settings import Settings


Place = tuple[Protocol, str, int]
"""Where a backend is reached: its protocol, address and port."""


@dataclass(frozen=True, slots=True)
class ServedPort:
    """One port of a service in one family, as it must be forwarded."""

    service: str
    family: Family
    protocol: Protocol
    port: int
    addresses: tuple[str, ...] = ()
    """Its virtual IPs, external ones too."""
    node_port: int | None = None
    backends: tuple[tuple[str, int], ...] = ()
    """Address and port of each known backend."""
    new_flows: frozenset[tuple[str, int]] = frozenset()
    """Those that take new flows."""
    checked: frozenset[tuple[str, int]] = frozenset()
    """Those that a health check of a running daemon looks at."""
    affinity: bool = False
    masquerade: str = "forwarded"
    vrrp_addresses: frozenset[str] = frozenset()
    """Its external addresses that vipd does not announce: keepalived may give them to this host."""

    @property
    def flow(self) -> ForwardedFlow:
        """Its flows in chains of the forward hook."""
        return ForwardedFlow(
            self.family,
            str(self.protocol),
            self.port,
            frozenset(self.addresses),
            frozenset(self.backends),
        )


@dataclass(frozen=True, slots=True)
class Program:
    """The iptables programs of one family."""

    family: Family
    text: str
    """As they name themselves; empty when they cannot be used."""
    variant: str = ""
    """`nft` or `legacy`."""
    fault: str = ""
    fix: str = ""
    """A command against the fault."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that this host's iptables and kernel cannot do."""

    family: Family
    name: str
    """`affinity`, `flow_marks`, `ping`, `random_fully`, or a required and missing feature, as reported."""
    required: bool
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs that write this host's rules."""

    kernel: str = ""
    """Its release."""
    iptables: tuple[Program, ...] = ()
    nft: str = ""
    """Its version; empty when it cannot be run."""
    nft_fault: str = "there is no such program"
    """Why it cannot be run, where it cannot."""
    missing_features: tuple[Feature, ...] = ()
    probe_fault: str = ""
    """Why features could not be tried."""
    fault: str = ""
    """Why none of this is known."""

    def variant(self, family: Family) -> str:
        """`nft` or `legacy`, which vipd uses for a family; empty when neither."""
        return next((one.variant for one in self.iptables if one.family is family), "")


@dataclass(frozen=True, slots=True)
class Kernel:
    """Facts from the kernel."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Path below /proc/sys -> value; without those that do not exist."""
    conntrack: Mapping[str, int] = field(default_factory=dict)
    """Counters of connection tracking, over all CPUs, since the network namespace began."""
    conntrack_new: Mapping[str, int] = field(default_factory=dict)
    """Their growth while they were watched."""
    watched_seconds: float = 0.0
    """Duration of that."""
    counters_fault: str = ""
    """Why the counters could not be read."""
    conntrack_fault: str = ""
    """Why the table cannot be listed over netlink."""
    neighbours: int | None = None
    """Entries of the kernel's tables of IPv4 neighbours, of all network namespaces; None: unknown."""
    neighbours_refused: int = 0
    """Times that the table was full while the counters were watched."""
    snat: Mapping[tuple[Protocol, str, str], int] | None = field(default_factory=dict)
    """Masqueraded flows by protocol, source address, and backend as `ADDR:PORT`; empty where too few to
    matter. None: unknown."""
    ipvs: frozenset[str] = frozenset()
    """What IPVS serves: `ADDR:PORT/PROTOCOL`, or `FWM NUMBER`."""
    affinity_limit: int | None = None
    """Clients that one affinity list stores; None while xt_recent is not loaded, or without permission."""
    reverse_path_drops: int | None = None
    """None: unknown."""
    clock_synchronised: bool | None = None
    """None if unknown."""
    clock_fault: str = ""
    """Why that is unknown."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Path below /proc/sys -> why it could not be read, though it may exist."""
    fault: str = ""
    """Why none of this is known."""

    def number(self, name: str) -> int | None:
        """A setting as a number; None if there is none."""
        text = self.settings.get(name, "")
        return int(text) if text.lstrip("-").isdigit() else None


@dataclass(frozen=True, slots=True)
class Link:
    """A network device."""

    name: str
    up: bool = True
    kind: str = ""
    """`bridge`, `veth`; empty for hardware."""
    master: str = ""
    hairpin: bool | None = None
    """For a bridge's port: whether it may send packets back by the port on which they arrived."""
    uses_neighbour_discovery: bool = True
    """Hosts there find each other by ARP or neighbour discovery."""
    mtu: int = 0
    """Largest packet in bytes; 0: unknown."""
    vrf_table: int | None = None
    """For a VRF: the routing table of packets that arrive on its devices."""


@dataclass(frozen=True, slots=True)
class HostAddress:
    """An address of this host."""

    address: str
    length: int
    device: str


@dataclass(frozen=True, slots=True)
class Route:
    """This host's way to an address."""

    device: str = ""
    """Empty: nowhere."""
    local: bool = False
    """The address is this host's own."""
    mtu: int = 0
    """Largest packet that the route itself allows, or that a router on the way reported; 0: as the device."""


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """A routing rule, or a VRF, that sends some packets for backends another way than the others."""

    text: str
    """As `ip rule` prints it, or the VRF and its devices."""
    priority: int
    """Lower ones are tried first."""
    routes: Mapping[str, Route]
    """For each backend that it concerns, the way of the packets that match."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that takes packets of this network namespace."""

    protocol: Protocol
    address: str
    port: int
    program: str = ""
    """Empty if unknown."""
    pid: int = 0
    unit: str = ""
    """systemd unit that it belongs to."""


@dataclass(frozen=True, slots=True)
class Network:
    """Devices, addresses and routes."""

    links: tuple[Link, ...] = ()
    addresses: tuple[HostAddress, ...] = ()
    routes: Mapping[str, Route] = field(default_factory=dict)
    """For each virtual IP and backend that was looked up."""
    proxy_neighbours: frozenset[tuple[str, str]] = frozenset()
    """(address, device): this host answers neighbours' requests for the address there."""
    foreign_addresses: Mapping[str, str] = field(default_factory=dict)
    """Addresses of other hosts, or of whole networks -> description: `the next hop of a route`."""
    policy_rules: tuple[PolicyRule, ...] = ()
    listeners: tuple[Listener, ...] = ()
    fault: str = ""
    """Why nothing besides listeners is known."""
    listeners_fault: str = ""
    """Why the listeners are unknown."""

    def link(self, name: str) -> Link | None:
        """A device by its name."""
        return next((link for link in self.links if link.name == name), None)


@dataclass(frozen=True, slots=True)
class Daemon:
    """The daemon, as it answers."""

    status: Mapping[str, Any] = field(default_factory=dict)
    """Its status (docs/api.md); empty when it did not answer."""
    fault: str = ""
    """Why it did not answer."""
    prefix_in_use: bool = False
    """Some vipd with our chain prefix is at work in this network namespace."""
    other_prefixes: tuple[str, ...] = ()
    """Chain prefixes of other vipds that are at work in this network namespace."""
    prefixes_fault: str = ""
    """Why the running vipds are unknown."""
    in_other_namespace: bool = False
    """The one that answers serves another network namespace."""
    vipctl: str = ""
    """Our own version."""

    @property
    def runs(self) -> bool:
        """Whether a daemon serves this namespace with the same prefix."""
        return self.prefix_in_use or bool(self.status)


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The API's socket in the file system."""

    path: str
    mode: int
    """Permission bits."""
    group: str
    wanted_group: str
    """The group in `socket_group`, if it exists, else empty."""


@dataclass(frozen=True, slots=True)
class StateDir:
    """The directory of vipd's state."""

    path: str = ""
    exists: bool = True
    mode: int = 0o750
    writable: bool = True
    read_only: bool = False
    """Its file system is mounted so."""
    free: int = 1 << 40
    """Bytes."""
    free_inodes: int = 1 << 20
    store_faults: tuple[str, ...] = ()
    has_copy: bool = False
    """There is a last good copy of the store."""
    fault: str = ""
    """Why none of this is known."""


@dataclass(frozen=True, slots=True)
class Announcing:
    """Addresses that are announced by routes, and who may import them."""

    routes: int = 0
    """Addresses that services ask to announce by routes."""
    table: int = 0
    addresses: tuple[str, ...] = ()
    """Those that this host announces."""
    kept: tuple[str, ...] = ()
    """Those that it announces though no backend can serve, as the last host."""
    foreign: tuple[str, ...] = ()
    """Destinations of routes of others in the table."""
    looked_up: bool = False
    """A policy rule leads to the table."""
    names: tuple[str, ...] = ()
    """What iproute2 calls the table."""
    importers: frozenset[str] | None = None
    """Routing daemons that run; None: unknown."""
    in_main: frozenset[str] = frozenset()
    """Destinations of FRR's routes in the main table."""


@dataclass(frozen=True, slots=True)
class Contacts:
    """Connections to backends that the doctor tried."""

    results: Mapping[Place, str] = field(default_factory=dict)
    """Why a backend did not answer; empty where it did, or for UDP where no error came back."""
    left_out: int = 0
    """Backends beyond the limits of number and time, and of SCTP on a kernel that does not have it loaded."""
    named: bool = False
    """The services were asked for by name."""
    unresolved: Mapping[str, str] = field(default_factory=dict)
    """Addresses of backends that nobody on their network answers for -> the state of the kernel's entry."""
    fault: str = ""
    """Why no result is known."""
    neighbours_fault: str = ""
    """Why it is unknown what is unresolved."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All collected facts."""

    settings: Settings
    settings_faults: tuple[str, ...] = ()
    root: bool = True
    dataplane: str = "iptables"
    """The one in use: `iptables` or `nftables`."""
    services: tuple[ServedPort, ...] = ()
    services_fault: str = ""
    """Why the services are unknown."""
    refused: tuple[str, ...] = ()
    """Problems of declarations, each with its place."""
    programs: Programs = Programs()
    rulesets: tuple[Ruleset, ...] = ()
    rules_fault: str = ""
    """Why some rules could not be read."""
    forward_chains: tuple[NftForward, ...] = ()
    """In nft tables that are not iptables'."""
    flowtables: tuple[str, ...] = ()
    """Flowtables of nft to which some rule adds flows, as `inet filter f`."""
    nft_fault: str = ""
    """Why not all of them are known, nor whether there are tables of vipd's."""
    tables: frozenset[Family] = frozenset()
    """Families for which nft has the table of vipd's dataplane nftables."""
    kernel: Kernel = Kernel()
    network: Network = Network()
    daemon: Daemon = Daemon()
    socket: SocketFile | None = None
    socket_fault: str = ""
    """Why nothing is known of the socket, though it may exist."""
    state: StateDir = StateDir()
    programs_running: frozenset[str] | None = frozenset()
    """Names of running processes that the checks look for; None: unknown."""
    announcing: Announcing = Announcing()
    announcing_fault: str = ""
    """Why that is unknown."""
    contacts: Contacts = Contacts()

    def services_unread(self) -> str:
        """Why the services are unknown; empty if they are known."""
        return self.services_fault

    def network_unread(self) -> str:
        """Why the effects of routes and addresses on services are unknown; empty if they are known."""
        return self.services_fault or self.network.fault

    def routes_unread(self) -> str:
        """Why it is unknown whether vipd's rules exist, or which routes they require."""
        return self.vipd_rules_unread() or self.network_unread()

    def contacts_unread(self) -> str:
        """Why it is unknown whether backends answer; empty if it is known."""
        return self.services_fault or self.contacts.fault

    def neighbours_unread(self) -> str:
        """Why it is unknown whether backends' addresses are resolved; empty if it is known."""
        return self.services_fault or self.contacts.neighbours_fault

    def listeners_unread(self) -> str:
        """Why listeners on the services' ports are unknown; empty if they are known."""
        return self.network_unread() or self.network.listeners_fault

    def rules_unread(self) -> str:
        """Why not all rules are known; empty if they are."""
        return self.skipped_as_user() or self.rules_fault

    def forwarding_unread(self) -> str:
        """Why the effect of rules on services' flows is unknown; empty if it is known."""
        return self.rules_unread() or self.services_fault

    def nft_unread(self) -> str:
        """Why chains that are not iptables' are unknown; empty if they are known."""
        return self.skipped_as_user() or self.nft_fault or self.services_fault

    def vipd_rules_unread(self) -> str:
        """Why it is unknown whether vipd's rules are in the kernel; empty if it is known."""
        unsure = not self.daemon.status and self.settings.dataplane != "iptables"
        faults = [self.rules_fault] if self.dataplane == "iptables" else []
        faults += [self.nft_fault] if self.dataplane == "nftables" or unsure else []
        return self.skipped_as_user() or next(filter(None, faults), "")

    def daemon_unread(self) -> str:
        """Why the running daemon did not answer; empty if it did, or if there is none."""
        unasked = self.daemon.prefix_in_use and not self.daemon.status
        return self.daemon.fault if unasked else self.daemon.prefixes_fault if not self.daemon.status else ""

    def settings_unread(self, *names: str) -> str:
        """Why some of these kernel settings are unknown; empty if they are known."""
        reasons = [f"{name}: {self.kernel.unread[name]}" for name in names if name in self.kernel.unread]
        return self.kernel.fault or "; ".join(reasons)

    def counters_unread(self) -> str:
        """Why the counters of connection tracking are unknown; empty if they are known."""
        return self.kernel.fault or self.kernel.counters_fault

    def state_unread(self) -> str:
        """Why nothing is known of the state directory; empty if it is known."""
        return self.state.fault

    def programs_unread(self) -> str:
        """Why the installed programs are unknown; empty if they are known."""
        return self.programs.fault

    def skipped_as_user(self) -> str:
        """Why only root can read something; empty for root."""
        return "" if self.root else "only root may look"

    def families(self) -> tuple[Family, ...]:
        """Those that services use."""
        return tuple(sorted({port.family for port in self.services}))

    def ruleset(self, family: Family) -> Ruleset | None:
        """The rules of the variant that vipd uses for a family."""
        variant = self.programs.variant(family)
        return next((r for r in self.rulesets if (r.family, r.variant) == (family, variant)), None)

    def has_vipd_rules(self, family: Family) -> bool:
        """Whether vipd's rules are in the kernel."""
        if self.dataplane == "nftables":
            return family in self.tables
        ruleset = self.ruleset(family)
        return ruleset is not None and ruleset.jumps_to(f"{self.settings.chain_prefix}-")

    def vips(self) -> dict[str, ServedPort]:
        """Every virtual IP with some port of its service."""
        return {address: port for port in self.services for address in port.addresses}

    def backends(self) -> dict[str, ServedPort]:
        """Every backend's address with some port that it serves."""
        return {address: port for port in self.services for address, _ in port.backends}

    def devices_to_backends(self, family: Family) -> tuple[str, ...]:
        """The devices by which backends of a family are reached."""
        ways = (self.network.routes.get(a) for a, port in self.backends().items() if port.family is family)
        return tuple(sorted({way.device for way in ways if way and way.device and not way.local}))
