"""The chains that services share: reject, reset, masquerade, external local, node port, source range. Pure.

A chain exists while some service needs it. Its name contains everything that its rules depend on, so services
with equal needs share one chain: the number of chains depends on the kinds of services, not on their number.
Most of these chains lead to a `BalanceChain`, or to the `LimitChain` before one. Each chain also has a number
(`TableNumbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import count
from typing import Protocol

from vipd.dataplane.nftables.layout import (
    CLAIMED,
    NODE_PORTS,
    RESERVED,
    UNUSED,
    FrontendKind,
    Rules,
    allowed_sources,
    name_address,
)
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.options import LOOPBACK
from vipd.model.service import Family, Masquerade

_SOURCE_RANGE_PREFIX = "limited"
_RESET = "tcp flags & 0x17 != 0x2 reject with tcp reset"
"""Matches every TCP segment except the first of a flow, which has only SYN of the flags FIN, SYN, RST,
ACK."""


class Chain(Hashable, Protocol):
    """A chain that is identified by what it does: two equal objects are the same chain."""

    @property
    def name(self) -> str:
        """The chain's name in the nftables table."""

    def rules(self, options: TableOptions) -> Rules:
        """The chain's rules in order."""

    def targets(self) -> tuple[Chain, ...]:
        """The chains that its rules lead to."""


@dataclass(frozen=True, slots=True)
class RejectChain:
    """Rejects, or drops, flows to a frontend without ready backends."""

    drop: bool = False
    resets_old_flows: bool = False
    """With `drop`: whether only new flows are dropped, and older TCP flows get a reset."""

    @property
    def name(self) -> str:
        """`refuse`, `silence` or `silence-reset`; drop is a keyword of nft."""
        return f"silence{'-reset' if self.resets_old_flows else ''}" if self.drop else "refuse"

    def rules(self, options: TableOptions) -> Rules:
        """TCP gets a reset, because every client reacts to it at once. The answer must have the original
        destination as its source address, which the dispatch has overwritten: the first rule restores it."""
        if self.drop and not self.resets_old_flows:
            return ("drop",)
        restore = f"{options.ip} daddr set ct original {options.ip} daddr"
        if self.drop:
            return restore, _RESET, "drop"
        return restore, "meta l4proto tcp reject with tcp reset", "reject"

    def targets(self) -> tuple[Chain, ...]:
        """Returns an empty tuple."""
        return ()


@dataclass(frozen=True, slots=True)
class ResetChain:
    """Resets TCP flows that began while their frontend was served. It treats all other packets as if the
    dispatch map had no element for this frontend."""

    frontend_kind: FrontendKind = FrontendKind.ADDRESS

    @property
    def name(self) -> str:
        """`removed` or `node-removed`; reset is a keyword of nft."""
        return f"{self.frontend_kind.value.rstrip('_')}-removed".lstrip("-")

    def rules(self, options: TableOptions) -> Rules:
        """Connection tracking no longer has an entry for the flow, so its next packet begins a new entry
        although it is no SYN: the reset rule matches it. The other rules are those that the dispatch has for
        an address and port of no service."""
        if self.frontend_kind is FrontendKind.NODE:
            return ("fib daddr type != local return", _RESET)
        daddr = f"{options.ip} daddr"
        restore = f"{daddr} set ct original {daddr}"
        on_host = f"meta l4proto . th dport vmap @{NODE_PORTS.name}"
        return restore, _RESET, on_host, f"{daddr} @{CLAIMED.name} goto {UNUSED}", "accept"

    def targets(self) -> tuple[Chain, ...]:
        """Returns an empty tuple."""
        return ()


@dataclass(frozen=True, slots=True)
class MasqueradeChain:
    """Marks flows that require masquerade, and passes all flows to the next chain. With `hairpin`, only flows
    from IPv4 loopback addresses require it here."""

    which: Masquerade
    target: Chain

    @property
    def name(self) -> str:
        """`forwarded-random-3`."""
        return f"{self.which}-{self.target.name}"

    def rules(self, options: TableOptions) -> Rules:
        """A rule that sets the mark, and one that goes to the next chain."""
        mark, cidrs = _mark(options), options.cluster_cidrs
        goto_target = f"goto {self.target.name}"
        if self.which is Masquerade.HAIRPIN:
            return f"{options.ip} saddr {LOOPBACK} {mark}", goto_target
        if self.which is Masquerade.FORWARDED:
            return f"fib saddr type != local {mark}", goto_target
        if self.which is Masquerade.OFF_CLUSTER and cidrs:
            return f"{options.ip} saddr != {{ {', '.join(cidrs)} }} {mark}", goto_target
        # Without cluster networks of this family, all sources are outside of the cluster.
        return mark, goto_target

    def targets(self) -> tuple[Chain, ...]:
        """The next chain."""
        return (self.target,)


@dataclass(frozen=True, slots=True)
class ExternalLocalChain:
    """Handles external traffic under the local policy. Clients in the cluster or on this host are not limited
    to this host's endpoints: their traffic is treated as if a load balancer had returned it."""

    cluster: Chain
    local: Chain | None
    resets_old_flows: bool = False
    """As in `RejectChain`, which is the target if this host has no endpoint."""

    @property
    def name(self) -> str:
        """`edge-random-3-local-random-1`."""
        return f"edge-{self.cluster.name}-{self._local.name}"

    def rules(self, options: TableOptions) -> Rules:
        """Rules for pods, for this host, then for all other sources."""
        cidrs = ", ".join(options.cluster_cidrs)
        inside = (f"{options.ip} saddr {{ {cidrs} }} goto {self.cluster.name}",) if cidrs else ()
        from_host = f"fib saddr type local {_mark(options)} goto {self.cluster.name}"
        return (*inside, from_host, f"goto {self._local.name}")

    def targets(self) -> tuple[Chain, ...]:
        """The chains for cluster clients and for all others."""
        return (self.cluster, self._local)

    @property
    def _local(self) -> Chain:
        return self.local or RejectChain(drop=True, resets_old_flows=self.resets_old_flows)


@dataclass(frozen=True, slots=True)
class NodePortChain:
    """A node port: only packets for an address of this host continue."""

    target: Chain
    host: Chain | None = None
    """The chain for packets of this host itself, where the next one admits only some sources."""

    @property
    def name(self) -> str:
        """`gate-node-random-3`."""
        return "-".join(("gate", *((self.host.name,) if self.host else ()), self.target.name))

    def rules(self, options: TableOptions) -> Rules:
        """Packets to other addresses return to the dispatch. A `RejectChain` applies to every address of this
        host, not only to those on which node ports are served."""
        daddr, answering = f"{options.ip} daddr", options.node_port_addresses
        from_host = (f"fib saddr type local goto {self.host.name}",) if self.host else ()
        onward = (*from_host, f"goto {self.target.name}")
        elsewhere = "fib daddr type != local return"
        if isinstance(self.target, RejectChain):
            return elsewhere, *onward
        if answering is not None:
            listed = f"{daddr} != {{ {', '.join(answering)} }} return" if answering else "return"
            return listed, *onward
        if options.family is Family.IPV6:
            return elsewhere, f"{daddr} ::1 return", *onward
        loopback = () if options.localhost_node_ports else (f"{daddr} 127.0.0.0/8 return",)
        return elsewhere, *loopback, *onward

    def targets(self) -> tuple[Chain, ...]:
        """The next chains."""
        return (self.target, self.host) if self.host else (self.target,)


@dataclass(frozen=True, slots=True)
class SourceRangeChain:
    """Admits sources of these prefix lengths, each to the chain that its map names, and drops others."""

    lengths: tuple[int, ...]
    """In ascending order."""
    kind: FrontendKind = FrontendKind.ADDRESS

    @property
    def name(self) -> str:
        """`limited-16-24`, `limited-node-16-24`."""
        node = ("node",) if self.kind is FrontendKind.NODE else ()
        return "-".join((_SOURCE_RANGE_PREFIX, *node, *map(str, self.lengths)))

    def rules(self, options: TableOptions) -> Rules:
        """One rule for each length, the longest first. The order has no effect; it is for readers."""
        address = "" if self.kind is FrontendKind.NODE else f"ct original {options.ip} daddr . "
        found = [
            f"{_masked(options, length)} . {address}meta l4proto . th dport"
            f" vmap @{allowed_sources(length, self.kind).name}"
            for length in reversed(self.lengths)
        ]
        return (*found, "drop")

    def targets(self) -> tuple[Chain, ...]:
        """Returns an empty tuple: the next chains are in the maps' elements."""
        return ()


class TableNumbers:
    """Gives each chain and each service port a number, in the form of an address. No other chain, slot or
    endpoint has the number of a chain, and no other service port that of a service port.

    A number is derived from the name, so it is the same after a restart. If two names have the same one, the
    second gets another. After a restart the order of the two may differ; then vipd writes the chain again,
    and clients with affinity to these two services choose anew.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._chains: dict[str, str] = {}
        self._chains_taken: set[str] = set()
        self._services: dict[str, str] = {}
        """By number: the names of service ports, as most of these have the number of their name."""
        self._displaced: dict[str, str] = {}
        """The numbers of service ports whose own one another has."""
        self._reserved = ip_network(RESERVED[family])

    def chain(self, name: str) -> str:
        """The number of a chain."""
        if known := self._chains.get(name):
            return known
        number = next(number for number in self._candidates(name) if self._free(number))
        self._chains[name] = number
        self._chains_taken.add(number)
        return number

    def service(self, name: str) -> str:
        """The number of a service port."""
        if displaced := self._displaced.get(name):
            return displaced
        candidates = self._candidates(name)
        number = own = next(candidates)
        while self._services.setdefault(number, name) != name:
            number = next(candidates)
        if number != own:
            self._displaced[name] = number
        return number

    def keep_chains(self, is_wanted: Callable[[str], bool]) -> None:
        """Drop the numbers of all other chains."""
        self._chains = {chain: number for chain, number in self._chains.items() if is_wanted(chain)}
        self._chains_taken = set(self._chains.values())

    def drop_service(self, name: str) -> None:
        """Drop the number of a service port, if it has one."""
        number = self._displaced.pop(name, None) or name_address(self._family, name)
        if self._services.get(number) == name:
            del self._services[number]

    def _candidates(self, name: str) -> Iterator[str]:
        names = (f"{name} {attempt}" if attempt else name for attempt in count())
        return (name_address(self._family, each) for each in names)

    def _free(self, number: str) -> bool:
        return number not in self._chains_taken and ip_address(number) not in self._reserved


def limits_sources(chain: str) -> bool:
    """Whether this is the name of a `SourceRangeChain` chain."""
    return chain.partition("-")[0] == _SOURCE_RANGE_PREFIX


def _mark(options: TableOptions) -> str:
    return f"meta mark set meta mark | {options.mark:#x}"


def _masked(options: TableOptions, length: int) -> str:
    saddr, bits = f"{options.ip} saddr", options.family.bits
    mask = ((1 << length) - 1) << (bits - length)
    spelled = IPv4Address(mask) if options.family is Family.IPV4 else IPv6Address(mask)
    return saddr if length == bits else f"{saddr} & {spelled}"
