"""One family's desired table: all forwardings, and which of them are dirty. Pure.

It stores only forwardings, not elements: a changed one is compiled again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from vipd.dataplane.nftables.balance_chain import BalanceChain
from vipd.dataplane.nftables.base_chains import fixed_chains
from vipd.dataplane.nftables.chains import Chain, TableNumbers, closure
from vipd.dataplane.nftables.compile import ElementKey, Fragment, compile_forwarding, service_name
from vipd.dataplane.nftables.layout import (
    CLAIMED,
    FRONTENDS,
    HAIRPIN,
    LOCAL_OFFSET,
    NODE_PORTS,
    NUMBER_TO_IPV6,
    PINGED,
    REPLY_FRONTENDS,
    REPLY_SOURCES,
    NftSet,
    Rules,
    fixed_sets,
    number_address,
)
from vipd.dataplane.nftables.limit_chain import LimitChain, OverLimitChain
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

Elements = Mapping[ElementKey, str]

SHARED = (
    PINGED.name,
    CLAIMED.name,
    HAIRPIN.name,
    NUMBER_TO_IPV6.name,
    REPLY_SOURCES.name,
    REPLY_FRONTENDS.name,
)
"""Holders of elements that several forwardings may require."""

_REPLIES = (REPLY_SOURCES.name, REPLY_FRONTENDS.name)
"""Holders that exist only while a service has `flow_takeover`."""

_LEADING = (FRONTENDS.name, NODE_PORTS.name)
"""Holders of the elements that packets meet first."""

CHAINS_AS_ONE = 4
"""Chains that take as long to assemble as one endpoint takes to compile."""

Numbers = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Structure:
    """A table without the elements of services."""

    sets: Mapping[str, NftSet]
    """By name."""
    chains: Mapping[str, Rules]
    dispatch_map: Mapping[str, str]
    """Number -> verdict: the elements of the map `handlers`, which are as the chains are."""


@dataclass(frozen=True, slots=True)
class Step:
    """A change of elements that makes sense alone; a new value is a deletion and an addition."""

    keys: tuple[ForwardingKey, ...]
    """The forwardings that it changes. Empty: shared elements, or those of no forwarding."""
    deleted: Elements
    added: Elements
    deferred_deletes: Elements = field(default_factory=dict)
    """Elements to delete afterwards, in a separate transaction: packets may still look them up."""

    def __bool__(self) -> bool:
        return bool(self.deleted or self.added or self.deferred_deletes)

    @classmethod
    def between(cls, keys: tuple[ForwardingKey, ...], before: Elements, after: Elements) -> Step:
        """The change from one to the other."""
        if not before:  # a load
            return cls(keys, {}, after)
        deleted = {slot: value for slot, value in before.items() if after.get(slot) != value}
        added = {slot: value for slot, value in after.items() if before.get(slot) != value}
        return cls(keys, deleted, added)

    def with_deferred_deletes(self) -> Step:
        """The same in two transactions. The first redirects packets; the second deletes elements that only
        packets from before, between two lookups, still look up."""
        parting = {
            slot: value
            for slot, value in self.deleted.items()
            if slot.set_name not in _LEADING and slot not in self.added
        }
        deleted = {slot: value for slot, value in self.deleted.items() if slot not in parting}
        return replace(self, deleted=deleted, deferred_deletes={**self.deferred_deletes, **parting})


class DesiredTable:
    """The forwardings of one family, and those recorded as written."""

    def __init__(self, options: TableOptions) -> None:
        self.options = options
        self._forwardings: dict[ForwardingKey, Forwarding] = {}
        self._committed: dict[ForwardingKey, Forwarding] = {}
        """The kernel's content when everything was last written."""
        self._dirty: dict[ForwardingKey, None] = {}
        self._fragments: dict[ForwardingKey, Fragment] = {}
        """Fragments of changed forwardings, until they are written."""
        self._written: dict[ForwardingKey, Fragment] = {}
        """What those were compiled to that the kernel held in their place, as far as it is known."""
        self._ahead: dict[ForwardingKey, tuple[tuple[Forwarding, Fragment], ...]] = {}
        """Fragments compiled in advance for the next update: the new one, and the one in its place."""
        self._chains: Counter[Chain] = Counter()
        """Those that elements lead to; `closure` names the others."""
        self._table_numbers = TableNumbers(options.family)
        self._entries: Counter[str] = Counter()
        """Names of the chains that have a number."""
        self._source_sets: Counter[NftSet] = Counter()
        self._hairpins: Counter[str] = Counter()
        self._users: Counter[str] = Counter()
        self._pingers: Counter[str] = Counter()
        self._replies: dict[str, Counter[str]] = {}
        """Endpoints with `flow_takeover`, and the frontends of each."""
        self._shared_before: dict[ElementKey, str | None] = {}
        """Changed shared elements, as they were when everything was last written."""
        self._numbers_before: Numbers = (0, 0)
        self._structure: Structure | None = None

    def __len__(self) -> int:
        return len(self._forwardings)

    @property
    def changes(self) -> int:
        """Number of forwardings that may differ from what was last written, with the work for each."""
        known = (self._forwardings.get(key) or self._committed.get(key) for key in self._dirty)
        work = sum(forwarding.compile_cost() for forwarding in known if forwarding)
        # Services with turns or limits have chains of their own, and one new chain assembles all of them.
        return len(self._dirty) + work + (0 if self._structure else len(self._chains) // CHAINS_AS_ONE)

    def work_of(self, key: ForwardingKey, forwarding: Forwarding | None) -> int:
        """The work for this change: of the forwarding or the one in its place, whichever is larger."""
        return max((f.compile_cost() for f in (forwarding, self._forwardings.get(key)) if f), default=0)

    def compile_ahead(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Compile what the next `update` of this key requires. May run in a thread."""
        before = self._forwardings.get(key) if key not in self._fragments else None
        self._ahead[key] = tuple((each, self._compile(each)) for each in (forwarding, before) if each)

    def update(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Take one forwarding's new form, or its end. When compiling it raises, nothing has changed."""
        ahead = self._ahead.pop(key, ())
        fragment = self._compile(forwarding, ahead) if forwarding is not None else None
        before = self._forwardings.pop(key, None)
        if before is not None:
            old = self._fragments.pop(key, None) or self._compile(before, ahead)
            self._count(old, -1)
            if before is self._committed.get(key):
                self._written[key] = old
        if forwarding is not None and fragment is not None:
            self._forwardings[key] = forwarding
            self._fragments[key] = fragment
            self._count(fragment, 1)
        self._dirty[key] = None

    def reconfigured(self, options: TableOptions) -> DesiredTable:
        """The same forwardings under other options; the kernel's state must be read again."""
        made = DesiredTable(options)
        for key, forwarding in self._forwardings.items():
            made.update(key, forwarding)
            # Compiled again when it is compared: as one, the fragments of all would be freed at one go.
            del made._fragments[key]
        made._committed = dict(self._committed)
        return made

    def structure(self) -> Structure:
        """The wanted holders and chains; none without forwardings."""
        if self._structure is None:
            self._structure = self._assemble() if self._forwardings else Structure({}, {}, {})
        return self._structure

    def dirty(self) -> tuple[list[Step], Step]:
        """The differences from what was written: of each forwarding, and of shared elements."""
        steps = [self._changed(key) for key in self._dirty]
        shared = {slot: self._shared(slot) for slot in self._shared_before}
        before = {slot: value for slot, value in self._shared_before.items() if value is not None}
        after = {slot: value for slot, value in shared.items() if value is not None}
        if self._numbers_before != self._numbers():
            before.update(self._number_elements(self._numbers_before))
            after.update(self._number_elements(self._numbers()))
        return [step for step in steps if step], Step.between((), before, after)

    def compare(self, installed: Elements, holders: Collection[str]) -> tuple[list[Step], Step]:
        """The same relative to the real content of these holders, leftovers included."""
        left, steps = dict(installed), []
        for key in self._forwardings:
            wanted = {slot: value for slot, value in self._elements(key).items() if slot.set_name in holders}
            found = {slot: left.pop(slot) for slot in wanted if slot in left}
            step = Step.between((key,), found, wanted)
            steps += [step] if step else []
        shared = {s: v for s, v in self.shared_elements() if s.set_name in holders}
        before = {slot: left.pop(slot) for slot in list(left) if slot.set_name in SHARED}
        steps += [Step((), left, {}).with_deferred_deletes()] if left else []
        return steps, Step.between((), before, shared)

    def elements(self) -> Iterator[tuple[ElementKey, str]]:
        """Every wanted element."""
        for key in self._forwardings:
            yield from self._elements(key).items()
        yield from self.shared_elements()

    def shared_elements(self) -> Iterator[tuple[ElementKey, str]]:
        """The elements that several forwardings may require."""
        hairpins = (ElementKey(HAIRPIN.name, f"{address} . {address}") for address in self._hairpins)
        claimed = (ElementKey(CLAIMED.name, address) for address in self._users)
        pinged = (ElementKey(PINGED.name, address) for address in self._pingers)
        replies = (ElementKey(name, each) for each in self._replies for name in _REPLIES)
        for slot in (*hairpins, *claimed, *pinged, *replies):
            value = self._shared(slot)
            if value is not None:
                yield slot, value
        yield from self._number_elements(self._numbers())

    def forwardings(self) -> Iterable[Forwarding]:
        """All wanted forwardings."""
        return self._forwardings.values()

    def revert(self, keys: Iterable[ForwardingKey]) -> dict[ForwardingKey, Forwarding | None]:
        """Revert these to what was last written, and return the changes that this drops."""
        held = {key: self._forwardings.get(key) for key in keys}
        for key in held:
            self.update(key, self._committed.get(key))
        return held

    def mark_clean(self) -> None:
        """The kernel contains everything wanted."""
        for key in self._dirty:
            if key in self._forwardings:
                self._committed[key] = self._forwardings[key]
            else:
                self._committed.pop(key, None)
                self._table_numbers.drop_service(service_name(key))
        self._dirty.clear()
        self._fragments.clear()
        self._written.clear()
        self._shared_before.clear()
        self._numbers_before = self._numbers()
        self._table_numbers.keep_chains(self._entries)

    def _compile(self, forwarding: Forwarding, ahead: Iterable[tuple[Forwarding, Fragment]] = ()) -> Fragment:
        """The fragment of a forwarding, of those that are compiled already if it is among them."""
        for known, fragment in ahead:
            if known is forwarding:
                return fragment
        return compile_forwarding(forwarding, self.options, self._table_numbers)

    def _changed(self, key: ForwardingKey) -> Step:
        """The difference of one forwarding from what was written."""
        committed = self._committed.get(key)
        before = self._written.get(key) or (self._compile(committed) if committed else Fragment())
        wanted = self._forwardings.get(key)
        after = (self._fragments.get(key) or self._compile(wanted)) if wanted else Fragment()
        step = Step.between((key,), before.elements, after.elements)
        goes_on = step.deleted and after.elements
        return step.with_deferred_deletes() if goes_on and before.kinds() != after.kinds() else step

    def _elements(self, key: ForwardingKey) -> Elements:
        known = self._fragments.get(key)
        return (known or self._compile(self._forwardings[key])).elements

    def _count(self, fragment: Fragment, one: int) -> None:
        """Add a fragment's needs to the totals, or subtract them."""
        self._count_shared(fragment, one)
        changed = [_add(self._chains, chain, one) for chain in fragment.chains]
        changed += [_add(self._entries, chain, one) for chain in fragment.chain_numbers.values()]
        changed += [_add(self._source_sets, source_set, one) for source_set in fragment.source_sets]
        if any(changed) or len(self._forwardings) <= 1:
            self._structure = None

    def _count_shared(self, fragment: Fragment, one: int) -> None:
        for address in fragment.hairpins:
            self._remember(ElementKey(HAIRPIN.name, f"{address} . {address}"))
            _add(self._hairpins, address, one)
        for address in fragment.addresses:
            self._remember(ElementKey(CLAIMED.name, address))
            _add(self._users, address, one)
        for address in fragment.pings:
            self._remember(ElementKey(PINGED.name, address))
            _add(self._pingers, address, one)
        for endpoint, frontend in fragment.replies:
            self._count_reply(endpoint, frontend, one)

    def _count_reply(self, endpoint: str, frontend: str, one: int) -> None:
        for name in _REPLIES:
            self._remember(ElementKey(name, endpoint))
        if not self._replies:
            self._structure = None
        frontends = self._replies.setdefault(endpoint, Counter())
        _add(frontends, frontend, one)
        if not frontends:
            del self._replies[endpoint]
        if not self._replies:
            self._structure = None

    def _remember(self, slot: ElementKey) -> None:
        if slot not in self._shared_before:
            self._shared_before[slot] = self._shared(slot)

    def _shared(self, slot: ElementKey) -> str | None:
        """Current value of a shared element; None: there is none."""
        if slot.set_name == HAIRPIN.name:
            return "" if self._hairpins.get(slot.key.partition(" ")[0]) else None
        if slot.set_name == PINGED.name:
            return "" if self._pingers.get(slot.key) else None
        if slot.set_name in _REPLIES:
            return self._reply(slot)
        return "" if self._users.get(slot.key) and self.options.reject_unused_ports else None

    def _reply(self, slot: ElementKey) -> str | None:
        """Value for an endpoint with `flow_takeover`: which of several frontends a reply belongs to is
        unknown."""
        frontends = self._replies.get(slot.key)
        if slot.set_name == REPLY_SOURCES.name:
            return "" if frontends else None
        return next(iter(frontends)) if frontends and len(frontends) == 1 else None

    def _numbers(self) -> Numbers:
        """Number of slots that need an address, for the cluster's and the local policy."""
        if self.options.family is Family.IPV4:
            return 0, 0
        spreads = [chain for chain in self._needed_chains() if isinstance(chain, BalanceChain)]
        cluster = max((spread.slots for spread in spreads if not spread.local), default=0)
        local = max((spread.slots for spread in spreads if spread.local), default=0)
        return _room(cluster), _room(local)

    def _number_elements(self, numbers: Numbers) -> Iterator[tuple[ElementKey, str]]:
        for many, offset in zip(numbers, (0, LOCAL_OFFSET), strict=True):
            for number in range(offset, offset + many):
                yield (
                    ElementKey(NUMBER_TO_IPV6.name, str(number)),
                    number_address(self.options.family, number),
                )

    def _needed_chains(self) -> Collection[Chain]:
        return dict.fromkeys(each for chain in self._chains for each in closure(chain))

    def _assemble(self) -> Structure:
        options = self.options
        holders = fixed_sets(options.family, options.affinity_map_size if options.affinity else 0)
        takeover = bool(self._replies)
        replies = (REPLY_SOURCES, REPLY_FRONTENDS) if takeover else ()
        limits = tuple(sorted(self._source_sets, key=lambda source_set: source_set.name))
        needed = self._needed_chains()
        chains = {chain.name: chain.rules(options) for chain in needed}
        counts = (s for c in needed if isinstance(c, LimitChain | OverLimitChain) for s in c.sets())
        found = (*holders, *limits, *replies, *counts)
        present = (each for each in found if options.affinity or each.name != "pins")
        # Not by goto: a packet that returns from a chain must not leave with a number as its address.
        handlers = {self._table_numbers.chain(chain): f"jump {chain}" for chain in self._entries}
        return Structure(
            {each.name: each for each in present}, {**fixed_chains(options, takeover), **chains}, handlers
        )


def _room(slots: int) -> int:
    """At least this many, in powers of two from 64, so that it seldom changes; 0 for 0."""
    return 1 << max(slots - 1, 63).bit_length() if slots else 0


def _add(counter: Counter[str] | Counter[NftSet] | Counter[Chain], thing: object, one: int) -> bool:
    """Count one more or less; returns whether it is new, or gone."""
    counts: Counter[object] = counter  # type: ignore[assignment]  # of whatever there is
    was = counts[thing]
    if was + one:
        counts[thing] = was + one
    else:
        del counts[thing]
    return not was or not was + one
