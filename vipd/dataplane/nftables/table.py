"""One family's table as objects: those of a forwarding, those that forwardings share, and the frame. Pure.

The text of an element is its value, that of a set the digest of its declaration, and that of a chain its hook
and its rules in lines. Of a chain the kernel tells only the hook and the digests of its rules (`as_read`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from functools import lru_cache

from vipd.dataplane.engine import PLAIN, Compiled, Engine, ObjectId, Objects, Shared
from vipd.dataplane.nftables.balance_chain import BalanceChain
from vipd.dataplane.nftables.base_chains import HOOKS, fixed_chains
from vipd.dataplane.nftables.chains import Chain, TableNumbers
from vipd.dataplane.nftables.compile import Fragment, compile_forwarding, service_name
from vipd.dataplane.nftables.layout import (
    AFFINITY_MAP,
    CLAIMED,
    DISPATCH_MAP,
    HAIRPIN,
    LOCAL_OFFSET,
    NUMBER_TO_IPV6,
    PINGED,
    REPLY_FRONTENDS,
    REPLY_SOURCES,
    NftSet,
    Rules,
    digest,
    fixed_sets,
    number_address,
)
from vipd.dataplane.nftables.limit_chain import LimitChain, OverLimitChain
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family

CHAIN, SET = "chain", "set"
"""Kinds of objects that are no elements."""
ROOM = "room"
"""Kind of the objects that stand for all numbers that a chain needs as addresses; with IPv6 only."""
LASTING = (CHAIN, SET, DISPATCH_MAP.name)
"""Kinds that are deleted later: before 6.2 the kernel may count a just deleted element as a reference."""
_SLOTS = re.compile(r"-[0-9]+(?=-|$)")
_TAKEOVER = ("flow takeover", "")
"""Stands for the rules for flows of other hosts."""


class WantedTable:
    """The forwardings of one family, and the engine that holds their objects."""

    def __init__(self, options: TableOptions) -> None:
        self.options = options
        self.sets: dict[str, NftSet] = {}
        """Every set that has been wanted, by name."""
        self._numbers = TableNumbers(options.family)
        self._chain = lru_cache(maxsize=4096)(self._compile_chain)
        self._fixed = lru_cache(maxsize=2)(self._compile_frame)
        self.engine: Engine[ForwardingKey, Forwarding] = Engine(self.compile, self._frame, LASTING)

    def __len__(self) -> int:
        return len(self.engine.wanted)

    @property
    def changes(self) -> int:
        """Number of forwardings that may differ from what was last written, with the work for each."""
        wanted, written = self.engine.wanted, self.engine.written
        known = (wanted.get(key) or written.get(key) for key in self.engine.dirty)
        return len(self.engine.dirty) + sum(forwarding.compile_cost() for forwarding in known if forwarding)

    def work_of(self, key: ForwardingKey, forwarding: Forwarding | None) -> int:
        """The work for this change: of the forwarding or the one in its place, whichever is larger."""
        return max((f.compile_cost() for f in (forwarding, self.engine.wanted.get(key)) if f), default=0)

    def compile_ahead(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Compile what the next `update` of this key requires. May run in a thread."""
        self.engine.compile_ahead(key, forwarding)

    def update(self, key: ForwardingKey, forwarding: Forwarding | None) -> None:
        """Take one forwarding's new form, or its end. When compiling it raises, nothing has changed."""
        self.engine.update(key, forwarding)

    def forwardings(self) -> Iterable[Forwarding]:
        """All wanted forwardings."""
        return self.engine.wanted.values()

    def reconfigure(self, options: TableOptions) -> None:
        """Take other options. The kernel's state must be read again."""
        self.options = options
        self._chain.cache_clear()
        self._fixed.cache_clear()
        self.engine.changed_options()

    def compile(self, forwarding: Forwarding) -> Compiled:
        """The objects of one forwarding."""
        fragment = compile_forwarding(forwarding, self.options, self._numbers)
        return Compiled(fragment.elements, self._shared(fragment))

    def moves(self, key: ForwardingKey) -> bool:
        """Whether the chains of a changed forwarding look something else up than those that are written."""
        before, after = map(_kinds, self.engine.forms(key))
        return bool(before and after) and before != after

    def commit(self) -> None:
        """The kernel contains everything wanted."""
        gone = [key for key in self.engine.dirty if key not in self.engine.wanted]
        self.engine.commit()
        for key in gone:
            self._numbers.drop_service(service_name(key))

    def collected(self) -> None:
        """The kernel has nothing left that is not wanted."""
        self.engine.left.clear()
        self._numbers.keep_chains(lambda name: self.engine.text_of((CHAIN, name)) is not None)

    def element_sets(self) -> Iterator[NftSet]:
        """The sets whose elements belong to vipd: wanted ones that packets do not fill."""
        self.engine.frame()  # so that its sets are known
        for name, nft_set in self.sets.items():
            if not nft_set.dynamic_flags and self.engine.text_of((SET, name)) is not None:
                yield nft_set

    def _shared(self, fragment: Fragment) -> dict[ObjectId, Shared]:
        shared: dict[ObjectId, Shared] = dict(map(self._chain, fragment.chains))
        for number, name in fragment.chain_numbers.items():
            # Not by goto: a packet that returns from a chain must not leave with a number as its address.
            shared[DISPATCH_MAP.name, number] = Shared(f"jump {name}")
        for source_set in fragment.source_sets:
            shared[SET, source_set.name] = Shared(self._declared(source_set))
        for address in fragment.hairpins:
            shared[HAIRPIN.name, f"{address} . {address}"] = PLAIN
        if self.options.reject_unused_ports:
            for address in fragment.addresses:
                shared[CLAIMED.name, address] = PLAIN
        for address in fragment.pings:
            shared[PINGED.name, address] = PLAIN
        for endpoint, frontend in fragment.replies:
            shared[REPLY_SOURCES.name, endpoint] = Shared("", ((_TAKEOVER, Shared(None)),))
            # Which of several frontends a reply belongs to is unknown: then there is none.
            way = REPLY_FRONTENDS.name, endpoint
            shared[way] = Shared(None) if way in shared else Shared(frontend)
        return shared

    def _declared(self, nft_set: NftSet) -> str:
        self.sets[nft_set.name] = nft_set
        return nft_set.digest(self.options.family)

    def _compile_chain(self, chain: Chain) -> tuple[ObjectId, Shared]:
        """A chain, with all that its rules lead to."""
        required: list[tuple[ObjectId, Shared]] = []
        if isinstance(chain, LimitChain | OverLimitChain):
            required += [((SET, s.name), Shared(self._declared(s))) for s in chain.sets()]
        required += map(self._chain, chain.targets())
        if isinstance(chain, BalanceChain) and self.options.family is Family.IPV6:
            required.append(_room(chain.slots, LOCAL_OFFSET if chain.local else 0))
        return (CHAIN, chain.name), Shared(chain_text(chain.name, chain.rules(self.options)), tuple(required))

    def _frame(self, shared: Container[ObjectId]) -> Objects:
        return self._fixed(_TAKEOVER in shared)

    def _compile_frame(self, takeover: bool) -> Objects:
        options = self.options
        size = options.affinity_map_size if options.affinity else 0
        declared = (
            *fixed_sets(options.family, size),
            *((REPLY_SOURCES, REPLY_FRONTENDS) if takeover else ()),
        )
        sets = {
            (SET, s.name): self._declared(s) for s in declared if options.affinity or s.name != AFFINITY_MAP
        }
        chains = {
            (CHAIN, name): chain_text(name, rules) for name, rules in fixed_chains(options, takeover).items()
        }
        return {**sets, **chains}


def chain_text(name: str, rules: Rules) -> str:
    """The text of a chain: its hook, if any, and its rules."""
    return "\n".join((hook_text(name), *rules))


def hook_text(name: str) -> str:
    """Hook and priority of a base chain as the kernel numbers them; empty for any other."""
    hook = HOOKS.get(name)
    return f"{hook.number} {hook.priority}" if hook else ""


@lru_cache(maxsize=4096)
def as_read(text: str) -> str:
    """The text of a chain as far as the kernel tells it."""
    hook, *rules = text.split("\n")
    return "\n".join((hook, *map(digest, rules)))


@lru_cache(maxsize=256)
def _room(slots: int, offset: int) -> tuple[ObjectId, Shared]:
    """Numbers for at least so many slots, in powers of two from 64, so that they seldom change."""
    many = 1 << max(slots - 1, 63).bit_length()
    numbers = range(offset, offset + many)
    required = tuple(
        ((NUMBER_TO_IPV6.name, str(number)), Shared(number_address(Family.IPV6, number)))
        for number in numbers
    )
    return (ROOM, f"{offset} {many}"), Shared(None, required)


def _kinds(form: Compiled) -> frozenset[str]:
    """What the chains of a form look up: their names without numbers of slots, and the sets of sources.

    If these stay, a packet in the chains from before the change finds elements from after it."""
    return frozenset(
        _SLOTS.sub("", name) if kind == CHAIN else name for kind, name in form.shared if kind in (CHAIN, SET)
    )
