"""Encodes requests for a table's content and changes of its elements; decodes the kernel's answers. Pure.

Read with `struct`, because listing 10,000 services with nft takes seconds. Layouts are those of the kernel's
include/uapi/linux/netlink.h and include/uapi/linux/netfilter/nf_tables.h; user data is libnftnl's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from ipaddress import IPv6Address
from itertools import count, islice, starmap
from operator import call
from typing import NamedTuple

from vipd.dataplane.engine import ObjectId
from vipd.dataplane.nftables.layout import Field, NftSet
from vipd.host.netlink import (
    ACKNOWLEDGE,
    ATTRIBUTES,
    CONTENT,
    CREATE,
    DUMP,
    ECHO,
    FAMILY_NUMBERS,
    REQUEST,
    MalformedMessageError,
    address_bytes,
    attribute,
    attributes,
    message,
    nested,
    nfgenmsg,
    split,
    string,
    text,
    u32,
    walk,
)
from vipd.model.service import Family, Protocol

GET_TABLE, GET_CHAIN, GET_RULE, GET_SET, GET_ELEMENTS = 1, 4, 7, 10, 13
_NEW_ELEMENTS, _DELETE_ELEMENTS = 12, 14
_BATCH_BEGIN, _BATCH_END = 16, 17
ELEMENTS_A_MESSAGE = 400
"""An attribute holds 65,535 bytes, and an element of IPv6 takes 100."""

_NFTABLES = 10
_SUBSYSTEM = _NFTABLES << 8
_PROTOCOLS = {6: Protocol.TCP, 17: Protocol.UDP, 132: Protocol.SCTP}
FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
"""nft's words for the families of tables."""
_VERDICTS = {0: "drop", 1: "accept", -3: "jump", -4: "goto", -5: "return"}
_PROTOCOL_NUMBERS = {str(protocol): number for number, protocol in _PROTOCOLS.items()}
_VERDICT_CODES = {word: code for code, word in _VERDICTS.items()}


class Answer(NamedTuple):
    """One answer."""

    kind: int
    """NFT_MSG_*."""
    family: int
    """Number of the table's family; 1 for inet."""
    attributes: bytes


def request(kind: int, family: Family | None, sequence: int, table: str = "", holder: str = "") -> bytes:
    """A request for everything of a kind, as far as the kernel can limit it to a family (None: all), a table
    and a holder."""
    body = string(1, table) if table else b""
    body += string(2, holder) if holder else b""
    return message(_SUBSYSTEM | kind, REQUEST | DUMP, sequence, nfgenmsg(number_of(family)) + body)


def element_batch(
    table: str,
    family: Family,
    holders: Mapping[str, NftSet],
    deleted: Iterable[tuple[ObjectId, str]],
    added: Iterable[tuple[ObjectId, str]],
    *,
    echo: bool = False,
) -> bytes:
    """One transaction that deletes elements, and then adds others; the kernel acknowledges the last message.
    `echo`: it also answers with each element, a deleted one as it was at its end. Raises KeyError when one is
    of none of the holders."""
    sequence = count(1)
    changes = [
        (kind, flags, name, part)
        for kind, flags, elements in (
            (_DELETE_ELEMENTS, REQUEST, deleted),
            (_NEW_ELEMENTS, REQUEST | CREATE, added),
        )
        for name, part in _by_holder(elements, holders, family, values=elements is added)
    ]
    head = nfgenmsg(number_of(family)) + string(1, table)
    batch = [message(_BATCH_BEGIN, REQUEST, next(sequence), nfgenmsg(0, _NFTABLES))]
    for place, (kind, flags, name, part) in enumerate(changes, 1):
        flags |= (ACKNOWLEDGE if place == len(changes) else 0) | (ECHO if echo else 0)
        content = head + string(2, name) + nested(3, *part)
        batch.append(message(_SUBSYSTEM | kind, flags, next(sequence), content))
    return b"".join((*batch, message(_BATCH_END, REQUEST, next(sequence), nfgenmsg(0, _NFTABLES))))


def _by_holder(
    elements: Iterable[tuple[ObjectId, str]], holders: Mapping[str, NftSet], family: Family, *, values: bool
) -> Iterator[tuple[str, list[bytes]]]:
    """The encoded elements of each holder, at most as many as one message takes; with or without their
    values."""
    found: dict[str, dict[str, str]] = {}
    for (name, key), value in elements:
        found.setdefault(name, {})[key] = value
    for name, pairs in found.items():
        holder = holders[name]
        write = _writer(holder.key, holder.value if values else (), family)
        rest = starmap(write, pairs.items())
        while part := list(islice(rest, ELEMENTS_A_MESSAGE)):
            yield name, part


def deleted_counts(datagram: bytes, nft_set: NftSet, family: Family) -> Iterator[tuple[tuple[str, ...], int]]:
    """The keys and last counts of deleted elements of a set, in the kernel's echo. Raises
    MalformedMessageError."""
    for kind, *_, start, end in split(datagram):
        if kind == _SUBSYSTEM | _DELETE_ELEMENTS:
            for element in element_attributes(answer(datagram, kind, start, end).attributes):
                yield tuple(key_fields(data_of(element, 1), nft_set.key, family)), counted(element)


def answer(datagram: bytes, kind: int, start: int, end: int) -> Answer:
    """An answer, of its place in a datagram. Raises MalformedMessageError."""
    if end - start < ATTRIBUTES:
        raise MalformedMessageError(f"answer of {end - start} bytes")
    return Answer(kind & 0xFF, datagram[start + CONTENT], datagram[start + ATTRIBUTES : end])


def number_of(family: Family | None) -> int:
    """The kernel's number of a family of tables; 0: all."""
    return FAMILY_NUMBERS[family] if family else 0


def number(value: bytes | None) -> int:
    """A big-endian attribute, signed; 0 when it is absent."""
    return int.from_bytes(value or b"", "big", signed=True)


def comment(user_data: bytes | None, kind: int = 0) -> str:
    """The comment in an object's user data; `kind` is its number there."""
    place, data = 0, user_data or b""
    while place + 2 <= len(data):
        length = data[place + 1]
        if data[place] == kind:
            return text(data[place + 2 : place + 2 + length])
        place += 2 + length
    return ""


def elements(body: bytes, holder: NftSet, family: Family) -> Iterator[tuple[ObjectId, str]]:
    """The elements in one answer, as text. Raises MalformedMessageError."""
    key_of, value_of = _reader(holder.key, family), _reader(holder.value, family)
    for element in element_attributes(body):
        key = element.get(1)
        if key is None:
            raise MalformedMessageError(f"an element of {holder.name} without a key")
        value = value_of(element[2]) if holder.value and 2 in element else ""
        yield (holder.name, key_of(key)), value


def element_attributes(body: bytes) -> Iterator[dict[int, bytes]]:
    """The attributes of each element in one answer. Raises MalformedMessageError."""
    for _, element in walk(attributes(body).get(3, b"")):
        yield dict(walk(element))


def counted(element: dict[int, bytes]) -> int:
    """The packet counter of an element; 0 without one."""
    expression = element.get(7)
    if expression is None and 11 in element:  # a list of them, since 5.11
        expression = next((value for _, value in walk(element[11])), None)
    if expression is None:
        return 0
    found = attributes(expression)
    return number(attributes(found.get(2, b"")).get(2)) if text(found.get(1)) == "counter" else 0


def data_of(element: Mapping[int, bytes], which: int) -> bytes:
    """The key (1) or value (2) of an element. Raises MalformedMessageError when it has none."""
    data = element.get(which)
    if data is None:
        raise MalformedMessageError(f"an element without its {'key' if which == 1 else 'value'}")
    return data


def key_fields(data: bytes, fields: tuple[Field, ...], family: Family) -> list[str]:
    """The fields of a key, each as text."""
    return _reader(fields, family)(data).split(" . ")


@lru_cache(maxsize=64)
def _reader(fields: tuple[Field, ...], family: Family) -> Callable[[bytes], str]:
    """Returns a decoder for keys or values with these fields, each of which fills whole words of 4 bytes."""
    if Field.VERDICT in fields:
        return _verdict
    # A single last field has no padding.
    unpack = _layout(fields, family)
    tellers = tuple(_TELLERS.get(field, _address) for field in fields)

    def read(data: bytes) -> str:
        value = data[4:]  # the only attribute within: NFTA_DATA_VALUE
        try:
            parts = unpack.unpack(value[: unpack.size].ljust(unpack.size, b"\0"))
        except struct.error:
            raise MalformedMessageError(f"{len(value)} bytes for {len(fields)} fields") from None
        return " . ".join([tell(part) for tell, part in zip(tellers, parts, strict=True)])

    return read


@lru_cache(maxsize=64)
def _writer(key: tuple[Field, ...], value: tuple[Field, ...], family: Family) -> Callable[[str, str], bytes]:
    """Returns an encoder for elements with these fields, by key and value: the reverse of `_reader`."""
    of_key, of_value = (
        tuple(_ENCODERS.get(field, address_bytes) for field in fields) for fields in (key, value)
    )
    if Field.VERDICT in value:
        pack_key = _layout(key, family).pack
        return lambda k, v: nested(
            1,
            nested(1, attribute(1, pack_key(*map(call, of_key, k.split(" . "))))),
            nested(2, _verdict_data(v)),
        )
    # All elements have the same lengths, and so the same headers: one call writes one of them.
    sizes = [_layout(fields, family).size for fields in (key, value) if fields]
    data = [nested(kind, attribute(1, bytes(size))) for kind, size in enumerate(sizes, 1)]
    first, *second = (whole[:-size] for whole, size in zip(data, sizes, strict=True))
    first = nested(1, *data)[:4] + first
    if not value:
        pack = struct.Struct(f"=12s{_format(key, family)}").pack
        return lambda k, _: pack(first, *map(call, of_key, k.split(" . ")))
    pack = struct.Struct(f"=12s{_format(key, family)}8s{_format(value, family)}").pack
    return lambda k, v: pack(
        first, *map(call, of_key, k.split(" . ")), *second, *map(call, of_value, v.split(" . "))
    )


def _layout(fields: tuple[Field, ...], family: Family) -> struct.Struct:
    return struct.Struct("=" + _format(fields, family))


def _format(fields: tuple[Field, ...], family: Family) -> str:
    width = 4 if family is Family.IPV4 else 16
    return "".join(_LAYOUTS.get(field, f"{width}s") for field in fields)


_LAYOUTS = {Field.PROTOCOL: "B3x", Field.PORT: "2s2x", Field.NUMBER: "I"}


def _address(data: bytes) -> str:
    return "%d.%d.%d.%d" % (data[0], data[1], data[2], data[3]) if len(data) == 4 else _ipv6(data)  # noqa: UP031


@lru_cache(maxsize=1 << 16)
def _ipv6(data: bytes) -> str:
    return str(IPv6Address(data))


def _protocol(value: int) -> str:
    return str(_PROTOCOLS.get(value, value))


def _port(data: bytes) -> str:
    return str(data[0] << 8 | data[1])


_TELLERS: dict[Field, Callable[..., str]] = {
    Field.PROTOCOL: _protocol,
    Field.PORT: _port,
    Field.NUMBER: str,
}


@lru_cache(maxsize=1 << 12)
def _port_bytes(value: str) -> bytes:
    return int(value).to_bytes(2, "big")


_ENCODERS: dict[Field, Callable[[str], bytes | int]] = {
    Field.PROTOCOL: _PROTOCOL_NUMBERS.__getitem__,
    Field.PORT: _port_bytes,
    Field.NUMBER: int,
}


def _verdict_data(value: str) -> bytes:
    word, _, chain = value.partition(" ")
    code = u32(1, _VERDICT_CODES[word] & 0xFFFFFFFF)
    return nested(2, code, *((string(2, chain),) if chain else ()))


def _verdict(data: bytes) -> str:
    found = attributes(attributes(data).get(2, b""))
    code = _VERDICTS.get(number(found.get(1)), "?")
    chain = text(found.get(2))
    return f"{code} {chain}" if chain else code
