"""Options in a rule, and the parsers of their values.

Every parser raises ValueError with the reason; the rule parser converts that to `UnknownRule`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Generic, NamedTuple, TypeVar

from vipd.model.service import Family
from vipd.observe.simulator.packet_state import PROTOCOLS

ALL_BITS = 0xFFFFFFFF
"""Marks are 32 bits wide."""

T = TypeVar("T")


class Option(NamedTuple):
    """One option of a match or target, with the `!` before it."""

    name: str
    value: str
    negated: bool


class Cursor:
    """Reads the words of an iptables-restore line one after the other."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._words)

    def take(self, after: str = "") -> str:
        """The next word.

        Raises:
            ValueError: there is none; `after` names the option that requires it.
        """
        if not self:
            raise ValueError(f"{after} wants a value" if after else "the line ends too early")
        self._next += 1
        return self._words[self._next - 1]


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """The options of one match or target, and the relevant parts of the rule around them."""

    family: Family
    options: tuple[Option, ...]
    protocol: str = ""
    """The value of `-p`, empty when absent or negated."""

    def value(self, name: str) -> str | None:
        """The value of an option that cannot be negated, if it is there."""
        found = self.find(name)
        if found and found.negated:
            raise ValueError(f"! {name} is not known")
        return found.value if found else None

    def required(self, *names: str) -> Option:
        """The first of these that is present."""
        found = next((o for o in map(self.find, names) if o), None)
        if found is None:
            raise ValueError(f"{' or '.join(names)} is missing")
        return found

    def find(self, name: str) -> Option | None:
        """The option of this name."""
        return next((o for o in self.options if o.name == name), None)

    def plain(self) -> frozenset[str]:
        """The names of all options, none of which may be negated."""
        return frozenset(o.name for o in self.options if self.value(o.name) is not None)


@dataclass(frozen=True, slots=True)
class Extension(Generic[T]):
    """Definition of one match or target."""

    build: Callable[[GivenOptions], T]
    """Raises ValueError for an unknown value or combination."""
    with_value: Collection[str] = ()
    flags: Collection[str] = ()
    with_two: Collection[str] = ()
    """Those of the options with a value that have a second one; a blank joins them."""


def number(text: str, max_value: int) -> int:
    """A whole number 0..most: decimal, 0x hexadecimal or 0 octal, as C's strtoul reads it."""
    base = 16 if text[:2].lower() == "0x" else 8 if text[:1] == "0" else 10
    if not text.isalnum():
        raise ValueError(f"{text!r} is not a number")
    value = int(text, base)
    if value > max_value:
        raise ValueError(f"{text} is above {max_value}")
    return value


def masked(text: str) -> tuple[int, int]:
    """`VALUE[/MASK]` of a mark; the mask is all bits when absent."""
    value, slash, mask = text.partition("/")
    return number(value, ALL_BITS), number(mask, ALL_BITS) if slash else ALL_BITS


def port(text: str) -> int:
    """A port number, 0..65535; service names are not supported."""
    return number(text, 65535)


def port_range(text: str) -> tuple[int, int]:
    """`PORT` or `LOW:HIGH`, where a missing end is the lowest or highest port."""
    low, colon, high = text.partition(":")
    if not colon:
        return port(low), port(low)
    return port(low or "0"), port(high or "65535")


def address(text: str, family: Family) -> int:
    """One address of the family, as an integer."""
    parsed = ip_address(text)
    if parsed.version != family:
        raise ValueError(f"{text} is not {family}")
    return int(parsed)


@lru_cache(maxsize=4096)
def prefix(text: str, family: Family) -> tuple[int, int]:
    """`ADDRESS[/LENGTH]` as network and mask; bits beyond the length are dropped, as iptables does."""
    network = ip_network(text, strict=False)
    if network.version != family:
        raise ValueError(f"{text} is not {family}")
    return int(network.network_address), int(network.netmask)


def protocol_number(text: str) -> int:
    """An IANA number, or one of the names in `PROTOCOLS`. 0 and `all` mean any."""
    if text == "all":
        return 0
    named = PROTOCOLS.get(text.lower())
    return number(text, 255) if named is None else named
