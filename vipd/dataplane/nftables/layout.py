"""Content of the table: its maps and sets, and the form of their elements. Pure.

Every map contains all services; the key identifies the packet's service. Elements are written as nft prints
them, fields joined by ` . `, so that an element read back equals the one written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Address, IPv6Address

from vipd.model.flow_limits import Limit
from vipd.model.service import Family

Rules = tuple[str, ...]
"""Of a chain, in order."""

FORMAT = 3
"""Format of the whole table. A table of another format is replaced in one transaction."""

COMMENT_START = "vipd format "
TABLE_COMMENT = f"{COMMENT_START}{FORMAT}"
"""Identifies a table as vipd's, and its format."""

RESERVED = {Family.IPV4: "0.0.0.0/8", Family.IPV6: "100::/64"}
"""Addresses that represent slots and endpoints' numbers: no host uses them."""
LOCAL_OFFSET = 1 << 16
"""First slot of endpoints on this host, for the local traffic policy."""


class Field(Enum):
    """One part of a key or value, and its type (`IP` represents ipv4 or ipv6)."""

    ADDRESS = "IP_addr"
    """An address; or the number of a slot or endpoint in the form of one (see `number_address`)."""
    PROTOCOL = "inet_proto"
    PORT = "inet_service"
    NUMBER = ""
    """32 bits in the host's byte order, a type without a name."""
    VERDICT = "verdict"


_FRONTEND = (Field.ADDRESS, Field.PROTOCOL, Field.PORT)
_HOST_PORT = (Field.PROTOCOL, Field.PORT)
_ENDPOINT = (Field.ADDRESS, Field.PORT)


@dataclass(frozen=True, slots=True)
class NftSet:
    """A map, or a set where there is no value."""

    name: str
    key: tuple[Field, ...]
    value: tuple[Field, ...] = ()
    dynamic_flags: str = ""
    """Flags of a holder that packets fill, so that vipd does not write its elements. Empty for all others."""
    size: int = 0

    @property
    def kind(self) -> str:
        """`map` or `set`."""
        return "map" if self.value else "set"

    def declaration(self, family: Family) -> str:
        """The declaration for nft, between the braces; with the comment by which it is recognised."""
        words = [self.typed(family)]
        words += [f"size {self.size};"] if self.size else []
        words += [f"flags {self.dynamic_flags};"] if self.dynamic_flags else []
        return " ".join([*words, f'comment "{self.digest(family)}";'])

    def digest(self, family: Family) -> str:
        """Equal for equal declarations."""
        return _set_digest(self, family)

    def typed(self, family: Family) -> str:
        """By names of types, or by examples if one has no name. A value of two fields must not be declared by
        examples: nft 1.0.6 creates no rule that uses such a map in a later transaction."""
        words, spelled = "type", {field: field.value.replace("IP", str(family)) for field in Field}
        if Field.NUMBER in self.key:
            ip = "ip" if family is Family.IPV4 else "ip6"
            words, spelled = "typeof", {Field.NUMBER: "numgen random mod 2", Field.ADDRESS: f"{ip} daddr"}
        key, value = (" . ".join(spelled[field] for field in fields) for fields in (self.key, self.value))
        return f"{words} {key} : {value};" if value else f"{words} {key};"


@lru_cache(maxsize=1024)  # each change asks for those of all sets
def _set_digest(nft_set: NftSet, family: Family) -> str:
    return digest(f"{nft_set.typed(family)} {nft_set.size} {nft_set.dynamic_flags}")


FRONTENDS = NftSet("frontends", _FRONTEND, (Field.ADDRESS,))
"""Address, protocol and port of a service -> number of the chain that handles it.

Not the chain itself: the kernel checks every verdict of a table whenever one of them changes. With
100,000 of them a new virtual IP took 55 ms, instead of 9 ms (Linux 6.18).
"""
DISPATCH_MAP = NftSet("handlers", (Field.ADDRESS,), (Field.VERDICT,))
"""Number -> chain; one for each kind of services. They are added and removed with the chains."""
NODE_PORTS = NftSet("node_ports", _HOST_PORT, (Field.VERDICT,))
"""Protocol and port of this host itself -> the chain."""
PINGED = NftSet("pinged", (Field.ADDRESS,))
"""VIPs that answer ping."""
CLAIMED = NftSet("claimed", (Field.ADDRESS,))
"""VIPs whose unused ports are refused."""
HAIRPIN = NftSet("hairpin", (Field.ADDRESS, Field.ADDRESS))
"""An endpoint's address, twice: a translated flow from there to there needs masquerade."""

REPLY_SOURCES = NftSet("reply_sources", _ENDPOINT)
"""Endpoints of services with `flow_takeover`. Exists only while there is one, as does the next."""
REPLY_FRONTENDS = NftSet("reply_frontends", _ENDPOINT, _ENDPOINT)
"""Such an endpoint -> address and port of the service, if it serves only one."""

NUMBER_TO_IPV6 = NftSet("numbers", (Field.NUMBER,), (Field.ADDRESS,))
"""Number -> the same as an address; for IPv6 alone, where nft cannot write a number into an address."""

UNUSED = "unused"
"""The chain that refuses packets for a virtual IP and no service."""

AFFINITY_MAP = "pins"
_DYNAMIC_FLAGS = "dynamic,timeout"


def affinity_map(family: Family, size: int) -> NftSet:
    """Client and service port -> number of the endpoint that the client keeps; filled by packets.

    IPv6 keys are two hashes of those: nft 1.0.6 aborts on dynamic maps with keys of more than 16 bytes.
    """
    part = Field.ADDRESS if family is Family.IPV4 else Field.NUMBER
    return NftSet(AFFINITY_MAP, (part, part), (Field.ADDRESS,), _DYNAMIC_FLAGS, size)


FLOWS = NftSet("flows", (*_FRONTEND, *_ENDPOINT), dynamic_flags="dynamic", size=1_000_000)
"""Frontend as the client named it, and endpoint, with a counter of new flows; filled by packets."""


class FrontendKind(Enum):
    """The part of a packet that identifies the service: address and port, or only the port of this host."""

    ADDRESS = ""
    NODE = "node_"

    @property
    def frontend(self) -> tuple[Field, ...]:
        """The fields that identify the frontend."""
        return _FRONTEND if self is FrontendKind.ADDRESS else _HOST_PORT

    @property
    def endpoints(self) -> NftSet:
        """Frontend and slot -> endpoint."""
        return _ENDPOINTS[self]

    @property
    def slot_endpoints(self) -> NftSet:
        """Frontend and slot -> number of an endpoint, for services with affinity."""
        return _SLOT_ENDPOINTS[self]

    @property
    def service_numbers(self) -> NftSet:
        """Frontend -> number of the service port, for services with affinity."""
        return _SERVICES[self]

    def numbered_endpoints(self, local: bool) -> NftSet:
        """Frontend and number -> endpoint, or endpoint on this host, for services with affinity: an endpoint
        without an entry has no clients."""
        return _NUMBERED_ENDPOINTS[self, local]


_ENDPOINTS = {p: NftSet(f"{p.value}endpoints", (*p.frontend, Field.ADDRESS), _ENDPOINT) for p in FrontendKind}
_SLOT_ENDPOINTS = {
    p: NftSet(f"{p.value}picks", (*p.frontend, Field.ADDRESS), (Field.ADDRESS,)) for p in FrontendKind
}
_SERVICES = {p: NftSet(f"{p.value}services", p.frontend, (Field.ADDRESS,)) for p in FrontendKind}
_NUMBERED_ENDPOINTS = {
    (p, local): NftSet(
        f"{p.value}{'local_' if local else ''}numbered", (*p.frontend, Field.ADDRESS), _ENDPOINT
    )
    for p in FrontendKind
    for local in (False, True)
}


_ALLOWED = "allowed_"


def allowed_sources(length: int, kind: FrontendKind = FrontendKind.ADDRESS) -> NftSet:
    """Source network of this prefix length and frontend -> chain, for limited sources. One map for each
    length keeps them hash tables: a map with ranges would be copied completely at each change."""
    return NftSet(f"{kind.value}{_ALLOWED}{length}", (Field.ADDRESS, *kind.frontend), (Field.VERDICT,))


def allowed_sources_named(name: str) -> NftSet | None:
    """The map of allowed sources that has this name; None: it is the name of none."""
    kind = FrontendKind.NODE if name.startswith(FrontendKind.NODE.value) else FrontendKind.ADDRESS
    length = name.removeprefix(kind.value).removeprefix(_ALLOWED)
    found = allowed_sources(int(length), kind) if length.isdecimal() else None
    return found if found and found.name == name else None


def refused_flows(limit: Limit) -> NftSet:
    """Frontend as the client named it, with a counter of the flows that were over this limit."""
    return NftSet(f"refused_{limit}", _FRONTEND, dynamic_flags="dynamic", size=65_536)


def fixed_sets(family: Family, affinity_map_size: int) -> tuple[NftSet, ...]:
    """Every holder but those of source ranges and of limits, which are there for those in use."""
    written = (FRONTENDS, DISPATCH_MAP, NODE_PORTS, PINGED, CLAIMED, HAIRPIN)
    by_frontend_kind = (
        *_ENDPOINTS.values(),
        *_SLOT_ENDPOINTS.values(),
        *_SERVICES.values(),
        *_NUMBERED_ENDPOINTS.values(),
    )
    to_ipv6 = (NUMBER_TO_IPV6,) if family is Family.IPV6 else ()
    return (*written, *to_ipv6, *by_frontend_kind, affinity_map(family, affinity_map_size), FLOWS)


@lru_cache(maxsize=4096)
def number_address(family: Family, number: int) -> str:
    """A slot, or the number of an endpoint, as an address in `RESERVED`."""
    return str(IPv4Address(number)) if family is Family.IPV4 else str(IPv6Address((0x100 << 112) + number))


@lru_cache(maxsize=4096)
def name_address(family: Family, name: str) -> str:
    """The number of a service port or a chain, as an address that no packet leaves with.

    It derives from the name alone, so it is the same after a restart, whatever else is declared. With IPv4
    two names may have the same 32 bits, by chance or because an author has looked for one: `TableNumbers`
    gives the second another number.
    """
    data = blake2b(name.encode(), digest_size=family.bits // 8).digest()
    return str(IPv4Address(data) if family is Family.IPV4 else IPv6Address(data))


def short_digest(text: str) -> str:
    """A digest as used in names of chains: nobody finds a second text with the same one."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def digest(text: str) -> str:
    """A short digest as used in nft comments."""
    return f"#{blake2b(text.encode(), digest_size=6).hexdigest()}"
