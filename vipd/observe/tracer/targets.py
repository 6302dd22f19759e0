"""What a rule does with a packet that meets its conditions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from vipd.observe.tracer.passing import Passing

DESTINATION_HOOKS = frozenset({"PREROUTING", "OUTPUT"})
SOURCE_HOOKS = frozenset({"POSTROUTING"})


class Ruling(StrEnum):
    """How a chain of a table can end for a packet."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"


@dataclass(frozen=True, slots=True)
class End:
    """`-j ACCEPT`, `DROP` and `REJECT`."""

    ruling: Ruling
    reject_with: str = ""


@dataclass(frozen=True, slots=True)
class Jump:
    """`-j CHAIN`, or with `forget` `-g CHAIN`, which does not come back to the rule after it."""

    chain: str
    forget: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """`-j RETURN`: back to the caller, or to the policy in a built-in chain."""


@dataclass(frozen=True, slots=True)
class SetMark:
    """`-j MARK` and, with `of_connection`, `-j CONNMARK`: clear the bits of `mask`, then XOR `value`."""

    value: int
    mask: int
    of_connection: bool = False
    hooks: ClassVar[frozenset[str]] = frozenset()
    final: ClassVar[bool] = False

    def rewrite(self, packet: Passing) -> Passing:
        """The packet with its new mark."""
        if self.of_connection:
            return replace(packet, connection_mark=packet.connection_mark & ~self.mask ^ self.value)
        return replace(packet, mark=packet.mark & ~self.mask ^ self.value)


@dataclass(frozen=True, slots=True)
class Dnat:
    """`-j DNAT --to-destination`. Without a port the packet keeps its own."""

    address: int
    port: int | None
    hooks: ClassVar[frozenset[str]] = DESTINATION_HOOKS
    final: ClassVar[bool] = True

    def rewrite(self, packet: Passing) -> Passing:
        """The packet on its way to the new destination."""
        return _redirected(packet, self.address, self.port)


@dataclass(frozen=True, slots=True)
class Redirect:
    """`-j REDIRECT`: to this host itself. Without a port the packet keeps its own."""

    port: int | None
    hooks: ClassVar[frozenset[str]] = DESTINATION_HOOKS
    final: ClassVar[bool] = True

    def rewrite(self, packet: Passing) -> Passing:
        """To loopback from a local process, else to the host's first address.

        The kernel takes the first address of the incoming interface, which the tracer is not told.
        """
        place = packet.locality
        if packet.from_here or place.primary is None:
            return _redirected(packet, place.loopback, self.port)
        return _redirected(packet, place.primary, self.port)


@dataclass(frozen=True, slots=True)
class Masquerade:
    """`-j MASQUERADE`: the address of the way out becomes the source."""

    options: frozenset[str] = frozenset()
    hooks: ClassVar[frozenset[str]] = SOURCE_HOOKS
    final: ClassVar[bool] = True

    def rewrite(self, packet: Passing) -> Passing:
        """The packet with this host's first address as its source.

        Only a flow that stays on the host is looked at again; for `lo` the kernel picks just that address.
        """
        primary = packet.locality.primary
        source = packet.source if primary is None else primary
        return replace(packet, source=source, masqueraded=True, states=packet.states | {"SNAT"})


Rewrite = SetMark | Dnat | Redirect | Masquerade
"""Targets that change the packet. `hooks`: the built-in chains they may be reached from, empty for any.
`final`: the packet leaves the table after it."""


@dataclass(frozen=True, slots=True)
class Opaque:
    """Stands in for a rule that could not be read, where the caller allowed that."""

    words: tuple[str, ...]
    why: str


Target = End | Jump | Return | Rewrite | Opaque | None
"""None: the rule only counts."""


def _redirected(packet: Passing, address: int, port: int | None) -> Passing:
    new_port = packet.port if port is None or packet.port is None else port
    # The kernel flags a flow as DNAT only when its tuple really changed (nf_nat_setup_info).
    changed = (address, new_port) != (packet.destination, packet.port)
    return replace(
        packet,
        destination=address,
        port=new_port,
        backend=packet.socket(address, new_port),
        states=packet.states | {"DNAT"} if changed else packet.states,
    )
