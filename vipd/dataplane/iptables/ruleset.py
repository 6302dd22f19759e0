"""The rules wanted in one family: every forwarding's chains, and the shared ones. Pure.

Tracks the forwardings changed since the last write, so that one changed service costs one fragment. Of the
chains of a forwarding it keeps only digests: those to write are compiled again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain as concatenated

from vipd.dataplane.iptables.base_chains import entry_chains, entry_jumps, marking_chains
from vipd.dataplane.iptables.compile import Compiler, Fragment
from vipd.dataplane.iptables.digest import Digest, KnownRules, digest_of_text
from vipd.dataplane.iptables.dispatch import Dispatch
from vipd.dataplane.iptables.names import ChainId, Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.model.forwarding import Forwarding, ForwardingKey

KUBE_PROXY_TERSE_ABOVE = 1000
"""Above this number of endpoints kube-proxy leaves out comments (contract 1.5)."""

_BETWEEN_CHAINS = "\n\n"


@dataclass(frozen=True, slots=True)
class DesiredChains:
    """The wanted content of the kernel, as far as it must be compared."""

    service_chains: Iterable[Mapping[ChainId, Rules]]
    """Chains of one forwarding each, written together. The first may be chains that the others jump to.
    Compiled while they are iterated, once: the rules of 10,000 services would take 30 MiB."""
    shared: Mapping[ChainId, Rules]
    jumps: Mapping[ChainId, Rules]
    """Jumps in built-in chains, in order; empty if no rule of vipd's should remain."""
    obsolete: frozenset[ChainId]
    """Chains that no forwarding has any more."""
    first: frozenset[ChainId] = frozenset()
    """Built-in chains in which the jumps stay at the head, whatever others insert there."""


class Ruleset:
    """The forwardings of one family. Without forwardings nothing is wanted, not even empty chains; but
    kube-proxy's chains always exist, so with `compat: kube-proxy` vipd's do too."""

    def __init__(self, options: RuleOptions) -> None:
        self.options = options
        self._compiler = Compiler(options)
        self._terse = False
        self._forwardings: dict[ForwardingKey, Forwarding] = {}
        self._chains: dict[ForwardingKey, tuple[ChainId, ...]] = {}
        """The chains of each forwarding."""
        self._digests: dict[ChainId, Digest] = {}
        """Of the rules of all of those."""
        self._texts: dict[ForwardingKey, str] = {}
        """The rules of changed forwardings until they are written: one text each, because the memory of many
        small ones would not return to the system."""
        self._committed: dict[ForwardingKey, Forwarding] = {}
        """The kernel's content when everything was last written."""
        self._ahead: dict[ForwardingKey, tuple[Forwarding, Compiler, Fragment]] = {}
        """Fragments compiled in advance for the next update, and their compiler."""
        self._endpoints = 0
        self._dirty: dict[ForwardingKey, None] = {}
        self._obsolete: set[ChainId] = set()
        self._shared: Mapping[ChainId, Rules] | None = None
        self._shared_before: frozenset[ChainId] = frozenset()
        self._dispatch: dict[ChainId, Dispatch] = {}

    @property
    def changes(self) -> int:
        """Number of forwardings that may differ from what was last written, with the work for each."""
        known = (self._forwardings.get(key) or self._committed.get(key) for key in self._dirty)
        work = sum(forwarding.compile_cost() for forwarding in known if forwarding)
        return len(self._dirty) + work + sum(each.unsettled for each in self._dispatch.values())

    def work_of(self, key: ForwardingKey, forwarding: Forwarding | None) -> int:
        """The work for this change: of the forwarding or the one in its place, whichever is larger."""
        return max((f.compile_cost() for f in (forwarding, self._forwardings.get(key)) if f), default=0)

    def compile_ahead(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Compile what the next `update` of this key requires. May run in a thread."""
        if forwarding is not None:
            compiler = self._compiler
            self._ahead[key] = forwarding, compiler, compiler.compile(forwarding)

    def update(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Take one forwarding's new form, or its end. When compiling it raises, nothing has changed."""
        known, compiler, fragment = self._ahead.pop(key, (None, None, None))
        if known is not forwarding or compiler is not self._compiler:
            fragment = self._compiler.compile(forwarding) if forwarding else None
        before = self._forwardings.pop(key, None)
        self._endpoints -= before.endpoint_count() if before else 0
        if forwarding is not None:
            self._forwardings[key] = forwarding
            self._endpoints += forwarding.endpoint_count()
        self._replace(key, fragment)

    def reconfigure(self, options: RuleOptions) -> None:
        """Take other options, such as the addresses of this host that answer on node ports."""
        if options != self.options:
            self.options = options
            self._recompile()

    def forwardings(self) -> Iterable[Forwarding]:
        """All wanted forwardings."""
        return self._forwardings.values()

    def revert(self) -> dict[ForwardingKey, Forwarding | None]:
        """Revert to what was last written, and return the changes that this drops."""
        held = {key: self._forwardings.get(key) for key in self._dirty}
        for key in held:
            self.update(key, self._committed.get(key))
        return held

    def services_with_affinity(self) -> list[str]:
        """The services that require affinity, sorted."""
        return sorted({f.key.service for f in self._forwardings.values() if f.affinity_timeout is not None})

    def services_with_limits(self) -> list[str]:
        """The services with limits on new flows, sorted."""
        return sorted({f.key.service for f in self._forwardings.values() if f.limits})

    def invalidate(self, chains: Collection[ChainId]) -> None:
        """Mark the forwardings that own some of these chains as changed."""
        wanted = frozenset(chains)
        for key, chains_of_one in self._chains.items():
            if not wanted.isdisjoint(chains_of_one):
                self._dirty[key] = None

    def chains_in_use(self) -> set[ChainId]:
        """Every wanted chain."""
        return {*self._digests, *self.shared(), *marking_chains(self.options)}

    def digests(self) -> Mapping[ChainId, Digest]:
        """The digest of the wanted rules of each forwarding's chains."""
        self._settle_comments()
        return self._digests

    def dirty(self) -> DesiredChains:
        """The changes since `written`: enough if the rest of the kernel is known to be right."""
        self._settle_comments()
        self.shared()
        return self._wanted(self._dirty, frozenset(self._obsolete))

    def whole(self, present: Mapping[ChainId, KnownRules]) -> DesiredChains:
        """Everything, except for forwardings of which all digests are present, and the deletion of every
        present chain of vipd's that is not wanted."""
        differing = self.differing(present)
        keep = self.chains_in_use() if self._in_use() else set()
        return self._wanted([key for key in self._chains if key in differing], frozenset(present) - keep)

    def frame(self, present: Collection[ChainId]) -> DesiredChains:
        """What all forwardings share, as far as it is missing, without any way to a forwarding."""
        missing = {c: rules for c, rules in entry_chains(self.options).items() if c not in present}
        jumps = entry_jumps(self.options)
        return DesiredChains([marking_chains(self.options)], missing, jumps, frozenset())

    def differing(self, present: Mapping[ChainId, KnownRules]) -> set[ForwardingKey]:
        """The forwardings that have a chain of which the digest is not present."""
        wanted = self.digests()
        return {
            key for key, chains in self._chains.items() if any(present.get(c) != wanted[c] for c in chains)
        }

    def mark_clean(self) -> None:
        """The kernel contains everything wanted."""
        for key in self._dirty:
            if key in self._forwardings:
                self._committed[key] = self._forwardings[key]
            else:
                self._committed.pop(key, None)
        self._dirty.clear()
        self._texts.clear()
        self._obsolete.clear()

    def shared(self) -> Mapping[ChainId, Rules]:
        """The chains that all forwardings share, and the groups that they fan out into."""
        if self._shared is None:
            self._shared = self._assemble() if self._in_use() else {}
            self._obsolete.update(self._shared_before - self._shared.keys())
            self._obsolete.difference_update(self._shared)
            self._shared_before = frozenset(self._shared)
        return self._shared

    def _replace(self, key: ForwardingKey, new: Fragment | None) -> None:
        chains, shared = (new.chains, new.shared) if new else ({}, {})
        gone = [chain for chain in self._chains.pop(key, ()) if chain not in chains]
        for chain in gone:
            del self._digests[chain]
        if chains:
            self._chains[key] = tuple(chains)
        texts = ["\n".join(rules) for rules in chains.values()]
        self._digests.update(zip(chains, map(digest_of_text, texts), strict=True))
        self._texts[key] = _BETWEEN_CHAINS.join(texts)
        self._obsolete.difference_update(chains)
        self._obsolete.update(gone)
        self._dirty[key] = None
        for chain in self._dispatch.keys() | shared.keys():
            if self._dispatch_of(chain).replace(key, shared.get(chain, {})):
                self._shared = None

    def _settle_comments(self) -> None:
        terse = self.options.kube_proxy and self._endpoints > KUBE_PROXY_TERSE_ABOVE
        if terse != self._terse:
            self._terse = terse
            self._recompile()

    def _recompile(self) -> None:
        self._compiler = Compiler(self.options, self._terse)
        self._shared = None
        self._dispatch.clear()
        for key, forwarding in self._forwardings.items():
            self._replace(key, self._compiler.compile(forwarding))

    def _dispatch_of(self, chain: ChainId) -> Dispatch:
        if chain not in self._dispatch:
            self._dispatch[chain] = Dispatch(
                self.options.names, chain, self.options.family, self.options.dispatch
            )
        return self._dispatch[chain]

    def _assemble(self) -> Mapping[ChainId, Rules]:
        shared = {
            chain: (*self._dispatch_of(chain).root(), *last)
            for chain, last in entry_chains(self.options).items()
        }
        for dispatch in self._dispatch.values():
            shared.update(dispatch.groups())
        return shared

    def _in_use(self) -> bool:
        return bool(self._forwardings) or self.options.kube_proxy

    def _wanted(self, keys: Iterable[ForwardingKey], gone: frozenset[ChainId]) -> DesiredChains:
        """The shared chains, and those of these forwardings."""
        fixed = marking_chains(self.options)
        if not self._in_use():
            return DesiredChains((), {}, {}, gone | frozenset(entry_chains(self.options)) | frozenset(fixed))
        leaves = (self._compiled(key) for key in keys if key in self._chains)
        jumps, first = entry_jumps(self.options), self.options.chains_to_be_first
        return DesiredChains(concatenated([fixed], leaves), self.shared(), jumps, gone, first)

    def _compiled(self, key: ForwardingKey) -> Mapping[ChainId, Rules]:
        """The chains of a forwarding, named by the objects that stay: others would take memory, too."""
        text = self._texts.get(key)
        if text is None:
            found: Iterable[Rules] = self._compiler.chains(self._forwardings[key]).values()
        else:
            found = (tuple(rules.split("\n")) if rules else () for rules in text.split(_BETWEEN_CHAINS))
        return dict(zip(self._chains[key], found, strict=True))
