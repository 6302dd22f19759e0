"""Requests for what a table holds, and the kernel's answers read. Pure.

Read with `struct`, because listing 10,000 services with nft takes seconds. Layouts are those of the kernel's
include/uapi/linux/netlink.h and include/uapi/linux/netfilter/nf_tables.h; user data is libnftnl's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from ipaddress import IPv6Address
from typing import NamedTuple

from vipd.dataplane.nftables.compile import Slot
from vipd.dataplane.nftables.layout import Field, Holder
from vipd.model.service import Family, Protocol

MESSAGE = struct.Struct("=IHHIIBBH")
"""nlmsghdr and nfgenmsg."""
HEAD = struct.Struct("=HH")
REQUEST, DUMP, INTERRUPTED = 0x1, 0x300, 0x10
ERROR, DONE, LEAST_KIND = 2, 3, 16
"""Kinds of message below LEAST_KIND are netlink's own."""
GET_TABLE, GET_CHAIN, GET_RULE, GET_SET, GET_ELEMENTS = 1, 4, 7, 10, 13
NEW_TABLE, NEW_CHAIN, NEW_RULE, NEW_SET, NEW_ELEMENTS = 0, 3, 6, 9, 12

_SUBSYSTEM = 10 << 8
_TYPE_MASK = 0x3FFF
_PROTOCOLS = {6: Protocol.TCP, 17: Protocol.UDP, 132: Protocol.SCTP}
_FAMILIES = {Family.IPV4: 2, Family.IPV6: 10}
_VERDICTS = {0: "drop", 1: "accept", -3: "jump", -4: "goto", -5: "return"}


class MalformedDumpError(ValueError):
    """The kernel's answer has a form that is not known."""


class Message(NamedTuple):
    """One answer."""

    kind: int
    """NFT_MSG_*; or ERROR or DONE, as negative numbers."""
    flags: int
    error: int
    """Error number of an ERROR or DONE; 0 for none."""
    family: int
    """Number of the table's family; 1 for inet."""
    attributes: bytes


def request(kind: int, family: Family | None, sequence: int, table: str = "", holder: str = "") -> bytes:
    """A request for everything of a kind, as far as the kernel can limit it to a family (None: all), a table
    and a holder."""
    body = _attribute(1, table) if table else b""
    body += _attribute(2, holder) if holder else b""
    length = MESSAGE.size + len(body)
    return (
        MESSAGE.pack(length, _SUBSYSTEM | kind, REQUEST | DUMP, sequence, 0, number_of(family), 0, 0) + body
    )


def messages(datagram: bytes, sequence: int) -> Iterator[Message]:
    """The answers in a datagram to one request. Raises MalformedDumpError when it is cut."""
    place, total = 0, len(datagram)
    while place + 16 <= total:
        length, kind, flags, number, _ = struct.unpack_from("=IHHII", datagram, place)
        if length < 16 or place + length > total:
            raise MalformedDumpError(f"message of {length} bytes at byte {place} of {total}")
        if number == sequence:
            if kind in (ERROR, DONE):
                error = struct.unpack_from("=i", datagram, place + 16)[0] if length >= 20 else 0
                yield Message(-kind, flags, -error, 0, b"")
            elif kind >= LEAST_KIND:
                if length < MESSAGE.size:
                    raise MalformedDumpError(f"answer of {length} bytes at byte {place} of {total}")
                body = datagram[place + MESSAGE.size : place + length]
                yield Message(kind & 0xFF, flags, 0, datagram[place + 16], body)
        place += (length + 3) & ~3
    if place < total:
        raise MalformedDumpError(f"{total - place} stray bytes after the last message")


def number_of(family: Family | None) -> int:
    """The kernel's number of a family of tables; 0 stands for all."""
    return _FAMILIES[family] if family else 0


def attributes(data: bytes) -> dict[int, bytes]:
    """Attributes by their number; of equal ones the last. Raises MalformedDumpError."""
    return dict(_walk(data))


def text(value: bytes | None) -> str:
    """A string attribute."""
    return (value or b"").rstrip(b"\0").decode(errors="replace")


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


def elements(body: bytes, holder: Holder, family: Family) -> Iterator[tuple[Slot, str]]:
    """The elements in one answer, as they are written. Raises MalformedDumpError."""
    key_of, value_of = _reader(holder.key, family), _reader(holder.value, family)
    for element in element_attributes(body):
        key = element.get(1)
        if key is None:
            raise MalformedDumpError(f"an element of {holder.name} without a key")
        value = value_of(element[2]) if holder.value and 2 in element else ""
        yield Slot(holder.name, key_of(key)), value


def element_attributes(body: bytes) -> Iterator[dict[int, bytes]]:
    """The attributes of each element in one answer. Raises MalformedDumpError."""
    for _, element in _walk(attributes(body).get(3, b"")):
        yield dict(_walk(element))


def counted(element: dict[int, bytes]) -> int:
    """How often the counter of an element was hit; 0 without one."""
    expression = element.get(7)
    if expression is None and 11 in element:  # a list of them, since 5.11
        expression = next((value for _, value in _walk(element[11])), None)
    if expression is None:
        return 0
    found = attributes(expression)
    return number(attributes(found.get(2, b"")).get(2)) if text(found.get(1)) == "counter" else 0


def data_of(element: Mapping[int, bytes], which: int) -> bytes:
    """The key (1) or value (2) of an element. Raises MalformedDumpError when it has none."""
    data = element.get(which)
    if data is None:
        raise MalformedDumpError(f"an element without its {'key' if which == 1 else 'value'}")
    return data


def key_fields(data: bytes, fields: tuple[Field, ...], family: Family) -> list[str]:
    """The fields of a key, each as it is written."""
    return _reader(fields, family)(data).split(" . ")


@lru_cache(maxsize=64)
def _reader(fields: tuple[Field, ...], family: Family) -> Callable[[bytes], str]:
    """What reads the data of a key or value with these fields, each of which fills whole words of 4 bytes."""
    if Field.VERDICT in fields:
        return _verdict
    width = 4 if family is Family.IPV4 else 16
    layout = "=" + "".join(_LAYOUTS.get(field, f"{width}s") for field in fields)
    # A lone last field comes without its filling.
    unpack = struct.Struct(layout)
    tellers = tuple(_TELLERS.get(field, _address) for field in fields)

    def read(data: bytes) -> str:
        value = data[4:]  # the one attribute within: NFTA_DATA_VALUE
        try:
            parts = unpack.unpack(value[: unpack.size].ljust(unpack.size, b"\0"))
        except struct.error:
            raise MalformedDumpError(f"{len(value)} bytes for {len(fields)} fields") from None
        return " . ".join([tell(part) for tell, part in zip(tellers, parts, strict=True)])

    return read


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


def _verdict(data: bytes) -> str:
    found = attributes(attributes(data).get(2, b""))
    code = _VERDICTS.get(number(found.get(1)), "?")
    chain = text(found.get(2))
    return f"{code} {chain}" if chain else code


def _walk(data: bytes) -> Iterator[tuple[int, bytes]]:
    place, total = 0, len(data)
    while place + 4 <= total:
        length, kind = HEAD.unpack_from(data, place)
        if length < 4 or place + length > total:
            raise MalformedDumpError(f"attribute of {length} bytes at byte {place} of {total}")
        yield kind & _TYPE_MASK, data[place + 4 : place + length]
        place += (length + 3) & ~3


def _attribute(kind: int, value: str) -> bytes:
    data = value.encode() + b"\0"
    return HEAD.pack(HEAD.size + len(data), kind) + data + bytes(-len(data) % 4)
