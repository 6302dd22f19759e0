"""The values a trace is asked with and answers in."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

from vipd.model import Family, family_of

WITH_PORTS = frozenset({"tcp", "udp", "sctp"})
WITHOUT_PORTS = frozenset({"icmp", "icmpv6"})


class Arrival(StrEnum):
    """How a packet comes to the rules."""

    FORWARDED = "forwarded"
    """In by an interface: nat PREROUTING first, even when its destination turns out to be this host."""
    LOCAL = "local"
    """From a process of this host: nat OUTPUT first."""


class Verdict(StrEnum):
    """What became of a packet."""

    DELIVERED = "delivered"
    """Sent on to the backend that a rule chose."""
    REJECTED = "rejected"
    DROPPED = "dropped"
    UNCHANGED = "unchanged"
    """Sent on to the destination it named itself: no rule took it up."""


@dataclass(frozen=True, slots=True)
class Packet:
    """The first packet of a new flow.

    Raises:
        ValueError: an address cannot be read, the families differ, the protocol is none of tcp, udp, sctp,
            icmp and icmpv6, or a port is missing or out of range.
    """

    source: str
    destination: str
    protocol: str
    port: int | None = None
    """Destination port; None for ICMP."""
    source_port: int = 40000
    arriving: Arrival = Arrival.FORWARDED
    in_interface: str | None = None
    """None: one that no rule names."""
    out_interface: str | None = None
    """None: one that no rule names. From a process to this host it is always `lo`."""
    icmp_type: int | None = None
    """None: an echo request."""

    def __post_init__(self) -> None:
        if ip_address(self.source).version != ip_address(self.destination).version:
            raise ValueError(f"{self.source} and {self.destination} are of different families")
        if self.protocol not in WITH_PORTS | WITHOUT_PORTS:
            raise ValueError(f"protocol {self.protocol!r} is none of tcp, udp, sctp, icmp, icmpv6")
        if (self.protocol in WITH_PORTS) != (self.port is not None):
            raise ValueError(f"{self.protocol} packet with port {self.port}")
        ports = (self.source_port, self.source_port if self.port is None else self.port)
        if not all(1 <= port <= 65535 for port in ports):
            raise ValueError(f"port {self.port} or source port {self.source_port} is not within 1..65535")

    @property
    def family(self) -> Family:
        """The family of both addresses."""
        return family_of(self.destination)


@dataclass(frozen=True, slots=True)
class Host:
    """What the rules ask of the host they run on.

    127.0.0.0/8 and ::1 are always its own. `pinned` names the recent lists that already hold the packet's
    source and have not timed out.
    """

    addresses: tuple[str, ...] = ()
    pinned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Slots:
    """Which of some equally likely slots (nftables) lead this way, from 0."""

    chosen: tuple[int, ...]
    of: int

    def __or__(self, other: Slots) -> Slots:
        return Slots((*self.chosen, *other.chosen), self.of)


@dataclass(frozen=True, slots=True)
class Step:
    """One rule that matched, or the policy that ended a built-in chain."""

    table: str
    """`nat`, `filter`; of nftables with its family: `ip vipd`."""
    chain: str
    rule: str
    """The rule's text as it was read; `policy DROP` for a policy. Of nftables without its comment."""
    comment: str = ""
    element: str = ""
    """The element of a map or set that the rule found, as it is spelled."""
    slots: Slots | None = None
    """Where the rule chose a slot: that one, or all those that lead to the same outcome."""

    def __str__(self) -> str:
        return f"{self.table} {self.chain}: {self.rule}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way the packet can go."""

    verdict: Verdict
    backend: str | None
    """`ip:port` (IPv6 `[ip]:port`, ICMP without port) that a rule chose, also when it was then refused."""
    probability: float
    """0..1; over the outcomes of a trace they sum to 1."""
    masqueraded: bool
    steps: tuple[Step, ...]
    """One path that leads here: the first in rule order."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Every way one packet can go. No two outcomes agree in verdict, backend and masquerade."""

    packet: Packet
    outcomes: tuple[Outcome, ...]

    def shares(self) -> dict[str, float]:
        """The part of new flows that each backend is delivered, 0..1, in rule order."""
        shares: defaultdict[str, float] = defaultdict(float)
        for outcome in self.outcomes:
            if outcome.verdict is Verdict.DELIVERED and outcome.backend is not None:
                shares[outcome.backend] += outcome.probability
        return dict(shares)

    def probability(self, verdict: Verdict) -> float:
        """How likely the packet meets this verdict, 0..1."""
        return sum((o.probability for o in self.outcomes if o.verdict is verdict), 0.0)
