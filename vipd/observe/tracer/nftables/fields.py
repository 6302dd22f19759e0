"""What rules can look at in a packet, by the words for it."""

from __future__ import annotations

from collections.abc import Callable

from vipd.model import Family
from vipd.observe.tracer.nftables.branch import Branch
from vipd.observe.tracer.nftables.expressions import Field
from vipd.observe.tracer.nftables.kinds import (
    ADDRESS,
    ICMP_TYPE,
    LOCAL,
    MARK,
    PORT,
    PROTOCOL,
    ROUTE_TYPE,
)
from vipd.observe.tracer.passing import PROTOCOLS

_ELSEWHERE = 1
"""RTN_UNICAST: stands for every type of route but the local one."""

WRITABLE = {"meta mark", "ct mark", "ip saddr", "ip6 saddr", "ip daddr", "ip6 daddr"}
"""Fields that `set` may write."""


def _address_fields(family: Family) -> list[Field]:
    ip, kind = _word(family), ADDRESS[family]

    def of(read: Callable[[Branch], int]) -> Callable[[Branch], int | None]:
        return lambda branch: read(branch) if branch.packet.locality.family is family else None

    return [
        Field(f"{ip} saddr", kind, of(lambda b: b.packet.source)),
        Field(f"{ip} daddr", kind, of(lambda b: b.packet.destination)),
        Field(f"ct original {ip} saddr", kind, of(lambda b: b.original_source)),
        Field(f"ct original {ip} daddr", kind, of(lambda b: b.original_destination)),
    ]


def _word(family: Family) -> str:
    return "ip" if family is Family.IPV4 else "ip6"


def _port_fields(word: str) -> list[Field]:
    only = PROTOCOLS.get(word)

    def of(read: Callable[[Branch], int | None]) -> Callable[[Branch], int | None]:
        return lambda branch: read(branch) if only in (None, branch.packet.protocol) else None

    return [
        Field(f"{word} sport", PORT, of(lambda b: b.packet.source_port)),
        Field(f"{word} dport", PORT, of(lambda b: b.packet.port)),
    ]


def _icmp_field(family: Family) -> Field:
    word = "icmp" if family is Family.IPV4 else "icmpv6"

    def read(branch: Branch) -> int | None:
        packet = branch.packet
        return packet.icmp_type if packet.protocol == PROTOCOLS[word] else None

    return Field(f"{word} type", ICMP_TYPE[family], read)


def _route_type(address: Callable[[Branch], int]) -> Callable[[Branch], int | None]:
    return lambda branch: LOCAL if branch.packet.locality.holds(address(branch)) else _ELSEWHERE


_PLAIN = [
    Field("meta l4proto", PROTOCOL, lambda b: b.packet.protocol),
    # Every TCP packet that is traced begins a flow: SYN alone.
    Field("tcp flags", MARK, lambda b: 2 if b.packet.protocol == PROTOCOLS["tcp"] else None),
    Field("meta mark", MARK, lambda b: b.packet.mark),
    Field("ct mark", MARK, lambda b: b.packet.connection_mark),
    Field("ct original proto-dst", PORT, lambda b: b.original_port),
    Field("fib saddr type", ROUTE_TYPE, _route_type(lambda b: b.packet.source)),
    Field("fib daddr type", ROUTE_TYPE, _route_type(lambda b: b.packet.destination)),
]

FIELDS = {
    field.name: field
    for field in (
        *_PLAIN,
        *(field for family in Family for field in _address_fields(family)),
        *(field for word in ("th", "tcp", "udp", "sctp") for field in _port_fields(word)),
        *map(_icmp_field, Family),
    )
}

LONGEST = max(len(name.split()) for name in FIELDS)
"""Words of a field's name."""
