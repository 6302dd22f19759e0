"""The result of a simulation: every way of one packet, with its probability and the rules. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from vipd.observe.simulator.packet import Packet


class PacketVerdict(StrEnum):
    """The outcome of a packet."""

    DELIVERED = "delivered"
    """Sent on to the backend that a rule chose."""
    REJECTED = "rejected"
    DROPPED = "dropped"
    UNCHANGED = "unchanged"
    """Sent on to its own destination: no rule chose a backend."""


class RuleVerdict(StrEnum):
    """The verdict of a base chain on a packet."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"


@dataclass(frozen=True, slots=True)
class Slots:
    """Which of some equally likely slots (nftables) lead to this outcome, from 0."""

    chosen: tuple[int, ...]
    of: int

    def __or__(self, other: Slots) -> Slots:
        return Slots((*self.chosen, *other.chosen), self.of)


@dataclass(frozen=True, slots=True)
class Step:
    """One rule that matched, or the policy that ended a built-in chain."""

    table: str
    """`nat`, `filter`; for nftables with its family: `ip vipd`."""
    chain: str
    rule: str
    """The rule's text as read; `policy DROP` for a policy. For nftables without its comment."""
    comment: str = ""
    element: str = ""
    """The element of a map or set that the rule found, in its original spelling."""
    slots: Slots | None = None
    """If the rule chose a slot: that one, or all those with the same outcome."""

    def __str__(self) -> str:
        return f"{self.table} {self.chain}: {self.rule}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of the packet."""

    verdict: PacketVerdict
    backend: str | None
    """`ip:port` (IPv6 `[ip]:port`, ICMP without port) that a rule chose, also when it was then refused."""
    probability: float
    """0..1; over the outcomes of a trace they sum to 1."""
    masqueraded: bool
    steps: tuple[Step, ...]
    """One path to this outcome: the first in rule order."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Every way of one packet. No two outcomes agree in verdict, backend and masquerade."""

    packet: Packet
    outcomes: tuple[Outcome, ...]

    def shares(self) -> dict[str, float]:
        """The part of new flows for each backend, 0..1, in rule order."""
        shares: defaultdict[str, float] = defaultdict(float)
        for outcome in self.outcomes:
            if outcome.verdict is PacketVerdict.DELIVERED and outcome.backend is not None:
                shares[outcome.backend] += outcome.probability
        return dict(shares)

    def probability(self, verdict: PacketVerdict) -> float:
        """The probability of this verdict, 0..1."""
        return sum((o.probability for o in self.outcomes if o.verdict is verdict), 0.0)
