"""Which host answers for an address of a LAN: what this host should do about it now. Pure.

Each address has a key that names its holder, and that exists as long as the holder's lease. Only a
transaction on the key's revision changes it, so that there is one holder whatever hosts believe. Hosts that
could hold an address publish that (candidates). All rank the candidates of an address alike (rendezvous
hashing), so that addresses are spread, and a lost host's addresses are spread over all others.

A holder keeps its addresses (no address moves because a host comes back) until it hands one over: because
it cannot serve it, is drained, or another host has been the first in rank for `preempt_delay`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

RANK_STEP_SECONDS = 0.5
"""How much longer each further candidate waits before it takes an address that nobody has."""
SETTLE_SECONDS = 1.0
"""A host that has just become a candidate waits for others that start at the same time."""
MAX_PREEMPTIONS = 20
"""Addresses that are given back to their first host in one step."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The content of an address's key."""

    host: str
    lease: int
    mod_revision: int
    since: str = ""
    """When this host got it, in RFC 3339."""
    previous: str = ""
    """The host that handed it over."""
    instance: str = ""
    """The machine and network namespace of the holder: its own earlier process, or another host of that
    name?"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a host publishes."""

    host: str
    lease: int
    mod_revision: int
    addresses: frozenset[str]
    """Those that it could hold now."""
    hardware: frozenset[str] = frozenset()
    """Its hardware addresses on its LANs: an answer from one of them is no conflict."""
    own: tuple[str, ...] = ()
    """Its own addresses on its LANs."""
    instance: str = ""
    """As in `Holding`."""
    fault: str = ""
    """Why its value cannot be read."""


@dataclass(frozen=True, slots=True)
class View:
    """The keys of all hosts, as last known."""

    holders: Mapping[str, Holding] = field(default_factory=dict)
    """By address."""
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    """By host."""

    def of(self, address: str) -> list[Candidate]:
        """The candidates for an address, the first in rank first."""
        found = [each for each in self.candidates.values() if address in each.addresses]
        return sorted(found, key=lambda each: rank(address, each.host))


@dataclass(frozen=True, slots=True)
class Claim:
    """Take an address: nobody has it, or an earlier process of this host (`mod_revision`)."""

    address: str
    mod_revision: int = 0


@dataclass(frozen=True, slots=True)
class HandOver:
    """Give an address to another host."""

    address: str
    held: Holding
    to: Candidate
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give an address up, with no host to take it."""

    address: str
    held: Holding
    why: str


GIVEN_UP = "this host does not serve it any more, or gives up its addresses"

Action = Claim | HandOver | Release


@dataclass(frozen=True, slots=True)
class Position:
    """This host, at one time."""

    host: str
    lease: int
    """0: none that is valid."""
    instance: str
    ready: frozenset[str]
    """The addresses that it can hold now."""


def rank(address: str, host: str) -> bytes:
    """The lower, the earlier (rendezvous hashing)."""
    return hashlib.sha256(f"{address} {host}".encode()).digest()


class Election:
    """Decides for one host. Times are those of a monotonic clock."""

    def __init__(self, preempt_delay: float) -> None:
        """`preempt_delay` 0: an address is never given back."""
        self._preempt_delay = preempt_delay
        self._vacant: dict[str, float] = {}
        """Since when an address is known to have no holder."""
        self._seen: dict[str, tuple[int, float]] = {}
        """The lease of a candidate, and since when it is known."""
        self._standing_since: float | None = None

    def decide(self, view: View, me: Position, now: float) -> list[Action]:
        """What to do now, in order of addresses."""
        self._update(view, me, now)
        if not me.lease:
            return []
        found, preempted = list[Action](), 0
        for address in sorted({*me.ready, *(a for a, h in view.holders.items() if h.host == me.host)}):
            action = self._decide(address, view, me, now)
            preempted += isinstance(action, HandOver) and address in me.ready
            if action and (preempted <= MAX_PREEMPTIONS or address not in me.ready):
                found.append(action)
        return found

    def _update(self, view: View, me: Position, now: float) -> None:
        self._vacant = {
            address: self._vacant.get(address, now) for address in me.ready if address not in view.holders
        }
        self._seen = {
            name: found
            if (found := self._seen.get(name, (0, now)))[0] == candidate.lease
            else (candidate.lease, now)
            for name, candidate in view.candidates.items()
        }
        if me.host not in view.candidates:
            self._standing_since = None
        elif self._standing_since is None:
            self._standing_since = now

    def _decide(self, address: str, view: View, me: Position, now: float) -> Action | None:
        held, ready = view.holders.get(address), address in me.ready
        if held is None:
            return Claim(address) if self._is_turn(address, view, me, now) else None
        if held.host != me.host:
            return None
        if held.lease != me.lease:
            earlier = ready and held.instance == me.instance
            return Claim(address, held.mod_revision) if earlier else None
        others = [candidate for candidate in view.of(address) if candidate.host != me.host]
        if ready:
            return self._preempted(address, held, others, now)
        if others:
            return HandOver(address, held, others[0], GIVEN_UP)
        return Release(address, held, GIVEN_UP)

    def _is_turn(self, address: str, view: View, me: Position, now: float) -> bool:
        hosts = [candidate.host for candidate in view.of(address)]
        if me.host not in hosts or self._standing_since is None:
            return False
        since = max(self._vacant[address], self._standing_since + SETTLE_SECONDS)
        return now >= since + hosts.index(me.host) * RANK_STEP_SECONDS

    def _preempted(self, address: str, held: Holding, others: list[Candidate], now: float) -> HandOver | None:
        """An address goes back to its first host, once that has been there for a while."""
        if not self._preempt_delay or not others or rank(address, held.host) < rank(address, others[0].host):
            return None
        _, since = self._seen[others[0].host]
        if now < since + self._preempt_delay:
            return None
        return HandOver(address, held, others[0], f"{others[0].host} is the first host for it")
