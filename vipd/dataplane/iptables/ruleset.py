"""The rules wanted in one family: every forwarding's fragment, and the chains that they share. Pure.

Knows which chains were touched since the last write, so that one changed service costs one fragment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vipd.dataplane.iptables.compile import Compiler, Fragment, RuleOptions
from vipd.dataplane.iptables.fixed import entry_chains, entry_jumps, marking_chains
from vipd.dataplane.iptables.names import ChainId, Rules
from vipd.model import Forwarding, ForwardingKey


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the kernel should hold, as far as it has to be looked at."""

    leaves: tuple[Mapping[ChainId, Rules], ...]
    """Chains of one forwarding each, written together. The first may be chains that the others jump to."""
    shared: Mapping[ChainId, Rules]
    jumps: Mapping[ChainId, Rules]
    """Rules at the head of built-in chains; empty when nothing of ours should be left."""
    gone: frozenset[ChainId]
    """Chains that no forwarding has any more."""


@dataclass(slots=True)
class Ruleset:
    """The fragments of one family. With no forwarding at all, nothing is wanted: not even empty chains."""

    options: RuleOptions
    _compiler: Compiler = field(init=False)
    _fragments: dict[ForwardingKey, Fragment] = field(default_factory=dict)
    _touched: dict[ForwardingKey, None] = field(default_factory=dict)
    _gone: set[ChainId] = field(default_factory=set)
    _shared: Mapping[ChainId, Rules] | None = None

    def __post_init__(self) -> None:
        self._compiler = Compiler(self.options)

    def update(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Take one forwarding's new form, or its end."""
        old = self._fragments.pop(key, None)
        new = self._compiler.compile(forwarding) if forwarding else None
        if new is not None:
            self._fragments[key] = new
            self._gone.difference_update(new.chains)
        if old is not None:
            self._gone.update(chain for chain in old.chains if new is None or chain not in new.chains)
        self._touched[key] = None
        if old is None or new is None or old.shared != new.shared:
            self._shared = None

    def touched(self) -> Wanted:
        """What changed since `written`: enough when the rest of the kernel is known to be right."""
        changed = (self._fragments.get(key) for key in self._touched)
        return self._wanted((f for f in changed if f), frozenset(self._gone))

    def whole(self, present: Iterable[ChainId]) -> Wanted:
        """Everything, and the end of every present chain of ours that is not wanted."""
        fragments = self._fragments.values()
        leaves = {chain for fragment in fragments for chain in fragment.chains}
        keep = leaves.union(self.shared(), self._marking())
        return self._wanted(fragments, frozenset(present) - keep)

    def written(self) -> None:
        """The kernel holds all that was wanted."""
        self._touched.clear()
        self._gone.clear()

    def shared(self) -> Mapping[ChainId, Rules]:
        """The chains that all forwardings share, their lines in the stable order of keys."""
        if self._shared is None:
            self._shared = self._assemble() if self._fragments else {}
        return self._shared

    def _assemble(self) -> Mapping[ChainId, Rules]:
        lines: dict[ChainId, list[str]] = {}
        for key in sorted(self._fragments):
            for chain, rules in self._fragments[key].shared.items():
                lines.setdefault(chain, []).extend(rules)
        return {chain: (*lines.get(chain, ()), *last) for chain, last in entry_chains(self.options).items()}

    def _wanted(self, fragments: Iterable[Fragment], gone: frozenset[ChainId]) -> Wanted:
        if not self._fragments:
            return Wanted(
                (), {}, {}, gone | frozenset(entry_chains(self.options)) | frozenset(self._marking())
            )
        leaves = (self._marking(), *(f.chains for f in fragments if f.chains))
        return Wanted(leaves, self.shared(), entry_jumps(self.options), gone)

    def _marking(self) -> Mapping[ChainId, Rules]:
        return marking_chains(self.options)
