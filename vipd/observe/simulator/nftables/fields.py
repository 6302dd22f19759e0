"""The fields of a packet that rules match on, by their nft names."""

from __future__ import annotations

from collections.abc import Callable

from vipd.model.service import Family
from vipd.observe.simulator.nftables.datatypes import (
    ADDRESS,
    ICMP_TYPE,
    LOCAL,
    MARK,
    PORT,
    PROTOCOL,
    ROUTE_TYPE,
)
from vipd.observe.simulator.nftables.expressions import Field
from vipd.observe.simulator.packet_state import PROTOCOLS, PacketState

_ELSEWHERE = 1
"""RTN_UNICAST: represents every type of route but the local one."""

WRITABLE = {"meta mark", "ct mark", "ip saddr", "ip6 saddr", "ip daddr", "ip6 daddr"}
"""Fields that `set` may write."""


def _address_fields(family: Family) -> list[Field]:
    ip, datatype = _word(family), ADDRESS[family]

    def of(read: Callable[[PacketState], int]) -> Callable[[PacketState], int | None]:
        return lambda packet: read(packet) if packet.local_addresses.family is family else None

    return [
        Field(f"{ip} saddr", datatype, of(lambda b: b.source)),
        Field(f"{ip} daddr", datatype, of(lambda b: b.destination)),
        Field(f"ct original {ip} saddr", datatype, of(lambda b: b.original_source)),
        Field(f"ct original {ip} daddr", datatype, of(lambda b: b.original_destination)),
    ]


def _word(family: Family) -> str:
    return "ip" if family is Family.IPV4 else "ip6"


def _port_fields(word: str) -> list[Field]:
    only = PROTOCOLS.get(word)

    def of(read: Callable[[PacketState], int | None]) -> Callable[[PacketState], int | None]:
        return lambda packet: read(packet) if only in (None, packet.protocol) else None

    return [
        Field(f"{word} sport", PORT, of(lambda b: b.source_port)),
        Field(f"{word} dport", PORT, of(lambda b: b.port)),
    ]


def _icmp_field(family: Family) -> Field:
    word = "icmp" if family is Family.IPV4 else "icmpv6"

    def read(packet: PacketState) -> int | None:
        return packet.icmp_type if packet.protocol == PROTOCOLS[word] else None

    return Field(f"{word} type", ICMP_TYPE[family], read)


def _route_type(address: Callable[[PacketState], int]) -> Callable[[PacketState], int | None]:
    return lambda packet: LOCAL if packet.local_addresses.holds(address(packet)) else _ELSEWHERE


_PLAIN = [
    Field("meta l4proto", PROTOCOL, lambda b: b.protocol),
    # Every traced TCP packet begins a flow: SYN alone.
    Field("tcp flags", MARK, lambda b: 2 if b.protocol == PROTOCOLS["tcp"] else None),
    Field("meta mark", MARK, lambda b: b.mark),
    Field("ct mark", MARK, lambda b: b.connection_mark),
    Field("ct original proto-dst", PORT, lambda b: b.original_port),
    Field("fib saddr type", ROUTE_TYPE, _route_type(lambda b: b.source)),
    Field("fib daddr type", ROUTE_TYPE, _route_type(lambda b: b.destination)),
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
