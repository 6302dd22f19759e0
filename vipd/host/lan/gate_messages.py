"""nf_tables messages of the answer gate: its tables, and transactions of elements. Pure.

Not text for `nft`: nft 1.0.6 has no word for the target address of a neighbour advertisement, a program
takes some 5 ms for each of three renewals a second, and a transaction must fail when an element has expired.
Numbers are those of the kernel's include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from vipd.host.netlink import (
    ACKNOWLEDGE,
    CREATE,
    REQUEST,
    attribute,
    message,
    nested,
    nfgenmsg,
    string,
    u32,
    u64,
)

LEASE, PENDING, ADDRESSES, HELD = "lease", "pending", "addresses", "held"
ARP, IPV6 = 3, 10
"""NFPROTO_ARP and NFPROTO_IPV6: the families of the two tables."""

_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 16, 17
_NEW_TABLE, _GET_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE, _NEW_SET = 0, 1, 2, 3, 6, 9
_NEW_ELEMENT, _DELETE_ELEMENT = 12, 14
_APPEND = 0x800

_TIMEOUT_FLAG = 0x10
_IFNAME_TYPE, _IFNAME_BYTES = 41, 16
_ADDRESS_TYPES = {ARP: (7, 4), IPV6: (8, 16)}
"""nft's numbers for ipv4_addr and ipv6_addr, which only `nft list` reads, and their bytes."""
_HOST_ORDER, _NETWORK_ORDER = 1, 2
"""Of the bytes of a key, for `nft list` alone."""
_OUTPUT_HOOKS = {ARP: 1, IPV6: 3}
_NETWORK, _TRANSPORT = 1, 2
_OUT_INTERFACE, _L4_PROTOCOL = 7, 16
_LOOKUP_INVERTED = 1
_PSEUDO_HEADER = 1
_ICMPV6, _SOLICITATION, _ADVERTISEMENT = 58, 135, 136
_ARP_REQUEST = b"\0\1"
_ARP_OPERATION, _ARP_SENDER, _ARP_TARGET = 6, 14, 24
"""Offsets in an ARP message for IPv4 over Ethernet (RFC 826)."""
_ND_CHECKSUM, _ND_FLAGS, _ND_TARGET, _ND_OPTION = 2, 4, 8, 24
"""Offsets in a neighbour solicitation or advertisement (RFC 4861, 4.3 and 4.4)."""
_ALL_NODES = ip_address("ff02::1").packed
_OVERRIDE = bytes.fromhex("20000000")
_TARGET_OPTION = b"\2\1"
"""The link-layer address of the target, eight bytes: the source's is `01 01`."""


@dataclass(frozen=True, slots=True)
class Element:
    """An element of one of the sets; `timeout_ms` 0: none."""

    family: int
    set_name: str
    key: bytes
    timeout_ms: int = 0


def interface_elements(set_name: str, interfaces: Collection[str], timeout_ms: int = 0) -> list[Element]:
    """One element for each interface, in both tables."""
    keys = [name.encode().ljust(_IFNAME_BYTES, b"\0") for name in sorted(interfaces)]
    return [Element(family, set_name, key, timeout_ms) for family in (ARP, IPV6) for key in keys]


def address_elements(set_name: str, addresses: Collection[str]) -> list[Element]:
    """One element for each address, in the table of its family."""
    packed = [ip_address(address).packed for address in sorted(addresses)]
    return [Element(ARP if len(key) == 4 else IPV6, set_name, key) for key in packed]


def tables(name: str, addresses: Collection[str]) -> bytes:
    """A transaction that makes both tables anew, closed, with no address held."""
    made = b"".join(
        _table(_NEW_TABLE, family, name)
        + _table(_DELETE_TABLE, family, name)
        + _table(_NEW_TABLE, family, name)
        + b"".join(_set(family, name, each, *kind) for each, kind in _sets(family).items())
        + _chain(family, name)
        + b"".join(_rule(family, name, rule) for rule in (_arp_rules() if family == ARP else _nd_rules()))
        for family in (ARP, IPV6)
    )
    return _batch(made + _elements(_NEW_ELEMENT, name, address_elements(ADDRESSES, addresses)))


def removal(name: str) -> bytes:
    """A transaction that deletes both tables, whether they exist or not."""
    return _batch(
        b"".join(
            _table(_NEW_TABLE, family, name) + _table(_DELETE_TABLE, family, name) for family in (ARP, IPV6)
        )
    )


def query(name: str) -> bytes:
    """A request for the first of the tables."""
    return message(_SUBSYSTEM << 8 | _GET_TABLE, REQUEST, 1, nfgenmsg(ARP) + string(1, name))


def change(name: str, deleted: Sequence[Element], added: Sequence[Element]) -> bytes:
    """A transaction of elements: all of it, or, if a deleted one is absent or has expired, nothing."""
    return _batch(_elements(_DELETE_ELEMENT, name, deleted) + _elements(_NEW_ELEMENT, name, added))


def _sets(family: int) -> dict[str, tuple[int, int, int]]:
    """Name to key type, key length and flags."""
    address = (*_ADDRESS_TYPES[family], 0)
    interface = (_IFNAME_TYPE, _IFNAME_BYTES, _TIMEOUT_FLAG)
    return {LEASE: interface, PENDING: interface, ADDRESSES: address, HELD: address}


def _arp_rules() -> list[tuple[str, bytes]]:
    sender, target = _load(_NETWORK, _ARP_SENDER, 4), _load(_NETWORK, _ARP_TARGET, 4)
    request = _load(_NETWORK, _ARP_OPERATION, 2) + _equals(_ARP_REQUEST)
    announced = request + _in_lease() + target + _lookup(HELD) + _store(_NETWORK, _ARP_SENDER, 4)
    ours = sender + _lookup(ADDRESSES)
    return [
        ("a query for a held address becomes its announcement", announced),
        ("no answer for an address that another host holds", ours + _lookup(HELD, inverted=True) + _drop()),
        ("no answer without a valid lease", ours + _in_lease(inverted=True) + _drop()),
    ]


def _nd_rules() -> list[tuple[str, bytes]]:
    target = _load(_TRANSPORT, _ND_TARGET, 16)
    ours = _nd(_ADVERTISEMENT) + target + _lookup(ADDRESSES)
    return [
        ("a query for a held address becomes its announcement", _nd_announcement(target)),
        ("no answer for an address that another host holds", ours + _lookup(HELD, inverted=True) + _drop()),
        ("no answer without a valid lease", ours + _in_lease(inverted=True) + _drop()),
    ]


def _nd_announcement(target: bytes) -> bytes:
    """A solicitation of this host becomes an unsolicited advertisement to all nodes, with the flag that
    overrides what they know (RFC 4861, 7.2.6)."""
    words = (
        (0, bytes((_ADVERTISEMENT, 0))),
        (_ND_FLAGS, _OVERRIDE),
        (_ND_OPTION, _TARGET_OPTION),
    )
    changed = b"".join(
        _constant(value) + _store(_TRANSPORT, at, len(value), checksum=_ND_CHECKSUM) for at, value in words
    )
    to_all = _constant(_ALL_NODES) + _store(_NETWORK, 24, 16, pseudo_header=True)
    return _nd(_SOLICITATION) + _in_lease() + target + _lookup(HELD) + changed + to_all


def _nd(kind: int) -> bytes:
    protocol = _expression("meta", u32(1, 1), u32(2, _L4_PROTOCOL)) + _equals(bytes([_ICMPV6]))
    return protocol + _load(_TRANSPORT, 0, 1) + _equals(bytes([kind]))


def _in_lease(inverted: bool = False) -> bytes:
    interface = _expression("meta", u32(1, 1), u32(2, _OUT_INTERFACE))
    return interface + _lookup(LEASE, inverted)


def _load(base: int, offset: int, length: int) -> bytes:
    return _expression("payload", u32(1, 1), u32(2, base), u32(3, offset), u32(4, length))


def _store(
    base: int, offset: int, length: int, checksum: int | None = None, pseudo_header: bool = False
) -> bytes:
    """Write the register into the packet; `checksum`: the offset of the one that covers it."""
    corrected = [u32(6, 1), u32(7, checksum)] if checksum is not None else [u32(6, 0)]
    corrected += [u32(8, _PSEUDO_HEADER)] if pseudo_header else []
    return _expression("payload", u32(5, 1), u32(2, base), u32(3, offset), u32(4, length), *corrected)


def _constant(value: bytes) -> bytes:
    return _expression("immediate", u32(1, 1), nested(2, attribute(1, value)))


def _equals(value: bytes) -> bytes:
    return _expression("cmp", u32(1, 1), u32(2, 0), nested(3, attribute(1, value)))


def _lookup(set_name: str, inverted: bool = False) -> bytes:
    flags = u32(5, _LOOKUP_INVERTED if inverted else 0)
    return _expression("lookup", string(1, set_name), u32(2, 1), flags)


def _drop() -> bytes:
    verdict = nested(2, nested(2, u32(1, 0)))
    return _expression("counter") + _expression("immediate", u32(1, 0), verdict)


def _expression(name: str, *parts: bytes) -> bytes:
    return nested(1, string(1, name), nested(2, *parts))


def _table(kind: int, family: int, name: str) -> bytes:
    return _message(kind, family, string(1, name))


def _set(family: int, table: str, name: str, key_type: int, key_bytes: int, flags: int) -> bytes:
    number = list(_sets(family)).index(name) + 1
    order = _HOST_ORDER if key_type == _IFNAME_TYPE else _NETWORK_ORDER
    return _message(
        _NEW_SET,
        family,
        string(1, table) + string(2, name) + u32(3, flags) + u32(4, key_type) + u32(5, key_bytes)
        + u32(10, number)
        + attribute(13, struct.pack("=BBI", 0, 4, order)),
    )  # fmt: skip


def _chain(family: int, table: str) -> bytes:
    hook = nested(4, u32(1, _OUTPUT_HOOKS[family]), u32(2, 0))
    return _message(_NEW_CHAIN, family, string(1, table) + string(3, "output") + hook + string(7, "filter"))


def _rule(family: int, table: str, rule: tuple[str, bytes]) -> bytes:
    comment, expressions = rule
    text = comment.encode() + b"\0"
    described = attribute(7, struct.pack("BB", 0, len(text)) + text)
    content = string(1, table) + string(2, "output") + nested(4, expressions) + described
    return _message(_NEW_RULE, family, content, _APPEND)


def _elements(kind: int, table: str, elements: Sequence[Element]) -> bytes:
    """Messages of at most 500 elements: an attribute has at most 64 KiB."""
    groups: dict[tuple[int, str], list[Element]] = {}
    for element in elements:
        groups.setdefault((element.family, element.set_name), []).append(element)
    return b"".join(
        _message(
            kind,
            family,
            string(1, table)
            + string(2, set_name)
            + nested(3, *(_element(each) for each in group[at : at + 500])),
        )
        for (family, set_name), group in groups.items()
        for at in range(0, len(group), 500)
    )


def _element(element: Element) -> bytes:
    timeout = (u64(4, element.timeout_ms),) if element.timeout_ms else ()
    return nested(1, nested(1, attribute(1, element.key)), *timeout)


def _message(kind: int, family: int, content: bytes, flags: int = 0) -> bytes:
    asked = REQUEST | ACKNOWLEDGE | flags | (0 if kind in (_DELETE_TABLE, _DELETE_ELEMENT) else CREATE)
    return _padded(message(_SUBSYSTEM << 8 | kind, asked, 1, nfgenmsg(family) + content))


def _batch(messages: bytes) -> bytes:
    begin, end = (message(kind, REQUEST, 1, nfgenmsg(0, _SUBSYSTEM)) for kind in (_BATCH_BEGIN, _BATCH_END))
    return _padded(begin) + messages + _padded(end)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
