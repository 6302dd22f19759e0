"""Both families' rule counters as new flows of backends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from vipd.dataplane.counting import BackendKey, RefusedKey
from vipd.dataplane.iptables.counters.counter_deltas import ChainName, CounterDeltas
from vipd.dataplane.iptables.counters.messages import Counted, RuleMessages, limit_rule
from vipd.dataplane.iptables.counters.reading import read_kernel, read_saved_counts
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.plan import Change
from vipd.host.batches import in_slices
from vipd.model.flow_limits import FlowLimits, Limit
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.frozen import compact_set
from vipd.model.service import Family

log = logging.getLogger(__name__)

LONGEST_READING_BEFORE_A_WRITE = 0.1
"""Seconds; a longer reading does not delay changes of legacy rules, and flows since the last one are lost."""

ENTERED_AT_ONCE = 1000
"""Counts of rules: some milliseconds."""

Changes = dict[ForwardingKey, Forwarding | None]

SaveCounted = Callable[[], Awaitable[str]]
"""Returns the output of iptables-legacy-save with `-c`. Raises ApplyError."""


class RuleCounter:
    """Implements `vipd.dataplane.counting.FlowCounter`.

    The kernel sends no notifications of rules in legacy tables, so vipd reads the counters of a chain before
    it rewrites the chain.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._families: dict[Family, SaveCounted | None] = {}
        """The families that are counted, and how their legacy tables are read; None: they are in
        nf_tables."""
        self._messages = RuleMessages(names)
        self._deltas = CounterDeltas()
        self._places: dict[ChainName, BackendKey] = {}
        self._chains: dict[ForwardingKey, Collection[ChainName]] = {}
        """The chains of each forwarding, as `compact_set` returns them."""
        self._leaving: set[ChainName] = set()
        """Chains that no forwarding has any more, and whose rules may still be there."""
        self._changes: Changes = {}
        self._limits: dict[ForwardingKey, FlowLimits] = {}
        """Of the forwardings that have limits."""
        self._limiting: dict[ChainName, ForwardingKey] = {}
        """The LIM chains, until their rules are gone."""
        self._lock = asyncio.Lock()
        self._garbled = False
        self._tables_gone = dict.fromkeys(Family, 0)
        self._seconds = dict.fromkeys(Family, 0.0)
        """CPU time of the last reading; for legacy rules its duration."""

    def use(self, family: Family, legacy: SaveCounted | None) -> None:
        """Count this family from now on; `legacy` reads its legacy tables. Another variant counts from 0."""
        if family in self._families and (self._families[family] is None) != (legacy is None):
            self._deltas.reset(family)
        self._families[family] = legacy

    def stop(self, family: Family) -> None:
        """Do not count this family any more: it has no tools."""
        if self._families.pop(family, None) is not None:
            self._deltas.reset(family)

    @property
    def seconds(self) -> float:
        """CPU time that the last `take` took, about."""
        return sum(self._seconds.values())

    def update(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Add new forwardings, and remove those that are None."""
        if not self._changes.keys().isdisjoint(changes):
            self._follow()  # forwardings that existed only between two takes had flows, too
        self._changes.update(changes)
        for key, forwarding in changes.items():
            self._limits.pop(key, None)
            if forwarding and forwarding.limits:
                self._limits[key] = forwarding.limits
                self._limiting[key.family, self._names.service(key, "LIM")] = key

    def on_message(self, datagram: bytes) -> None:
        """Process the kernel's notification of nf_tables rules. Does not raise for a truncated one."""
        try:
            for told in self._messages.ended(datagram):
                if isinstance(told, Counted):
                    self._deltas.ended(told)
                else:
                    self._tables_gone[told.family] += 1
                    self._deltas.reset(told.family)
        except ValueError as error:
            if not self._garbled:  # once: such messages may arrive by the thousand
                log.warning("the last count of a deleted rule is not understood: %s", error)
            self._garbled = True

    async def before_write(self, family: Family, changes: Collection[Change]) -> None:
        """Rules are about to be written: read the counts that would be lost. Raises ApplyError."""
        quick = self._seconds[family] <= LONGEST_READING_BEFORE_A_WRITE
        if self._families.get(family) and quick and self._rewritten(changes):
            async with self._lock:
                await self._read(family)

    def after_write(self, family: Family, changes: Collection[Change]) -> None:
        """Rules were written: the counters of changed chains restarted."""
        if self._families.get(family):
            self._deltas.reset(family, self._rewritten(changes))

    async def take(self) -> Mapping[BackendKey, int]:
        """The new flows since the last time. Raises ApplyError or OSError."""
        async with self._lock:
            await self._follow_beside()
            wanted = {key.family for key in (*self._chains, *self._limiting.values())}
            wanted.update(family for family, _ in self._leaving)
            for family in self._families:
                if family in wanted:
                    await self._read(family)
            taken: dict[BackendKey, int] = {}
            grown = self._deltas.grown()
            async for at in in_slices(range(0, len(grown), ENTERED_AT_ONCE)):
                part = grown[at : at + ENTERED_AT_ONCE]
                for chain, flows in self._deltas.take(self._places.__contains__, part).items():
                    place = self._places[chain]
                    taken[place] = taken.get(place, 0) + flows
            self._forget_gone()
            return taken

    async def refused(self) -> Mapping[RefusedKey, int]:
        """The new flows that limits have refused, as the last `take` has read."""
        limits = self._limits.items()
        found = {RefusedKey(key, each.limit): 0 for key, declared in limits for each in declared.applied()}
        rules = {
            (family, limit_rule(chain, limit)): RefusedKey(key, limit)
            for (family, chain), key in self._limiting.items()
            for limit in Limit
        }
        for rule, flows in self._deltas.take(rules.__contains__, self._deltas.grown()).items():
            found[rules[rule]] = found.get(rules[rule], 0) + flows
        for chain, key in list(self._limiting.items()):
            if key not in self._limits and not any(map(self._deltas.holds, _limit_rules(*chain))):
                del self._limiting[chain]
        return found

    async def collect_garbage(self) -> Mapping[BackendKey, int]:
        """Does nothing: the kernel counts in rules, which end with their backends."""
        return {}

    def saved_state(self) -> object:
        """The counts of each existing rule."""
        return self._deltas.saved_state()

    def restore(self, memory: object) -> None:
        """Set the counts that the rules had in an earlier run."""
        try:
            self._deltas.restore(memory)
        except (TypeError, ValueError, OverflowError):
            log.warning("what an earlier run had counted is not understood")

    def _follow(self) -> None:
        """Update the known chains; a removed chain is known until its rules are gone."""
        self._know(self._named(self._changes))
        self._changes = {}

    async def _follow_beside(self) -> None:
        """The same beside the event loop: a hash for each endpoint, of which there may be ten thousands."""
        changes = dict(self._changes)
        named = await asyncio.to_thread(self._named, changes)
        async for key, forwarding in in_slices(changes.items()):
            if key in self._changes and self._changes[key] is forwarding:  # else `_follow` has come before
                del self._changes[key]
                self._know({key: named[key]})

    def _named(self, changes: Changes) -> dict[ForwardingKey, dict[ChainName, BackendKey]]:
        """The chains of changed forwardings, and the place that each counts for."""
        named = {}
        for key, forwarding in changes.items():
            endpoints = (*forwarding.reachable(), *forwarding.without_new_flows) if forwarding else ()
            names = self._names.endpoints(key, endpoints)
            named[key] = {
                (key.family, name): BackendKey(key, endpoint.address, endpoint.port)
                for name, endpoint in zip(names, endpoints, strict=True)
            }
        return named

    def _know(self, named: Mapping[ForwardingKey, Mapping[ChainName, BackendKey]]) -> None:
        for key, places in named.items():
            self._leaving.update(chain for chain in self._chains.get(key, ()) if chain not in places)
            self._leaving.difference_update(places)
            self._places.update(places)
            self._deltas.expect(places)
            self._chains[key] = compact_set(places)
            if not places:
                del self._chains[key]

    def _forget_gone(self) -> None:
        for chain in [chain for chain in self._leaving if not self._deltas.holds(chain)]:
            self._leaving.remove(chain)
            del self._places[chain]
            self._deltas.forget(chain)

    async def _read(self, family: Family) -> None:
        tables_gone, save = self._tables_gone[family], self._families.get(family)
        if save:
            began = time.monotonic()
            counts = read_saved_counts(await save(), family, self._names)
            self._seconds[family] = time.monotonic() - began
        else:
            chains = (*self._places, *self._limiting)
            counts, seconds = await asyncio.to_thread(self._read_kernel, family, chains)
            self._seconds[family] = seconds
        # Handles of a table that was deleted since may belong to other rules now.
        # Rules of legacy tables have no handles: between two parts a write could restart their counters.
        part = ENTERED_AT_ONCE if save is None else max(len(counts), 1)
        for at in range(0, max(len(counts), 1), part):
            if tables_gone != self._tables_gone[family]:
                return
            began = time.thread_time()
            self._deltas.read(counts[at : at + part])
            self._seconds[family] += time.thread_time() - began
            await asyncio.sleep(0)
        known = self._deltas.read_all(family)
        for at in range(0, len(known), ENTERED_AT_ONCE):
            self._deltas.drop_unseen(family, known[at : at + ENTERED_AT_ONCE])
            await asyncio.sleep(0)

    def _read_kernel(self, family: Family, known: Sequence[ChainName]) -> tuple[list[Counted], float]:
        began = time.thread_time()
        chains = [chain for of, chain in known if of is family]
        return read_kernel(family, chains, self._messages), time.thread_time() - began

    def _rewritten(self, changes: Collection[Change]) -> list[str]:
        """The chains with counters that a change writes anew; of LIM chains the names of their rules."""
        chains = [c.chain for c in changes if c.before is not None and c.chain.table == "nat"]
        translating = [chain.name for chain in chains if self._is_kind(chain, "SEP")]
        limits = [limit_rule(c.name, limit) for c in chains if self._is_kind(c, "LIM") for limit in Limit]
        return [*translating, *limits]

    def _is_kind(self, chain: ChainId, kind: str) -> bool:
        return chain.name.startswith(f"{self._names.prefix}-{kind}-")


def _limit_rules(family: Family, chain: str) -> list[ChainName]:
    return [(family, limit_rule(chain, limit)) for limit in Limit]
