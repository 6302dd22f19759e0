"""The chains that services share, and by which flows come in; their numbers. Pure.

A chain exists while some service needs one like it. Its name says all that it does, so equal needs meet in
one chain, and there are as many as there are kinds of services, not services. They lead to those of `spread`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from itertools import count
from typing import Protocol

from vipd.dataplane.nftables.balance_chain import BalanceChain
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

_LIMITED = "limited"
_RESET = "tcp flags & 0x17 != 0x2 reject with tcp reset"
"""Matches every TCP segment except the first of a flow: of FIN, SYN, RST and ACK, that has SYN alone."""


class Chain(Protocol):
    """A chain identified by its function. Equal ones are the same chain."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    def rules(self, options: TableOptions) -> Rules:
        """Its rules in order."""

    def targets(self) -> tuple[Chain, ...]:
        """The chains that it leads to."""


@dataclass(frozen=True, slots=True)
class RejectChain:
    """Answers that no backend serves here, or drops."""

    drop: bool = False
    resets_old_flows: bool = False
    """Only new flows are dropped; older ones get a TCP reset."""

    @property
    def name(self) -> str:
        """`refuse`, `silence` or `silence-reset`; drop is a keyword of nft."""
        return f"silence{'-reset' if self.resets_old_flows else ''}" if self.drop else "refuse"

    def rules(self, options: TableOptions) -> Rules:
        """TCP gets a reset, which is effective at once everywhere. The answer must come from the original
        destination address, which the dispatch has overwritten."""
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
    """Resets TCP flows that began while their frontend was served; all others pass as if this element
    did not exist."""

    place: FrontendKind = FrontendKind.ADDRESS

    @property
    def name(self) -> str:
        """`removed`, `node-removed`; reset is a keyword of nft."""
        return f"{self.place.value.rstrip('_')}-removed".lstrip("-")

    def rules(self, options: TableOptions) -> Rules:
        """Connection tracking has forgotten the flow, so its next packet starts a new one, but is no SYN. The
        other rules are those of the dispatch for an address and port of no service."""
        if self.place is FrontendKind.NODE:
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
    """Marks flows that require masquerade, and passes all on. With `hairpin` these are
    only the flows of IPv4 loopback addresses."""

    which: Masquerade
    target: BalanceChain

    @property
    def name(self) -> str:
        """`forwarded-random-3`."""
        return f"{self.which}-{self.target.name}"

    def rules(self, options: TableOptions) -> Rules:
        """One mark, if any, and the way on."""
        mark, cidrs = _mark(options), options.cluster_cidrs
        goto_target = f"goto {self.target.name}"
        if self.which is Masquerade.HAIRPIN:
            return f"{options.ip} saddr {LOOPBACK} {mark}", goto_target
        if self.which is Masquerade.FORWARDED:
            return f"fib saddr type != local {mark}", goto_target
        if self.which is Masquerade.OFF_CLUSTER and cidrs:
            return f"{options.ip} saddr != {{ {', '.join(cidrs)} }} {mark}", goto_target
        # If no network of the family is in the cluster, all sources are outside.
        return mark, goto_target

    def targets(self) -> tuple[Chain, ...]:
        """The next chain."""
        return (self.target,)


@dataclass(frozen=True, slots=True)
class ExternalLocalChain:
    """Traffic from outside under the local policy: clients in the cluster or on this host are not limited to
    this host's endpoints; they are treated as if their traffic came back from a load balancer."""

    cluster: BalanceChain
    local: BalanceChain | None
    resets_old_flows: bool = False
    """As in `RejectChain`, where there is none on this host."""

    @property
    def name(self) -> str:
        """`edge-random-3-local-random-1`."""
        return f"edge-{self.cluster.name}-{self._local.name}"

    def rules(self, options: TableOptions) -> Rules:
        """Pods, this host, then all other sources."""
        cidrs = ", ".join(options.cluster_cidrs)
        inside = (f"{options.ip} saddr {{ {cidrs} }} goto {self.cluster.name}",) if cidrs else ()
        from_host = f"fib saddr type local {_mark(options)} goto {self.cluster.name}"
        return (*inside, from_host, f"goto {self._local.name}")

    def targets(self) -> tuple[Chain, ...]:
        """Both ways."""
        return (self.cluster, self._local)

    @property
    def _local(self) -> Chain:
        return self.local or RejectChain(drop=True, resets_old_flows=self.resets_old_flows)


@dataclass(frozen=True, slots=True)
class NodePortChain:
    """A node port: only packets for an address of this host continue."""

    target: Chain

    @property
    def name(self) -> str:
        """`gate-node-random-3`."""
        return f"gate-{self.target.name}"

    def rules(self, options: TableOptions) -> Rules:
        """Other packets return to the dispatch. A refusal applies to every address of this host."""
        daddr, answering = f"{options.ip} daddr", options.node_port_addresses
        goto_target = f"goto {self.target.name}"
        elsewhere = "fib daddr type != local return"
        if isinstance(self.target, RejectChain):
            return elsewhere, goto_target
        if answering is not None:
            listed = f"{daddr} != {{ {', '.join(answering)} }} return" if answering else "return"
            return listed, goto_target
        if options.family is Family.IPV6:
            return elsewhere, f"{daddr} ::1 return", goto_target
        return (
            elsewhere,
            *(() if options.localhost_node_ports else (f"{daddr} 127.0.0.0/8 return",)),
            goto_target,
        )

    def targets(self) -> tuple[Chain, ...]:
        """The next chain."""
        return (self.target,)


@dataclass(frozen=True, slots=True)
class SourceRangeChain:
    """Admits sources of these prefix lengths, each to the chain that its map names, and drops others."""

    lengths: tuple[int, ...]
    """In ascending order."""

    @property
    def name(self) -> str:
        """`limited-16-24`."""
        return "-".join((_LIMITED, *map(str, self.lengths)))

    def rules(self, options: TableOptions) -> Rules:
        """Longest first; it makes no difference but to the eye."""
        rest = f"ct original {options.ip} daddr . meta l4proto . th dport vmap"
        found = [
            f"{_masked(options, length)} . {rest} @{allowed_sources(length).name}"
            for length in reversed(self.lengths)
        ]
        return (*found, "drop")

    def targets(self) -> tuple[Chain, ...]:
        """Returns an empty tuple: the elements of the maps require their chains."""
        return ()


class ChainNumbers:
    """Gives each chain a number, as an address, different from all other chains, slots and endpoints.

    It derives from the chain's name, so it is the same after a restart. On a collision the second chain
    takes another; the order may differ after a restart, and then the chain is written anew.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._numbers: dict[str, str] = {}
        self._taken: set[str] = set()
        self._reserved = ip_network(RESERVED[family])

    def number(self, chain: str) -> str:
        """The number of a chain, by its name."""
        return self._numbers.get(chain) or self._take(chain)

    def keep(self, chains: Container[str]) -> None:
        """Forget all chains but these."""
        self._numbers = {chain: number for chain, number in self._numbers.items() if chain in chains}
        self._taken = set(self._numbers.values())

    def _take(self, chain: str) -> str:
        names = (f"{chain} {attempt}" if attempt else chain for attempt in count())
        numbers = (name_address(self._family, name) for name in names)
        number = self._numbers[chain] = next(number for number in numbers if self._free(number))
        self._taken.add(number)
        return number

    def _free(self, number: str) -> bool:
        return number not in self._taken and ip_address(number) not in self._reserved


def limits_sources(chain: str) -> bool:
    """Whether this is the name of a `SourceRangeChain` chain."""
    return chain.partition("-")[0] == _LIMITED


def closure(chain: Chain) -> Iterator[Chain]:
    """A chain and all that it leads to."""
    yield chain
    for needed in chain.targets():
        yield from closure(needed)


def _mark(options: TableOptions) -> str:
    return f"meta mark set meta mark | {options.mark:#x}"


def _masked(options: TableOptions, length: int) -> str:
    saddr, bits = f"{options.ip} saddr", options.family.bits
    mask = ((1 << length) - 1) << (bits - length)
    spelled = IPv4Address(mask) if options.family is Family.IPV4 else IPv6Address(mask)
    return saddr if length == bits else f"{saddr} & {spelled}"
