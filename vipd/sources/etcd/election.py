"""Which host answers for an address of a LAN: the lease under which hosts hold addresses, what a host should
do about them now, and the keys by which hosts agree.

`PREFIXannounce/addresses/ADDRESS` names the holder, `PREFIXannounce/hosts/NAME` what a host could hold (a
candidate). Both have the lease of the host that they name. Only a transaction on the revision of an address's
key changes it, so that there is one holder whatever hosts believe. All rank the candidates of an address the
same way (rendezvous hashing): addresses are spread, and those of a lost host are spread over all others.

A holder keeps its addresses (no address moves because a host comes back) until it hands one over: because
it cannot serve it, is drained, or another host has been the first in rank for `preempt_delay`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, Field

from vipd.declaration.bounded_json import read_json
from vipd.declaration.problems import printable
from vipd.host.supervisor import Backoff, LoopState
from vipd.sources.etcd.client import EtcdClient, KeyValue
from vipd.sources.etcd.leases import CLOSE_TIMEOUT_SECONDS, Lease

if TYPE_CHECKING:
    from vipd.host.lan.answers import LanAnswers

log = logging.getLogger(__name__)

MIN_TTL_SECONDS = 2
"""etcd grants no shorter lease with its default election timeout of 1 s."""
EXPIRY_SECONDS = 1.0
"""From the end of a lease to the next holder: etcd looks for expired leases every 0.5 s, and two writes."""
RANK_STEP_SECONDS = 0.5
"""How much longer each further candidate waits before it takes an address that nobody has."""
SETTLE_SECONDS = 1.0
"""A host that has just become a candidate waits for others that start at the same time."""
MAX_PREEMPTIONS = 20
"""Addresses that are given back to their first host in one step."""
RELIST_SECONDS = 10.0
"""A watch can fall silent without an error; the keys are few."""
MAX_HOLDER_BYTES = 2048
MAX_CANDIDATE_BYTES = 2**18
MAX_ADDRESSES = 5_000
"""Of one host: some 100 kB."""
_HARDWARE = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Durations in seconds that follow from the time within which a lost host is replaced."""

    ttl: int

    @classmethod
    def within(cls, takeover: float) -> LeaseTimes:
        """For a takeover within so many seconds."""
        return cls(max(MIN_TTL_SECONDS, int(takeover - EXPIRY_SECONDS)))

    @property
    def margin(self) -> float:
        """For clocks that run at different rates: 10 %, where quartz needs 0.01 %."""
        return self.ttl / 10

    @property
    def gate(self) -> float:
        """How long the gate stays open without a renewal."""
        return (self.ttl - self.margin) / 2

    @property
    def interval(self) -> float:
        """Between two renewals: two may fail before the gate closes."""
        return self.gate / 3

    @property
    def timeout(self) -> float:
        """For one member of etcd to answer."""
        return self.ttl / 4


class HostLease(Lease):
    """Gets and renews the lease under which this host holds addresses of LANs, and opens a gate while it is
    valid.

    The order of requests is what `vipd.host.lan.answer_gate` relies on: the gate is prepared, or was
    extended, before each request is sent, and is opened or extended only after its answer.
    """

    def __init__(
        self, client: EtcdClient, gate: LanAnswers, times: LeaseTimes, changed: Callable[[], None]
    ) -> None:
        super().__init__(client, times.ttl)
        self._gate, self._times, self._changed = gate, times, changed
        self.is_open = False
        """The gate was open after the last renewal."""
        self.loop_state = LoopState(
            Backoff(times.interval, times.interval, jitter=0.2), reported_elsewhere=True
        )
        """How the loop is run, and its state. It does not slow down: addresses may have no holder."""

    async def run(self) -> None:
        """Renew until that fails. Raises EtcdError and OSError; run it again then, with `loop_state`."""
        while True:
            await self._step()
            self.loop_state.clear_fault()
            await asyncio.sleep(self._times.interval)

    async def _step(self) -> None:
        """One renewal; a new lease if there is none or etcd says that it is no more. Raises EtcdError,
        OSError."""
        seconds, was_open = self._times.gate, self.is_open
        if not was_open:
            await self._gate.prepare(seconds)
        if not self.id:
            self.id = await self._client.grant_lease(self.ttl)
        elif not await self.renew():
            # What this host held may belong to another host by now.
            log.warning("the lease for addresses of the LAN has expired; this host gives them up")
            await self._gate.reset()
            self.is_open = False
            self._changed()
            return
        self.is_open = await (self._gate.extend if was_open else self._gate.open)(seconds)
        if self.is_open != was_open:
            log.info("answers for addresses of the LAN: %s", "on" if self.is_open else "off until a renewal")
            self._changed()

    async def close(self) -> None:
        """End the lease, after the gate has been closed. Waits a moment at most."""
        if fault := await self.end(CLOSE_TIMEOUT_SECONDS):
            log.info("the lease of this host stays for up to %d s: %s", self.ttl, fault)


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
    instance: str = ""
    """As in `Holding`."""


@dataclass(frozen=True, slots=True)
class View:
    """The keys of all hosts, as last known."""

    holders: Mapping[str, Holding] = field(default_factory=dict)
    """By address."""
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    """By host."""

    def of(self, address: str) -> list[Candidate]:
        """The candidates for an address, the first in rank first."""
        candidates = [c for c in self.candidates.values() if address in c.addresses]
        return sorted(candidates, key=lambda candidate: rank(address, candidate.host))


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
        actions, preempted = list[Action](), 0
        for address in sorted({*me.ready, *(a for a, h in view.holders.items() if h.host == me.host)}):
            action = self._decide(address, view, me, now)
            preempted += isinstance(action, HandOver) and address in me.ready
            if action and (preempted <= MAX_PREEMPTIONS or address not in me.ready):
                actions.append(action)
        return actions

    def _update(self, view: View, me: Position, now: float) -> None:
        self._vacant = {
            address: self._vacant.get(address, now) for address in me.ready if address not in view.holders
        }
        before, unseen = self._seen, (0, now)
        self._seen = {
            name: seen if (seen := before.get(name, unseen))[0] == candidate.lease else (candidate.lease, now)
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


class AnnouncementKeys:
    """All hosts' candidacies and holdings. `changed` is called after each difference."""

    def __init__(self, client: EtcdClient, prefix: str, changed: Callable[[], None]) -> None:
        self._client, self._changed = client, changed
        self._prefix = f"{prefix}announce/"
        self._addresses, self._hosts = f"{self._prefix}addresses/", f"{self._prefix}hosts/"
        self._holders: dict[str, Holding] = {}
        self._candidates: dict[str, Candidate] = {}
        self.listed = False
        """The keys were listed in this run of the daemon."""
        self.loop_state = LoopState(Backoff(0.2, 2.0, jitter=0.5), reported_elsewhere=True)
        """How the loop is run, and its state."""

    @property
    def view(self) -> View:
        """The keys as last known."""
        return View(dict(self._holders), dict(self._candidates))

    async def run(self) -> None:
        """Follow until that fails. Raises EtcdError; run it again then, with `loop_state`."""
        while True:
            revision = await self._list()
            self.loop_state.clear_fault()
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(RELIST_SECONDS),
                    self._client.watch(self._prefix, revision + 1) as watch,
                ):
                    async for _, events in watch.events:
                        for event in events:
                            self._put(event.kv, event.deleted)
                        if events:
                            self._changed()

    async def claim(self, address: str, value: str, lease: int, mod_revision: int) -> None:
        """Become the holder if the key is still at this revision; 0: if it does not exist. Raises
        EtcdError."""
        await self._hold(address, {self._key(address): mod_revision}, value, lease)

    async def hand_over(self, address: str, held: Holding, to: Candidate, value: str) -> bool:
        """Make a candidate the holder, under its own lease, if both keys are unchanged. Raises EtcdError."""
        unchanged = {
            self._key(address): held.mod_revision,
            f"{self._hosts}{to.host}": to.mod_revision,
        }
        return await self._hold(address, unchanged, value, to.lease)

    async def release(self, address: str, held: Holding) -> bool:
        """Delete the key of an address, if it is unchanged. Raises EtcdError."""
        key = self._key(address)
        done = await self._client.txn({key: held.mod_revision}, deletes=[key])
        if done:
            self._holders.pop(address, None)
        return bool(done)

    async def refresh(self, addresses: Collection[str]) -> None:
        """Read the keys of these addresses now. Raises EtcdError."""
        for address in sorted(addresses):
            kv = await self._client.get(self._key(address))
            if kv is None:
                self._holders.pop(address, None)
            else:
                self._put(kv)

    async def publish(self, host: str, value: str, lease: int) -> None:
        """Write the candidacy of this host. Raises EtcdError."""
        await self._client.put(f"{self._hosts}{host}", value, lease)

    async def _hold(self, address: str, unchanged: dict[str, int], value: str, lease: int) -> bool:
        key = self._key(address)
        revision = await self._client.txn(unchanged, {key: (value, lease)})
        if revision:
            self._put(KeyValue(key, value, revision, lease=lease))
        return bool(revision)

    async def _list(self) -> int:
        listing = await self._client.list_keys([self._prefix])
        before = self._holders, self._candidates
        self._holders, self._candidates = {}, {}
        for kv in listing.kvs:
            self._put(kv)
        first, self.listed = not self.listed, True
        if first or before != (self._holders, self._candidates):
            self._changed()
        return listing.header.revision

    def _put(self, kv: KeyValue, deleted: bool = False) -> None:
        if kv.key.startswith(self._hosts):
            host = printable(kv.key.removeprefix(self._hosts))
            self._candidates.pop(host, None)
            if not deleted:
                self._candidates[host] = read_candidate(host, kv)
            return
        try:
            address = str(ip_address(kv.key.removeprefix(self._addresses)))
        except ValueError:
            return
        known = self._holders.get(address)
        if self._key(address) != kv.key or (known is not None and known.mod_revision > kv.mod_revision):
            return  # another way to write it, or written by this host meanwhile
        self._holders.pop(address, None)
        if not deleted:
            self._holders[address] = read_holder(kv)

    def _key(self, address: str) -> str:
        return f"{self._addresses}{address}"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("a name cannot be printed")
    return text


_Name = Annotated[str, Field(max_length=253), AfterValidator(_printable)]


class _HolderValue(BaseModel):
    """The value of an address's key."""

    host: _Name = ""
    since: _Name = ""
    instance: _Name = ""
    previous: _Name = ""


class _CandidateValue(BaseModel):
    """The value of a host's key."""

    addresses: Annotated[list[str], Field(max_length=MAX_ADDRESSES)] = []
    hardware: Annotated[list[str], Field(max_length=100)] = []
    instance: _Name = ""


def holder_value(host: str, instance: str, since: str, previous: str = "") -> str:
    """The value of an address's key."""
    return json.dumps({"host": host, "since": since, "instance": instance, "previous": previous})


def read_holder(kv: KeyValue) -> Holding:
    """A value that cannot be read is a holder without a name: the key is there, so nobody may take the
    address."""
    try:
        value = _HolderValue.model_validate(read_json(kv.value, MAX_HOLDER_BYTES))
    except ValueError:
        value = _HolderValue()
    return Holding(value.host, kv.lease, kv.mod_revision, value.since, value.previous, value.instance)


def candidate_value(addresses: Collection[str], hardware: Collection[str], instance: str) -> str:
    """The value of a host's key."""
    listed = sorted(addresses)[:MAX_ADDRESSES]
    return json.dumps({"addresses": listed, "hardware": sorted(hardware), "instance": instance})


def read_candidate(host: str, kv: KeyValue) -> Candidate:
    """What a host published; one that cannot be read is a candidate for nothing."""
    try:
        value = _CandidateValue.model_validate(read_json(kv.value, MAX_CANDIDATE_BYTES))
        addresses = frozenset(str(ip_address(address)) for address in value.addresses)
    except ValueError:
        value, addresses = _CandidateValue(), frozenset[str]()
    hardware = frozenset(filter(_HARDWARE.fullmatch, value.hardware))
    return Candidate(host, kv.lease, kv.mod_revision, addresses, hardware, value.instance)
