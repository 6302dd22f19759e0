"""The result of a simulation: every outcome for one packet, with its probability and the rules. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from vipd.observe.simulator.packet import Packet


class PacketVerdict(StrEnum):
    """What happens to a packet in the end."""

    DELIVERED = "delivered"
    """Forwarded to the backend that a rule chose."""
    REJECTED = "rejected"
    DROPPED = "dropped"
    UNCHANGED = "unchanged"
    """Forwarded to its original destination: no rule chose a backend."""


class RuleVerdict(StrEnum):
    """The verdict of a base chain on a packet."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots that lead to an outcome (nftables): `chosen` are their numbers from 0, out of `total` equally
    likely slots."""

    chosen: tuple[int, ...]
    total: int

    def __or__(self, other: Slots) -> Slots:
        return Slots((*self.chosen, *other.chosen), self.total)


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
    """The element that the rule's lookup in a map or set found, in its original spelling."""
    slots: Slots | None = None
    """The slot that the rule chose, or all slots with the same outcome; None if it chose none."""

    def __str__(self) -> str:
        return f"{self.table} {self.chain}: {self.rule}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One possible outcome for the packet."""

    verdict: PacketVerdict
    backend: str | None
    """The backend that a rule chose, as `ip:port` (IPv6 `[ip]:port`, ICMP without port). It is also set if a
    later rule refused the packet."""
    probability: float
    """0..1; over the outcomes of a trace they sum to 1."""
    masqueraded: bool
    steps: tuple[Step, ...]
    """The matched rules of one path to this outcome: the first path in rule order."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Every outcome for one packet. No two have the same verdict, backend and masquerade."""

    packet: Packet
    outcomes: tuple[Outcome, ...]

    def shares(self) -> dict[str, float]:
        """The share of new flows that each backend gets, 0..1, in rule order."""
        shares: defaultdict[str, float] = defaultdict(float)
        for outcome in self.outcomes:
            if outcome.verdict is PacketVerdict.DELIVERED and outcome.backend is not None:
                shares[outcome.backend] += outcome.probability
        return dict(shares)

    def probability(self, verdict: PacketVerdict) -> float:
        """The probability of this verdict, 0..1."""
        return sum((o.probability for o in self.outcomes if o.verdict is verdict), 0.0)
