"""The daemon's settings: each one's name, type, default and meaning stand here and nowhere else.

The manual is generated from this module; docs/settings.md and the packaged vipd.yaml are checked against it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from vipd.declaration.syntax import MAX_PORT, parse_frontend
from vipd.host.accounts import CheckUsers
from vipd.host.settings.etcd import PERIOD
from vipd.host.settings.field_types import (
    AcceptForwarded,
    Addresses,
    Command,
    Etcd,
    FastPathChoice,
    Group,
    ListenAddress,
    LocalListenAddress,
    NamesBySource,
    NameServers,
    Networks,
    NetworksBySource,
    PortRangesBySource,
    UidRange,
)
from vipd.host.settings.layers import ENVIRONMENT_PREFIX, Layers
from vipd.host.settings.settings_file import SettingsError
from vipd.model.claim_limits import ANY_NAME, CLI, ETCD, FILE, KUBERNETES_PORTS, BySource, SourceName
from vipd.model.service import Balance, Family, Masquerade, family_of

_LAYERS = "_layers"
"""Argument of `Settings` that holds its Layers."""
_NAMES: dict[SourceName, tuple[str, ...]] = {FILE: (ANY_NAME,), CLI: (ANY_NAME,)}
_HOST_PORTS: dict[SourceName, tuple[str, ...]] = {ETCD: (KUBERNETES_PORTS,)}


class Settings(BaseSettings):
    """Everything that the daemon can be told, each with its default."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True, str_strip_whitespace=True
    )

    services_dir: Path = Path("/etc/vipd/services.d")
    """Directory of declarations: `*.yaml`, `*.yml` and `*.json`."""
    state_dir: Path = Path("/var/lib/vipd")
    """What vipctl added, the last good version of each file, and what cleanup must undo. One for each daemon.
    """
    socket: Path = Path("/run/vipd/vipd.sock")
    """UNIX socket of the API. `vipctl` needs `--socket` or `VIPD_SOCKET` for another one."""
    socket_group: Group = "vipd"
    """Group that may connect, and so read. Ignored while there is no such group."""
    admin_group: Group = "vipd-admin"
    """Group that may change services, besides root. Its members must be able to connect, too. Ignored while
    there is no such group.
    """
    dataplane: Literal["iptables", "nftables", "auto"] = "iptables"
    """What programs the kernel; `auto`: nftables where the host has all that it may need and no other table
    drops forwarded packets that vipd cannot accept there, else iptables. `vipctl set-dataplane` has the last
    word.
    """
    iptables_variant: Literal["auto", "nft", "legacy"] = "auto"
    """Which iptables programs to use; `auto`: what `iptables` itself is."""
    # The longest prefix and a hash still fit iptables' 28 characters.
    chain_prefix: str = Field("VIPD", pattern=r"^[A-Z][A-Z0-9]{0,6}$")
    """How every chain's name begins: 1 to 7 of `A-Z 0-9`, a letter first. `KUBE` gives kube-proxy's names,
    and is refused beside a kube-proxy.
    """
    compat: Literal["none", "kube-proxy"] = "none"
    """`kube-proxy`: its exact rules, also where vipd does something else."""
    force_chain_prefix: bool = False
    """Use `KUBE` although a kube-proxy's canary chain is there."""
    mark_bit: int = Field(14, ge=0, le=31)
    """Bit of the packet mark that asks for masquerade. 14 is kube-proxy's 0x4000."""
    flow_mark_bit: int = Field(13, ge=0, le=31)
    """Bit of the connection mark by which FORWARD knows the flows that vipd translated."""
    cluster_cidrs: Networks = ()
    """Networks whose hosts get replies back without masquerade."""
    masquerade: Literal["auto", "always", "forwarded", "off-cluster", "hairpin"] = "auto"
    """The mode of services that name none. `off-cluster` needs `cluster_cidrs`; `auto` is `off-cluster` where
    these name a network of the family, else `forwarded`, or `hairpin` with `compat: kube-proxy`.
    """
    random_fully: bool | None = None
    """Whether masquerading picks source ports at random; unset: if iptables and kernel can."""
    node_name: str = Field(default_factory=gethostname)
    """This host, as a backend's `node` and Kubernetes' nodeName call it."""
    zone: str = ""
    """This host's zone, as a backend's `zone` calls it."""
    host_addresses: Addresses | None = None
    """This host's own addresses; unset: read from the kernel every 5 seconds."""
    node_port_addresses: Networks = ()
    """Networks whose addresses on this host answer on node ports and health ports. A family without a
    network: all of this host's.
    """
    allowed_addresses: NetworksBySource = ()
    """Networks in which services may claim addresses, by source where wanted; none: anywhere. This host's own
    are refused all the same.
    """
    allowed_backends: NetworksBySource = ()
    """Networks in which backends must lie, by source where wanted; none: anywhere, but for link-local
    addresses of etcd's backends, which need a link-local network here.
    """
    allowed_names: NamesBySource = Field(_NAMES, examples=["{file: any, cli: any}"])
    """DNS names that backends may have, and all names below them, by source where wanted; `any` and `off` are
    possible, too. A source that is not named: none. Their addresses must lie in `allowed_backends`.
    """
    dns_servers: NameServers = ()
    """Name servers that backends' names are looked up at; none: those in /etc/resolv.conf. No service may
    claim their addresses.
    """
    dns_timeout: Annotated[float, PERIOD, Field(ge=0.1, le=30)] = 5.0
    """How long the name servers may take for an answer, `100ms` to `30s`."""
    dns_min_ttl: Annotated[float, PERIOD, Field(ge=1, le=3600)] = 5.0
    """How long an answer counts at least, `1s` to `60m`, whatever its records say."""
    dns_max_ttl: Annotated[float, PERIOD, Field(ge=1, le=86400)] = 300.0
    """How long an answer counts at most, `1s` to `1440m`."""
    dns_hold: Annotated[float, PERIOD, Field(ge=0, le=86400)] = 30.0
    """How long answers must have lacked more than half of a name's backends until those are removed, up to
    `1440m`; `0`: they are removed at once.
    """
    dns_max_addresses: int = Field(100, ge=1, le=1000)
    """How many addresses of one name's answer are used; more are left out, with a warning."""
    dns_max_names: int = Field(1000, ge=1, le=10_000)
    """How many names are looked up; more are not, with a warning: the newest of the author with the most."""
    node_port_range: PortRangesBySource = Field(_HOST_PORTS, examples=["{etcd: 30000-32767}"])
    """Ports of this host that node ports and health ports may be, by source where wanted. A source that is
    not named: any that no program listens on, but etcd's default stays; with `compat: kube-proxy` any.
    """
    node_ports_per_author: int = Field(1384, ge=1, le=65_535)
    """How many ports of this host one author may have as node ports and health ports: half of 30000-32767, so
    that others find some. With `compat: kube-proxy` any number, unless it is set.
    """
    exec_checks: Literal["off", "files", "anywhere"] = "files"
    """Which services may have checks that run programs: none, those of files, or all, also those that
    members of `admin_group` add.
    """
    check_uids: UidRange = "2113929216-2130706431"
    """Numbers of the users that run programs of checks without `user`, one for each author. No account and
    no container may have them. `off`: the user `vipd-check` runs them all.
    """
    localhost_node_ports: bool | None = None
    """Whether node ports match 127.0.0.0/8, too; unset: with the prefix KUBE or `compat: kube-proxy`. To
    backends on other hosts that takes route_localnet, which vipd never sets; the flows are masqueraded in
    every mode.
    """
    reject_unused_ports: bool = True
    """Refuse at once what is for a service's `address` and none of its ports. Never with the prefix KUBE or
    `compat: kube-proxy`.
    """
    affinity_clients: int = Field(1_000_000, ge=1_000, le=100_000_000)
    """How many clients the nftables dataplane remembers in each address family; a client counts once for each
    service port. Another number begins with none.
    """
    dispatch: Literal["auto", "flat", "grouped"] = "auto"
    """How a packet finds its service: past every rule, or through groups of addresses; `auto`: grouped above
    64 addresses. Flat with `compat: kube-proxy`.
    """
    traffic_accounting: bool = True
    """Count the packets and bytes of services and backends while the kernel does: nf_conntrack_acct."""
    accept_forwarded: AcceptForwarded = True
    """Accept the flows that vipd translated in FORWARD, and in chains of nft at the forward hook whose
    policy is drop, behind rules by which an administrator refuses some flows; `first`: before any other
    rule, and kept there.
    """
    fast_path: FastPathChoice = "off"
    """Whether established TCP flows skip the rules, through a flowtable of nftables; `auto`: where kernel and
    devices can. The rules of other programs do not see their packets either.
    """
    manage_sysctls: bool = True
    """Turn on what forwarding needs while there are services, and put it back on cleanup."""
    vip_device: str = Field("vipd0", pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,14})?$")
    """Device that is made to carry routes to VIPs that no other route covers; empty: no device and no routes
    are made. At most 15 of `A-Z a-z 0-9 . _ -`, a letter or digit first.
    """
    announce_addresses: NetworksBySource = ()
    """Networks whose addresses services may have announced beyond this host, by source where wanted, besides
    those that `allowed_addresses` names; such a service may claim them, too. None: no others.
    """
    announce_table: int = Field(86, ge=1, le=252)
    """Routing table of vipd's own for the routes that a routing daemon announces; no rule leads to it. The
    package gives 86 the name `vipd`.
    """
    announce_withdraw_after: int = Field(3, ge=0, le=3600)
    """Seconds without a backend after which an announced address is withdrawn."""
    announce_return_after: int = Field(10, ge=0, le=3600)
    """Seconds with a backend again after which an address that was withdrawn for that is announced again."""
    announce_last: Literal["keep", "withdraw"] = "keep"
    """Whether the last host that announces an address keeps it when no backend can serve; which one that is
    only hosts with the same etcd know.
    """
    announce_on_stop: Literal["keep", "withdraw"] = "keep"
    """Whether the routes stay when vipd is stopped, as its rules do; `keep` lets a restart or an upgrade
    interrupt nothing.
    """
    announce_takeover: int = Field(3, ge=3, le=60)
    """Seconds within which another host answers for the addresses of a lost one, with `announce: l2`. A host
    that etcd does not answer for a third of it stops answering.
    """
    announce_preempt_after: int = Field(60, ge=0, le=86400)
    """Seconds after which a host that is back gets the addresses again that it is the first for, with
    `announce: l2`; 0: never.
    """
    health_address: ListenAddress | None = None
    """Where `GET /healthz` and `/livez` are answered over TCP, too; unset: nowhere."""
    metrics_address: LocalListenAddress | None = None
    """Where `GET /metrics` is answered over TCP, too, for Prometheus; a port alone: on 127.0.0.1; unset:
    nowhere.
    """
    status_page: LocalListenAddress | None = None
    """Where the status page is served, to everybody who can connect; a port alone: on 127.0.0.1; unset:
    nowhere.
    """
    etcd: Etcd = None
    """The etcd that feeds a fleet of hosts; unset: none does."""
    store: Literal["file", "etcd"] = "file"
    """Where `vipctl` keeps what it adds, unless `--store` says otherwise: on this host, or for all hosts."""
    notify: Command = ()
    """Program, and its arguments, that is run for each event, with the event on its standard input as JSON;
    none: no program. It runs as the user `vipd-check`, one at a time, for at most 10 seconds.
    """
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least weighty messages that are logged, to stderr."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The layers of `load_settings`; `Settings(...)` with plain values reads nothing else."""
        layers = getattr(init_settings, "init_kwargs", {}).get(_LAYERS)
        return layers.sources(settings_cls) if isinstance(layers, Layers) else (init_settings,)

    @field_validator("services_dir", "state_dir", "socket")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        if not value.is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.masquerade == "off-cluster" and not self.cluster_cidrs:
            raise ValueError("masquerade: off-cluster needs cluster_cidrs; hint: name them, or use forwarded")
        if self.store == "etcd" and self.etcd is None:
            raise ValueError("store: etcd needs etcd; hint: name its endpoints, or use file")
        if self.dns_min_ttl > self.dns_max_ttl:
            raise ValueError("dns_min_ttl is above dns_max_ttl; hint: make it 5s, or the other larger")
        return self

    def masquerade_for(self, family: Family) -> Masquerade:
        """The value of `masquerade` for one family: auto is off-cluster if that family has cluster CIDRs."""
        if self.masquerade != "auto":
            return Masquerade(self.masquerade)
        if self.cluster_cidrs_of(family):
            return Masquerade.OFF_CLUSTER
        return Masquerade.HAIRPIN if self.compat == "kube-proxy" else Masquerade.FORWARDED

    def cluster_cidrs_of(self, family: Family) -> tuple[str, ...]:
        """The cluster networks of one family."""
        return tuple(cidr for cidr in self.cluster_cidrs if family_of(cidr) is family)

    def health_socket_address(self) -> tuple[str, int] | None:
        """Address and port of `health_address`; None when it is unset."""
        return _place(self.health_address)

    def metrics_socket_address(self) -> tuple[str, int] | None:
        """Address and port of `metrics_address`; None when it is unset."""
        return _place(self.metrics_address)

    def page_socket_address(self) -> tuple[str, int] | None:
        """Address and port of `status_page`; None when it is unset."""
        return _place(self.status_page)

    def node_addresses(self, family: Family, host_addresses: frozenset[str]) -> tuple[str, ...] | None:
        """The host's addresses that answer on node ports; None for all.

        As for kube-proxy that is when no network of the family is named, or the one of every address; and
        loopback counts only for IPv4, where node ports answer on localhost.
        """
        networks = [ipaddress.ip_network(n) for n in self.node_port_addresses if family_of(n) is family]
        if not networks or any(network.prefixlen == 0 for network in networks):
            return None
        own = {ipaddress.ip_address(address) for address in (*host_addresses, "127.0.0.1")}
        answering = (a for a in own if not a.is_loopback or (a.version == 4 and self.answers_on_localhost))
        return tuple(str(a) for a in sorted(answering, key=_order) if any(a in n for n in networks))

    @property
    def host_ports(self) -> BySource:
        """Ranges of ports of this host that services may take, by source."""
        if not isinstance(self.node_port_range, Mapping):
            return self.node_port_range
        if self.compat == "kube-proxy":
            return self.node_port_range if "node_port_range" in self.model_fields_set else ()
        return {**_HOST_PORTS, **self.node_port_range}

    @property
    def host_ports_per_author(self) -> int:
        """How many ports of this host one author may have."""
        unlimited = self.compat == "kube-proxy" and "node_ports_per_author" not in self.model_fields_set
        return MAX_PORT if unlimited else self.node_ports_per_author

    @property
    def exec_sources(self) -> tuple[str, ...]:
        """Kinds of sources whose services may have checks that run programs."""
        return {"off": (), "files": ("file",), "anywhere": ("file", "cli", "etcd")}[self.exec_checks]

    @property
    def check_users(self) -> CheckUsers:
        """The users that may run programs of checks, and that of `notify`."""
        low, _, high = self.check_uids.partition("-")
        uids = range(int(low), int(high) + 1) if high else range(0)
        return CheckUsers(self.admin_group, self.state_dir, uids)

    @property
    def answers_on_localhost(self) -> bool:
        """Whether node ports match 127.0.0.0/8 too, including the default of `localhost_node_ports`."""
        return not self.has_own_chains if self.localhost_node_ports is None else self.localhost_node_ports

    @property
    def has_own_chains(self) -> bool:
        """Whether the chains are vipd's, not kube-proxy's."""
        return self.compat != "kube-proxy" and self.chain_prefix != "KUBE"


def balances_of(dataplane: str) -> frozenset[Balance]:
    """The ways of choosing backends that a dataplane has."""
    return frozenset(Balance) - ({Balance.SOURCE_HASH} if dataplane == "iptables" else set())


def load_settings(
    config: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from a file, `VIPD_*` of `environment` and flags, in rising order of precedence.

    None of them is read unless it is given; a file that is given must exist.
    Raises SettingsError with all problems.
    """
    layers = Layers(config, flags or {}, environment or {})
    try:
        return Settings(**{_LAYERS: layers})  # type: ignore[arg-type]  # no setting
    except ValidationError as error:
        raise SettingsError(layers.problems(error, tuple(Settings.model_fields))) from None


def unknown_environment(environment: Mapping[str, str]) -> list[str]:
    """Names under VIPD_ that are no setting, so that a typing slip is not silent."""
    known = {ENVIRONMENT_PREFIX + name.upper() for name in Settings.model_fields}
    return sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known)


def _place(listen_address: str | None) -> tuple[str, int] | None:
    if not listen_address:
        return None
    frontend = parse_frontend(listen_address)
    return frontend.address, frontend.port


def _order(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int]:
    return address.version, int(address)
