"""A tree of chains by which a shared chain finds the rules for an address quickly. Pure.

A flat chain contains every rule, and every new connection of the host passes all of them: measured, 10,000
services reduced 20,000 connects a second to 3,900. A grouped chain is a tree over address prefixes, four bits
a level: a group contains at most 16 jumps, or the rules of at most 16 addresses. Bits that all addresses
share are skipped, so the depth depends on how far the addresses differ. The shape depends on the addresses
alone, never on the order of their addition; one address more or less rewrites the groups on its own path.
"""

from __future__ import annotations

import ipaddress
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family

LEVEL_BITS = 4
LEAF_ADDRESSES = 16
"""Addresses in one group. Fewer make more chains, more make longer walks."""
INLINE_RULES = 4
"""A lone address with at most this many rules is in the group above, without its own chain."""
GROUPED_ABOVE = 64
"""Addresses above which `dispatch: auto` groups."""

NO_ADDRESS = ""
"""Key of rules that are not about one address, such as those of node ports."""

ByAddress = Mapping[str, Rules]


class Prefix(NamedTuple):
    """A network: its first address as a number, and the number of leading bits that it fixes."""

    start: int
    length: int


ROOT = Prefix(0, 0)


@dataclass(frozen=True, slots=True)
class _Group:
    """One chain of the tree."""

    chain: ChainId
    rules: Rules
    children: tuple[Prefix, ...]


class Dispatch:
    """The services' rules in one shared chain. `mode` is auto, flat or grouped."""

    def __init__(self, names: Names, chain: ChainId, family: Family, mode: str) -> None:
        self._names, self._chain, self._family, self._mode = names, chain, family, mode
        self._hashed = f"{chain.table} {chain.name}"
        self._bits: int = family.bits
        self._by_key: dict[ForwardingKey, ByAddress] = {}
        self._without_address: set[ForwardingKey] = set()
        """Those that have rules which are not about one address."""
        self._by_address: dict[int, dict[ForwardingKey, Rules]] = {}
        self._addresses: list[int] = []
        """The keys of `_by_address`, sorted."""
        self._groups: dict[Prefix, _Group] = {}
        """Empty while flat."""
        self._touched: set[int] = set()
        """Addresses that changed since the groups were made."""
        self._root: Rules | None = None

    def replace(self, key: ForwardingKey, rules: ByAddress) -> bool:
        """Set one forwarding's rules, and return whether they differ; empty rules remove it."""
        before = self._by_key.pop(key, {})
        if rules:
            self._by_key[key] = rules
        if rules == before:
            return False
        self._root = None
        (self._without_address.add if NO_ADDRESS in rules else self._without_address.discard)(key)
        changed = [a for a in {*before, *rules} - {NO_ADDRESS} if before.get(a) != rules.get(a)]
        for address in changed:
            self._put(int(ipaddress.ip_address(address)), key, rules.get(address))
        return True

    @property
    def unsettled(self) -> int:
        """Number of addresses that the next `root` must group."""
        if self._root is not None:
            return 0
        return len(self._touched) if self._groups else len(self._addresses)

    def root(self) -> Rules:
        """The rules in the shared chain itself."""
        if self._root is None:
            self._settle()
            self._root = tuple(self._grouped_root() if self._groups else self._flat())
        return self._root

    def groups(self) -> Mapping[ChainId, Rules]:
        """Every other chain."""
        self.root()
        found = {group.chain: group.rules for group in self._groups.values()}
        if self._groups:
            del found[self._groups[ROOT].chain]
        return found

    def _flat(self) -> Iterator[str]:
        """In the order of forwardings, and for each in kube-proxy's order."""
        rules = (r for key in sorted(self._by_key) for found in self._by_key[key].values() for r in found)
        yield from dict.fromkeys(rules)

    def _grouped_root(self) -> Iterator[str]:
        yield from self._groups[ROOT].rules
        for key in sorted(self._without_address):
            yield from self._by_key[key][NO_ADDRESS]

    def _put(self, address: int, key: ForwardingKey, rules: Rules | None) -> None:
        holders = self._by_address.setdefault(address, {})
        if not holders:
            insort(self._addresses, address)
        if rules:
            holders[key] = rules
        else:
            holders.pop(key, None)
        if not holders:
            del self._by_address[address]
            del self._addresses[bisect_left(self._addresses, address)]
        self._touched.add(address)

    def _settle(self) -> None:
        """Group or ungroup as the number of addresses requires."""
        many = self._mode == "auto" and len(self._addresses) > GROUPED_ABOVE
        grouped = bool(self._addresses) and (many or self._mode == "grouped")
        if not grouped:
            self._groups = {}
        elif self._touched or not self._groups:
            # All of a step together: groups at the top contain nearly every address.
            self._build(ROOT, sorted(self._touched))
        self._touched.clear()

    def _build(self, prefix: Prefix, touched: Sequence[int]) -> None:
        """Build one group, and those below it that are new or contain one of the touched addresses, which are
        sorted."""
        before = self._groups.get(prefix)
        group = self._groups[prefix] = self._group(prefix)
        for child in group.children:
            if child not in self._groups or self._holds_any(child, touched):
                self._build(child, touched)
        for child in before.children if before else ():
            if child not in group.children:
                self._drop(child, group)

    def _drop(self, prefix: Prefix, above: _Group) -> None:
        """Remove a group and those below it, except those that are now below another group of `above`."""
        if not self._leads(above, prefix):
            group = self._groups.pop(prefix, None)
            for child in group.children if group else ():
                self._drop(child, above)

    def _leads(self, group: _Group, prefix: Prefix) -> bool:
        """Whether a group leads to the one of a prefix."""
        for child in group.children:
            if child.length <= prefix.length and self._holds(child, prefix.start):
                return child == prefix or self._leads(self._groups[child], prefix)
        return False

    def _group(self, prefix: Prefix) -> _Group:
        low, high = self._range(prefix)
        chain = ChainId(self._chain.table, self._names.group(self._hashed, self._text(prefix)))
        # The root always branches: one more address then seldom rewrites it.
        if prefix != ROOT and high - low <= LEAF_ADDRESSES:
            rules = tuple(rule for a in self._addresses[low:high] for rule in self._rules_of(a))
            return _Group(chain, rules, ())
        found: list[str] = []
        children: list[Prefix] = []
        for first, last in self._slots(prefix, low, high):
            alone = list(self._rules_of(first)) if first == last else []
            if 0 < len(alone) <= INLINE_RULES:
                found += alone
            else:
                children.append(self._common(first, last, prefix.length + LEVEL_BITS))
                found.append(self._jump(children[-1]))
        return _Group(chain, tuple(found), tuple(children))

    def _slots(self, prefix: Prefix, low: int, high: int) -> Iterator[tuple[int, int]]:
        """The first and last address in each sixteenth of a network that contains any."""
        step = 1 << (self._bits - prefix.length - LEVEL_BITS)
        while low < high:
            end = bisect_left(self._addresses, (self._addresses[low] // step + 1) * step, low, high)
            yield self._addresses[low], self._addresses[end - 1]
            low = end

    def _common(self, first: int, last: int, at_least: int) -> Prefix:
        """The longest prefix, in whole levels, of all addresses from first to last."""
        shared = (self._bits - (first ^ last).bit_length()) // LEVEL_BITS * LEVEL_BITS
        length = max(shared, at_least)
        return Prefix(first >> (self._bits - length) << (self._bits - length), length)

    def _range(self, prefix: Prefix) -> tuple[int, int]:
        return bisect_left(self._addresses, prefix.start), bisect_left(self._addresses, self._end(prefix))

    def _holds(self, prefix: Prefix, address: int) -> bool:
        return prefix.start <= address < self._end(prefix)

    def _holds_any(self, prefix: Prefix, addresses: Sequence[int]) -> bool:
        first = bisect_left(addresses, prefix.start)
        return first < len(addresses) and addresses[first] < self._end(prefix)

    def _end(self, prefix: Prefix) -> int:
        return prefix.start + (1 << (self._bits - prefix.length))

    def _rules_of(self, address: int) -> Iterator[str]:
        holders = sorted(self._by_address[address].items())
        yield from dict.fromkeys(rule for _, rules in holders for rule in rules)

    def _jump(self, prefix: Prefix) -> str:
        text = self._text(prefix)
        return f"-d {text} -j {self._names.group(self._hashed, text)}"

    def _text(self, prefix: Prefix) -> str:
        address = ipaddress.IPv4Address if self._family is Family.IPV4 else ipaddress.IPv6Address
        return f"{address(prefix.start)}/{prefix.length}"
