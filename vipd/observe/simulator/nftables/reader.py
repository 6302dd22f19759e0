"""One rule: its words parsed strictly. Every reader raises ValueError with the reason."""

from __future__ import annotations

from vipd.model.service import Family
from vipd.observe.simulator.errors import UnknownRule
from vipd.observe.simulator.iptables.options import ALL_BITS, number
from vipd.observe.simulator.nftables.datatypes import ADDRESS, NUMBER, VERDICT, Datatype, Span, span
from vipd.observe.simulator.nftables.expressions import (
    BitOperation,
    Concatenation,
    Expression,
    Field,
    MapLookup,
    Numgen,
    SeededHash,
)
from vipd.observe.simulator.nftables.fields import FIELDS, LONGEST, WRITABLE
from vipd.observe.simulator.nftables.sets import Content, Element, NftSet, NftVerdict, Spans
from vipd.observe.simulator.nftables.words import Words, split_words

FINAL_VERDICTS = frozenset({"accept", "drop", "return", "continue"})
CHAIN_VERDICTS = frozenset({"jump", "goto"})

_FEW = 64
"""If there are more elements than these, each is parsed when it is looked up."""
_BESIDES = frozenset({"timeout", "expires", "counter", "packets", "bytes", "comment", "limit", "ct"})
"""Words after an element's key in the kernel's listing that have no effect on a lookup."""


def read_value(words: Words, maps: dict[str, NftSet], values: tuple[Datatype, ...] = ()) -> Expression:
    """`A . B`, and `A . B map @NAME` or `map { ... }`, whose values are of the types `values`."""
    found = read_concatenation(words, maps)
    if not words.accept("map"):
        return found
    nft_set = read_set(words, maps, found.types, values)
    if not nft_set.values or nft_set.of_verdicts:
        raise ValueError(f"@{nft_set.name} has no values")
    return MapLookup(found, nft_set)


def read_concatenation(words: Words, maps: dict[str, NftSet]) -> Expression:
    """`A . B`; one part by itself is none."""
    parts = [_part(words, maps)]
    while words.accept("."):
        parts.append(_part(words, maps))
    return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))


def read_set(
    words: Words, maps: dict[str, NftSet], keys: tuple[Datatype, ...], values: tuple[Datatype, ...]
) -> NftSet:
    """`@NAME`, or `{ ... }` with keys and values of these types."""
    if words.next == "{":
        nft_set = NftSet("", keys, values)
        read_elements(words, nft_set)
        return nft_set
    name = words.take().removeprefix("@")
    if name not in maps:
        raise ValueError(f"there is no map or set {name}")
    if _sizes(maps[name].keys) != _sizes(keys):
        raise ValueError(f"the key is not of @{name}'s type")
    return maps[name]


def read_elements(words: Words, nft_set: NftSet) -> None:
    """`{ KEY : VALUE, ... }`, or keys alone."""
    words.take("{")
    while words.next != "}":
        nft_set.elements.add(*_read_element(words, nft_set.keys, nft_set.values))
        if not words.accept(","):
            break
    words.take("}")


def read_many_elements(text: str, nft_set: NftSet) -> None:
    """The same from a text; if there are many elements, each is parsed when it is looked up."""
    inside = text.strip().removeprefix("{").removesuffix("}")
    single = [piece.strip() for piece in inside.split(",")]
    if len(single) <= _FEW:
        words = Words(split_words(text))
        read_elements(words, nft_set)
        if words:
            raise ValueError(f"{words.next} is not known behind elements")
        return
    elements = nft_set.elements
    elements.unread = {piece.partition(" : ")[0]: piece for piece in single if piece}
    if len(elements.unread) != sum(map(bool, single)):
        raise ValueError("two elements have the same key")

    def read(piece: str) -> tuple[Spans, Element]:
        try:
            return _read_element(Words(split_words(piece)), nft_set.keys, nft_set.values)
        except ValueError as error:
            raise UnknownRule(piece, f"unknown element of {nft_set.name} ({error})") from None

    elements.read = read


def read_spans(words: Words, types: tuple[Datatype, ...]) -> Spans:
    """A literal: `10.0.0.0/8`, `tcp . 80`."""
    found: list[Span] = []
    for datatype in types:
        if found:
            words.take(".")
        found.append(span(words.take(), datatype))
    return tuple(found)


def read_verdict(words: Words) -> NftVerdict:
    """A verdict."""
    word = words.take(*FINAL_VERDICTS, *CHAIN_VERDICTS)
    return NftVerdict(word, words.take() if word in CHAIN_VERDICTS else "")


def _read_element(
    words: Words, types: tuple[Datatype, ...], values: tuple[Datatype, ...]
) -> tuple[Spans, Element]:
    key_words = words.until(",", "}", ":", *_BESIDES)
    key_reader = Words(key_words)
    key = read_spans(key_reader, types)
    words.until(",", "}", ":")
    if key_reader:
        raise ValueError(f"{key_reader.next} is not known in a key")
    if not values:
        return key, Element((), " ".join(key_words))
    words.take(":")
    value_words = words.until(",", "}")
    reader = Words(value_words)
    value: Content = read_verdict(reader) if values == (VERDICT,) else _single(read_spans(reader, values))
    if reader:
        raise ValueError(f"{reader.next} is not known in an element")
    return key, Element(value, " ".join([*key_words, ":", *value_words]))


def _single(spans: Spans) -> tuple[int, ...]:
    if any(low != high for low, high in spans):
        raise ValueError("a value is a range")
    return tuple(low for low, _ in spans)


def _sizes(types: tuple[Datatype, ...]) -> list[int]:
    return [datatype.size for datatype in types]


def _part(words: Words, maps: dict[str, NftSet]) -> Expression:
    match words.next:
        case "numgen":
            found: Expression = _numgen(words)
        case "jhash":
            found = _jhash(words, maps)
        case "symhash":
            words.take()
            found = _numgen_of("symhash", words)
        case _:
            found = read_field(words)
    while operator := words.accept("&", "|", "^"):
        found = BitOperation(found, operator, _bits(words.take(), found.types[0]))
    return found


def read_field(words: Words) -> Field:
    """Something of the packet, by its longest name."""
    name = ""
    for _ in range(LONGEST):
        name = f"{name} {words.take()}".lstrip()
        if name in FIELDS:
            return FIELDS[name]
        if not any(known.startswith(f"{name} ") for known in FIELDS):
            break
    raise ValueError(f"{name} is not known here")


def writable(field: Expression) -> str:
    """The target of `set`. Raises ValueError if it cannot be set."""
    if not isinstance(field, Field) or field.name not in WRITABLE:
        raise ValueError("that cannot be set")
    return field.name


def address_type(word: str, family: Family) -> Datatype:
    """The datatype of addresses of `ip` or `ip6`, else of a family's."""
    families = {"ip": Family.IPV4, "ip6": Family.IPV6}
    return ADDRESS[families.get(word, family)]


def _bits(word: str, datatype: Datatype) -> int:
    low, high = span(word, datatype)
    if low != high:
        raise ValueError(f"{word} is a range")
    return low


def _numgen(words: Words) -> Numgen:
    words.take("numgen")
    return _numgen_of(words.take("random", "inc"), words)


def _numgen_of(how: str, words: Words) -> Numgen:
    return Numgen(how, _modulus(words), _offset(words))


def _jhash(words: Words, maps: dict[str, NftSet]) -> Expression:
    words.take("jhash")
    of, modulus = read_concatenation(words, maps), _modulus(words)
    seed = number(words.take(), ALL_BITS) if words.accept("seed") else None
    offset = _offset(words)
    return Numgen("jhash", modulus, offset) if seed is None else SeededHash(of, modulus, seed, offset)


def _modulus(words: Words) -> int:
    words.take("mod")
    found = number(words.take(), NUMBER.max_value)
    if not found:
        raise ValueError("mod 0 has no value")
    return found


def _offset(words: Words) -> int:
    return number(words.take(), NUMBER.max_value) if words.accept("offset") else 0
