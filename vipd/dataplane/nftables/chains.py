"""The chains that services share: how flows are let in, and how they are spread. Pure.

A chain exists while some service needs one like it. Its name says all that it does, so equal needs meet in
one chain, and there are as many as there are kinds of services, not services.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

from vipd.dataplane.nftables.layout import (
    CLAIMED,
    LOCAL_OFFSET,
    NODE_PORTS,
    NUMBERS,
    RESERVED,
    UNUSED,
    Place,
    allowed,
)
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.options import LOOPBACK
from vipd.model.service import Balance, Family, Masquerade

Rules = tuple[str, ...]

_LIMITED = "limited"
_RESET = "tcp flags & 0x17 != 0x2 reject with tcp reset"
"""For what is not the first segment of a TCP flow: of FIN, SYN, RST and ACK, that has SYN alone."""

HASH_SEED = 0x76697064
"""The same on every host, so that all of them send a client to the same backend."""


class Chain(Protocol):
    """A chain identified by its function. Equal ones are the same chain."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    def rules(self, options: TableOptions) -> Rules:
        """Its rules in order."""

    def needs(self) -> tuple[Chain, ...]:
        """The chains that it leads to."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answers that no backend serves here, or drops."""

    silent: bool = False
    resets: bool = False
    """Only new flows are dropped; older ones get a TCP reset."""

    @property
    def name(self) -> str:
        """`refuse`, `silence` or `silence-reset`; drop is a keyword of nft."""
        return f"silence{'-reset' if self.resets else ''}" if self.silent else "refuse"

    def rules(self, options: TableOptions) -> Rules:
        """TCP gets a reset, which is effective at once everywhere. The answer must come from the original
        destination address, which the dispatch has overwritten."""
        if self.silent and not self.resets:
            return ("drop",)
        restore = f"{options.ip} daddr set ct original {options.ip} daddr"
        if self.silent:
            return restore, _RESET, "drop"
        return restore, "meta l4proto tcp reject with tcp reset", "reject"

    def needs(self) -> tuple[Chain, ...]:
        """Returns an empty tuple."""
        return ()


@dataclass(frozen=True, slots=True)
class Reset:
    """Resets TCP flows that began while their frontend was served; all others pass as if this element
    did not exist."""

    place: Place = Place.ADDRESS

    @property
    def name(self) -> str:
        """`removed`, `node-removed`; reset is a keyword of nft."""
        return f"{self.place.value.rstrip('_')}-removed".lstrip("-")

    def rules(self, options: TableOptions) -> Rules:
        """Connection tracking has forgotten the flow, so its next packet starts a new one, but is no SYN. The
        other rules are those of the dispatch for an address and port of no service."""
        if self.place is Place.NODE:
            return ("fib daddr type != local return", _RESET)
        daddr = f"{options.ip} daddr"
        restore = f"{daddr} set ct original {daddr}"
        on_host = f"meta l4proto . th dport vmap @{NODE_PORTS.name}"
        return restore, _RESET, on_host, f"{daddr} @{CLAIMED.name} goto {UNUSED}", "accept"

    def needs(self) -> tuple[Chain, ...]:
        """Returns an empty tuple."""
        return ()


@dataclass(frozen=True, slots=True)
class _PinRules:
    """The rules of affinity by what they do; `Spread._pinned` has their order."""

    look_up: str
    """Find the client's pin."""
    remember: str
    """Make a pin to the endpoint, or have the one that there is last anew."""
    restore: str
    """Put the client's address back."""
    translate: str
    """Translate to the endpoint."""
    forget: str
    """Delete the pin."""
    pick: str
    """From a slot to the endpoint in it."""
    agree: str
    """Take the endpoint of the pin that stands."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Gives a flow one of a frontend's slots, and sends it to the endpoint there."""

    slots: int
    balance: Balance
    place: Place = Place.ADDRESS
    local: bool = False
    """The slots of endpoints on this host."""
    timeout: int | None = None
    """Seconds for which a client keeps its endpoint; None: no affinity."""
    owner: str = ""
    """Whose turns it counts; the others count none."""

    @property
    def name(self) -> str:
        """`random-3`, `node-local-source-hash-1021-pinned-600`, `round-robin-3-5c0ffee`."""
        words = [self.place.value.rstrip("_"), "local" if self.local else "", self.balance, str(self.slots)]
        pinned = f"pinned-{self.timeout}" if self.timeout is not None else ""
        return "-".join(word for word in (*words, self.owner, pinned) if word)

    def rules(self, options: TableOptions) -> Rules:
        """The flow is marked as ours, then translated.

        The destination address serves as the register that a rule can hand on to the next: it holds the slot,
        or the number of an endpoint, until the translation overwrites it. Two lookups in a row may meet two
        states of the maps when a change comes between them; slot 0 is then there.
        """
        mark = f"ct mark set ct mark | {options.flow_mark:#x}"
        pinned = self.timeout is not None and options.affinity
        return (mark, *(self._pinned(options) if pinned else self._plain(options)), "drop")

    def needs(self) -> tuple[Chain, ...]:
        """None."""
        return ()

    def _plain(self, options: TableOptions) -> Iterator[str]:
        ip, frontend = options.ip, self._frontend(options)
        for choice in self._choices(options):
            yield choice
            yield f"dnat {ip} to {frontend} . {ip} daddr map @{self.place.endpoints.name}"

    def _pinned(self, options: TableOptions) -> Iterator[str]:
        """The rules of a service with affinity. The packet's two addresses serve as registers, since one rule
        hands nothing else on to the next:

            rule           runs if     source holds then  destination holds then
            -------------  ----------  -----------------  ----------------------------------------
            1  look up     always      service number     number of the pinned endpoint, or as before
            2  remember    numbered    service number     the same; the pin lasts anew
            3  restore     always      client             the same
            4  translate   numbered    client             endpoint: the packet leaves the chain
            5  forget      numbered    service number     the same; the pin, to no endpoint, is deleted
            6  choose      always      any                number of the chosen slot
            7  pick        always      any                number of the endpoint in that slot
            8  remember    numbered    service number     the same; there is a pin
            9  agree       numbered    service number     number of the endpoint of the pin that stands
            10 restore     always      client             the same
            11 translate   numbered    client             endpoint: the packet leaves the chain
            12 forget      numbered    service number     the same; the pin is deleted
            13 first slot  always      any                number of slot 0
            14 pick        always      any                number of the endpoint in slot 0
            15 remember    numbered    service number     the same; there is a pin
            16 restore     always      client             the same
            17 translate   numbered    client             endpoint: the packet leaves the chain

        "Numbered": the destination lies in `RESERVED`, so it is the number of an endpoint, or of a slot in
        which nothing was found. A map lookup that finds nothing ends its rule, after what the rule has set
        before it. Rules 5 and 12 are reached with a number only if it leads to no endpoint (any more).
        Rule 9: of a client's flows that begin at the same moment on several processors each may have chosen;
        the first one's pin stands, and the others follow it. Rules 13 to 17 are for a slot that a change has
        just emptied; slot 0 is there.
        """
        rule = self._pin_rules(options)
        choose, first_slot = self._choices(options)
        yield from (rule.look_up, rule.remember, rule.restore, rule.translate, rule.forget)  # 1 to 5
        yield from (choose, rule.pick, rule.remember, rule.agree)  # 6 to 9
        yield from (rule.restore, rule.translate, rule.forget)  # 10 to 12
        yield from (first_slot, rule.pick, rule.remember, rule.restore, rule.translate)  # 13 to 17

    def _pin_rules(self, options: TableOptions) -> _PinRules:
        ip, frontend, client = options.ip, self._frontend(options), pin_key(options)
        numbered = f"{ip} daddr {RESERVED[options.family]}"
        to_service = f"{ip} saddr set {frontend} map @{self.place.services.name}"
        endpoints = self.place.numbered(self.local).name
        pin = f"{client} timeout {self.timeout}s : {ip} daddr"
        return _PinRules(
            look_up=f"{to_service} {ip} daddr set {client} map @pins",
            remember=f"{numbered} {to_service} update @pins {{ {pin} }}",
            restore=f"{ip} saddr set ct original {ip} saddr",
            translate=f"{numbered} dnat {ip} to {frontend} . {ip} daddr map @{endpoints}",
            forget=f"{numbered} {to_service} delete @pins {{ {client} : {ip} daddr }}",
            pick=f"{ip} daddr set {frontend} . {ip} daddr map @{self.place.picks.name}",
            agree=f"{numbered} {ip} daddr set {client} map @pins",
        )

    def _frontend(self, options: TableOptions) -> str:
        rest = "meta l4proto . th dport"
        return rest if self.place is Place.NODE else f"ct original {options.ip} daddr . {rest}"

    def _choices(self, options: TableOptions) -> Iterator[str]:
        """Choose a slot; then, for who finds nothing in it, the first."""
        wide = f" map @{NUMBERS.name}" if options.family is Family.IPV6 else ""
        offset = f" offset {LOCAL_OFFSET}" if self.local else ""
        for choice in (self._choice(options), "numgen inc mod 1"):
            yield f"{options.ip} daddr set {choice}{offset}{wide}"

    def _choice(self, options: TableOptions) -> str:
        if self.balance is Balance.SOURCE_HASH:
            return f"jhash ct original {options.ip} saddr mod {self.slots} seed {HASH_SEED:#x}"
        kind = "inc" if self.balance is Balance.ROUND_ROBIN else "random"
        return f"numgen {kind} mod {self.slots}"


@dataclass(frozen=True, slots=True)
class Masqueraded:
    """Marks flows that require masquerade, and passes all on. With `hairpin` these are
    only the flows of IPv4 loopback addresses."""

    which: Masquerade
    target: Spread

    @property
    def name(self) -> str:
        """`forwarded-random-3`."""
        return f"{self.which}-{self.target.name}"

    def rules(self, options: TableOptions) -> Rules:
        """One mark, if any, and the way on."""
        mark, cidrs = _mark(options), options.cluster_cidrs
        onward = f"goto {self.target.name}"
        if self.which is Masquerade.HAIRPIN:
            return f"{options.ip} saddr {LOOPBACK} {mark}", onward
        if self.which is Masquerade.FORWARDED:
            return f"fib saddr type != local {mark}", onward
        if self.which is Masquerade.OFF_CLUSTER and cidrs:
            return f"{options.ip} saddr != {{ {', '.join(cidrs)} }} {mark}", onward
        # If no network of the family is in the cluster, all sources are outside.
        return mark, onward

    def needs(self) -> tuple[Chain, ...]:
        """The next chain."""
        return (self.target,)


@dataclass(frozen=True, slots=True)
class Edge:
    """Traffic from outside under the local policy: clients in the cluster or on this host are not limited to
    this host's endpoints; they are treated as if their traffic came back from a load balancer."""

    cluster: Spread
    local: Spread | None
    resets: bool = False
    """As in `Refuse`, where there is none on this host."""

    @property
    def name(self) -> str:
        """`edge-random-3-local-random-1`."""
        return f"edge-{self.cluster.name}-{self._local.name}"

    def rules(self, options: TableOptions) -> Rules:
        """Pods, this host, then all other sources."""
        cidrs = ", ".join(options.cluster_cidrs)
        inside = (f"{options.ip} saddr {{ {cidrs} }} goto {self.cluster.name}",) if cidrs else ()
        own = f"fib saddr type local {_mark(options)} goto {self.cluster.name}"
        return (*inside, own, f"goto {self._local.name}")

    def needs(self) -> tuple[Chain, ...]:
        """Both ways."""
        return (self.cluster, self._local)

    @property
    def _local(self) -> Chain:
        return self.local or Refuse(silent=True, resets=self.resets)


@dataclass(frozen=True, slots=True)
class Gate:
    """A node port: only packets for an address of this host continue."""

    target: Chain

    @property
    def name(self) -> str:
        """`gate-node-random-3`."""
        return f"gate-{self.target.name}"

    def rules(self, options: TableOptions) -> Rules:
        """Other packets return to the dispatch. A refusal applies to every address of this host."""
        daddr, answering = f"{options.ip} daddr", options.node_port_addresses
        onward = f"goto {self.target.name}"
        elsewhere = "fib daddr type != local return"
        if isinstance(self.target, Refuse):
            return elsewhere, onward
        if answering is not None:
            listed = f"{daddr} != {{ {', '.join(answering)} }} return" if answering else "return"
            return listed, onward
        if options.family is Family.IPV6:
            return elsewhere, f"{daddr} ::1 return", onward
        return (
            elsewhere,
            *(() if options.localhost_node_ports else (f"{daddr} 127.0.0.0/8 return",)),
            onward,
        )

    def needs(self) -> tuple[Chain, ...]:
        """The next chain."""
        return (self.target,)


@dataclass(frozen=True, slots=True)
class Limited:
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
            f"{_masked(options, length)} . {rest} @{allowed(length).name}"
            for length in reversed(self.lengths)
        ]
        return (*found, "drop")

    def needs(self) -> tuple[Chain, ...]:
        """Returns an empty tuple: the elements of the maps require their chains."""
        return ()


def limits_sources(chain: str) -> bool:
    """Whether this is the name of a `Limited` chain."""
    return chain.partition("-")[0] == _LIMITED


def closure(chain: Chain) -> Iterator[Chain]:
    """A chain and all that it leads to."""
    yield chain
    for needed in chain.needs():
        yield from closure(needed)


def pin_key(options: TableOptions) -> str:
    """The key of `pins` for a packet whose source address is the number of the service port."""
    ip = options.ip
    plain = f"ct original {ip} saddr . {ip} saddr"
    if options.family is Family.IPV4:
        return plain
    return " . ".join(f"jhash {plain} mod 4294967295 seed {seed:#x}" for seed in (HASH_SEED, HASH_SEED + 1))


def _mark(options: TableOptions) -> str:
    return f"meta mark set meta mark | {options.mark:#x}"


def _masked(options: TableOptions, length: int) -> str:
    saddr, bits = f"{options.ip} saddr", options.family.bits
    mask = ((1 << length) - 1) << (bits - length)
    spelled = IPv4Address(mask) if options.family is Family.IPV4 else IPv6Address(mask)
    return saddr if length == bits else f"{saddr} & {spelled}"
