"""Maps and sets: what is in them, and what a key finds there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vipd.observe.tracer.errors import RulesetError
from vipd.observe.tracer.nftables.branch import Branch, Key
from vipd.observe.tracer.nftables.kinds import VERDICT, Kind, Span, spelled

Spans = tuple[Span, ...]
"""A range for each field of a key."""


class Ending(NamedTuple):
    """A verdict: `accept`, `drop`, `return`, `continue`, or `jump` and `goto` with a chain."""

    word: str
    chain: str = ""


Content = Key | Ending
"""What a map has for a key; nothing, in a set."""


class Found(NamedTuple):
    """What a key found: the content, and the element as it is spelled."""

    value: Content
    element: str


Read = Callable[[str], tuple[Spans, Found]]
"""Reads the text of one element. Raises RulesetError."""


def _unreadable(text: str) -> tuple[Spans, Found]:
    raise RulesetError(text, "nothing says how this element is read")


@dataclass(slots=True)
class Elements:
    """Elements with single keys, and others with ranges. Of many, those are read that are asked for."""

    single: dict[Key, Found] = field(default_factory=dict)
    ranges: list[tuple[Spans, Found]] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    """Elements by the text of their keys, which may be spelled in another way than ours."""
    read: Read = field(default=_unreadable)

    def add(self, key: Spans, found: Found) -> None:
        """One more. Raises ValueError when its key is there already."""
        if any(low != high for low, high in key):
            self.ranges.append((key, found))
            return
        exact = tuple(low for low, _ in key)
        if exact in self.single:
            raise ValueError(f"two elements have the key of {found.element}")
        self.single[exact] = found

    def find(self, key: Key, kinds: tuple[Kind, ...]) -> Found | None:
        """What a key of these kinds finds. Raises RulesetError."""
        if self.unread and key not in self.single:
            self.settle(spelled(key, kinds))
        exact = self.single.get(key)
        if exact is not None:
            return exact
        return next((found for spans, found in self.ranges if within(key, spans)), None)

    def settle(self, key: str = "") -> None:
        """Read the element whose key is spelled so, or all. Raises RulesetError."""
        if key in self.unread:
            texts = [self.unread.pop(key)]
        else:
            texts = list(self.unread.values())
            self.unread.clear()
        for text in texts:
            self.add(*self.read(text))


@dataclass(slots=True)
class Holder:
    """A map, or a set where `values` is empty."""

    name: str
    keys: tuple[Kind, ...] = ()
    values: tuple[Kind, ...] = ()
    elements: Elements = field(default_factory=Elements)

    @property
    def of_verdicts(self) -> bool:
        """Whether its values are verdicts."""
        return self.values == (VERDICT,)

    def chains(self) -> set[str]:
        """The chains that its verdicts name."""
        self.elements.settle()
        everything = (*self.elements.single.values(), *(found for _, found in self.elements.ranges))
        return {f.value.chain for f in everything if isinstance(f.value, Ending) and f.value.chain}

    def find(self, key: Key, branch: Branch) -> Found | None:
        """What a key finds, the packet's own doings included."""
        if (self.name, key) in branch.learnt:
            value = branch.learnt[self.name, key]
            return None if value is None else Found(value, "")
        return self.elements.find(key, self.keys)


def within(key: Key, spans: Sequence[Span]) -> bool:
    """Whether each field of a key lies in its range."""
    return all(low <= field <= high for field, (low, high) in zip(key, spans, strict=True))
