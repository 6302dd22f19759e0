"""One rule: its words parsed strictly. Every reader raises ValueError with the reason."""

from __future__ import annotations

from vipd.model import Family
from vipd.observe.tracer.errors import UnknownRule
from vipd.observe.tracer.nftables.expressions import Bits, Drawn, Expression, Field, Hashed, Joined, Mapped
from vipd.observe.tracer.nftables.fields import FIELDS, LONGEST, WRITABLE
from vipd.observe.tracer.nftables.holders import Content, Ending, Found, Holder, Spans
from vipd.observe.tracer.nftables.kinds import ADDRESS, NUMBER, VERDICT, Kind, Span, span
from vipd.observe.tracer.nftables.words import Words, split_words
from vipd.observe.tracer.options import ALL_BITS, number

ENDINGS = frozenset({"accept", "drop", "return", "continue"})
LEADING = frozenset({"jump", "goto"})

_FEW = 64
"""More elements than these are not read before they are asked for."""
_BESIDES = frozenset({"timeout", "expires", "counter", "packets", "bytes", "comment"})
"""What may stand behind an element's key, as the kernel lists it, and does not count."""


def read_value(words: Words, maps: dict[str, Holder], values: tuple[Kind, ...] = ()) -> Expression:
    """`A . B`, and `A . B map @NAME` or `map { ... }`, whose values are of the kinds `values`."""
    found = read_joined(words, maps)
    if not words.accept("map"):
        return found
    holder = read_holder(words, maps, found.kinds, values)
    if not holder.values or holder.of_verdicts:
        raise ValueError(f"@{holder.name} has no values")
    return Mapped(found, holder)


def read_joined(words: Words, maps: dict[str, Holder]) -> Expression:
    """`A . B`; one part by itself is none."""
    parts = [_part(words, maps)]
    while words.accept("."):
        parts.append(_part(words, maps))
    return parts[0] if len(parts) == 1 else Joined(tuple(parts))


def read_holder(
    words: Words, maps: dict[str, Holder], keys: tuple[Kind, ...], values: tuple[Kind, ...]
) -> Holder:
    """`@NAME`, or `{ ... }` with keys and values of these kinds."""
    if words.next == "{":
        holder = Holder("", keys, values)
        read_elements(words, holder)
        return holder
    name = words.take().removeprefix("@")
    if name not in maps:
        raise ValueError(f"there is no map or set {name}")
    if _sizes(maps[name].keys) != _sizes(keys):
        raise ValueError(f"the key is not of @{name}'s type")
    return maps[name]


def read_elements(words: Words, holder: Holder) -> None:
    """`{ KEY : VALUE, ... }`, or keys alone."""
    words.take("{")
    while words.next != "}":
        holder.elements.add(*_read_element(words, holder.keys, holder.values))
        if not words.accept(","):
            break
    words.take("}")


def read_many_elements(text: str, holder: Holder) -> None:
    """The same of a text; of many elements, those are read later that are asked for."""
    inside = text.strip().removeprefix("{").removesuffix("}")
    single = [piece.strip() for piece in inside.split(",")]
    if len(single) <= _FEW:
        words = Words(split_words(text))
        read_elements(words, holder)
        if words:
            raise ValueError(f"{words.next} is not known behind elements")
        return
    elements = holder.elements
    elements.unread = {piece.partition(" : ")[0]: piece for piece in single if piece}
    if len(elements.unread) != sum(map(bool, single)):
        raise ValueError("two elements have the same key")

    def read(piece: str) -> tuple[Spans, Found]:
        try:
            return _read_element(Words(split_words(piece)), holder.keys, holder.values)
        except ValueError as error:
            raise UnknownRule(piece, f"unknown element of {holder.name} ({error})") from None

    elements.read = read


def read_spans(words: Words, kinds: tuple[Kind, ...]) -> Spans:
    """A literal: `10.0.0.0/8`, `tcp . 80`."""
    found: list[Span] = []
    for kind in kinds:
        if found:
            words.take(".")
        found.append(span(words.take(), kind))
    return tuple(found)


def read_ending(words: Words) -> Ending:
    """A verdict."""
    word = words.take(*ENDINGS, *LEADING)
    return Ending(word, words.take() if word in LEADING else "")


def _read_element(words: Words, kinds: tuple[Kind, ...], values: tuple[Kind, ...]) -> tuple[Spans, Found]:
    key_words = words.until(",", "}", ":", *_BESIDES)
    key_reader = Words(key_words)
    key = read_spans(key_reader, kinds)
    words.until(",", "}", ":")
    if key_reader:
        raise ValueError(f"{key_reader.next} is not known in a key")
    if not values:
        return key, Found((), " ".join(key_words))
    words.take(":")
    value_words = words.until(",", "}")
    reader = Words(value_words)
    value: Content = read_ending(reader) if values == (VERDICT,) else _single(read_spans(reader, values))
    if reader:
        raise ValueError(f"{reader.next} is not known in an element")
    return key, Found(value, " ".join([*key_words, ":", *value_words]))


def _single(spans: Spans) -> tuple[int, ...]:
    if any(low != high for low, high in spans):
        raise ValueError("a value is a range")
    return tuple(low for low, _ in spans)


def _sizes(kinds: tuple[Kind, ...]) -> list[int]:
    return [kind.size for kind in kinds]


def _part(words: Words, maps: dict[str, Holder]) -> Expression:
    match words.next:
        case "numgen":
            found: Expression = _numgen(words)
        case "jhash":
            found = _jhash(words, maps)
        case "symhash":
            words.take()
            found = _dice("symhash", words)
        case _:
            found = read_field(words)
    while operator := words.accept("&", "|", "^"):
        found = Bits(found, operator, _bits(words.take(), found.kinds[0]))
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
    """What `set` writes. Raises ValueError for what it cannot."""
    if not isinstance(field, Field) or field.name not in WRITABLE:
        raise ValueError("that cannot be set")
    return field.name


def address_kind(word: str, family: Family) -> Kind:
    """The kind of addresses of `ip` or `ip6`, else of a family's."""
    families = {"ip": Family.IPV4, "ip6": Family.IPV6}
    return ADDRESS[families.get(word, family)]


def _bits(word: str, kind: Kind) -> int:
    low, high = span(word, kind)
    if low != high:
        raise ValueError(f"{word} is a range")
    return low


def _numgen(words: Words) -> Drawn:
    words.take("numgen")
    return _dice(words.take("random", "inc"), words)


def _dice(how: str, words: Words) -> Drawn:
    return Drawn(how, _modulus(words), _offset(words))


def _jhash(words: Words, maps: dict[str, Holder]) -> Expression:
    words.take("jhash")
    of, modulus = read_joined(words, maps), _modulus(words)
    seed = number(words.take(), ALL_BITS) if words.accept("seed") else None
    offset = _offset(words)
    return Drawn("jhash", modulus, offset) if seed is None else Hashed(of, modulus, seed, offset)


def _modulus(words: Words) -> int:
    words.take("mod")
    found = number(words.take(), NUMBER.most)
    if not found:
        raise ValueError("mod 0 has no value")
    return found


def _offset(words: Words) -> int:
    return number(words.take(), NUMBER.most) if words.accept("offset") else 0
