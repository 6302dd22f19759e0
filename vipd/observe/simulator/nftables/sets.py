"""Maps and sets: their content, and lookups in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vipd.observe.simulator.errors import RulesetError
from vipd.observe.simulator.nftables.datatypes import VERDICT, Datatype, Span, spelled
from vipd.observe.simulator.packet_state import Key, PacketState

Spans = tuple[Span, ...]
"""A range for each field of a key."""


class NftVerdict(NamedTuple):
    """A verdict: `accept`, `drop`, `return`, `continue`, or `jump` and `goto` with a chain."""

    word: str
    chain: str = ""


Content = Key | NftVerdict
"""The value of a key in a map; empty in a set."""


class Element(NamedTuple):
    """The result of a lookup: the content, and the element in its original spelling."""

    value: Content
    element: str


Read = Callable[[str], tuple[Spans, Element]]
"""Reads the text of one element. Raises RulesetError."""


def _unreadable(text: str) -> tuple[Spans, Element]:
    raise RulesetError(text, "nothing says how this element is read")


@dataclass(slots=True)
class Elements:
    """Elements with single keys, and others with ranges. If there are many, each is parsed when it is looked
    up."""

    single: dict[Key, Element] = field(default_factory=dict)
    ranges: list[tuple[Spans, Element]] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    """Elements by the text of their keys, whose spelling may differ."""
    read: Read = field(default=_unreadable)

    def add(self, key: Spans, found: Element) -> None:
        """One more. Raises ValueError when its key is there already."""
        if any(low != high for low, high in key):
            self.ranges.append((key, found))
            return
        exact = tuple(low for low, _ in key)
        if exact in self.single:
            raise ValueError(f"two elements have the key of {found.element}")
        self.single[exact] = found

    def find(self, key: Key, types: tuple[Datatype, ...]) -> Element | None:
        """Looks up a key of these types. Raises RulesetError."""
        if self.unread and key not in self.single:
            self.parse_unread(spelled(key, types))
        exact = self.single.get(key)
        if exact is not None:
            return exact
        return next((found for spans, found in self.ranges if within(key, spans)), None)

    def parse_unread(self, key: str = "") -> None:
        """Parse the element with this spelling of its key, or all. Raises RulesetError."""
        if key in self.unread:
            texts = [self.unread.pop(key)]
        else:
            texts = list(self.unread.values())
            self.unread.clear()
        for text in texts:
            self.add(*self.read(text))


@dataclass(slots=True)
class NftSet:
    """A map, or a set where `values` is empty."""

    name: str
    keys: tuple[Datatype, ...] = ()
    values: tuple[Datatype, ...] = ()
    elements: Elements = field(default_factory=Elements)

    @property
    def of_verdicts(self) -> bool:
        """Whether its values are verdicts."""
        return self.values == (VERDICT,)

    def chains(self) -> set[str]:
        """The chains that its verdicts name."""
        self.elements.parse_unread()
        everything = (*self.elements.single.values(), *(found for _, found in self.elements.ranges))
        return {f.value.chain for f in everything if isinstance(f.value, NftVerdict) and f.value.chain}

    def find(self, key: Key, packet: PacketState) -> Element | None:
        """Looks up a key, including elements that the packet itself added."""
        if (self.name, key) in packet.set_updates:
            value = packet.set_updates[self.name, key]
            return None if value is None else Element(value, "")
        return self.elements.find(key, self.keys)


def within(key: Key, spans: Sequence[Span]) -> bool:
    """Whether each field of a key is in its range."""
    return all(low <= field <= high for field, (low, high) in zip(key, spans, strict=True))
