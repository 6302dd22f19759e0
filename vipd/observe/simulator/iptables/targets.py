"""The effect of a rule on a packet that meets its conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vipd.observe.simulator.outcome import RuleVerdict
from vipd.observe.simulator.packet_state import PacketState

DESTINATION_HOOKS = frozenset({"PREROUTING", "OUTPUT"})
SOURCE_HOOKS = frozenset({"POSTROUTING"})


@dataclass(frozen=True, slots=True)
class End:
    """`-j ACCEPT`, `DROP` and `REJECT`."""

    verdict: RuleVerdict
    reject_with: str = ""


@dataclass(frozen=True, slots=True)
class Jump:
    """`-j CHAIN`, or with `goto` `-g CHAIN`, from which a packet does not return to the next rule."""

    chain: str
    goto: bool = False


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

    def rewrite(self, packet: PacketState) -> PacketState:
        """The packet with its new mark."""
        if self.of_connection:
            return packet._replace(connection_mark=packet.connection_mark & ~self.mask ^ self.value)
        return packet._replace(mark=packet.mark & ~self.mask ^ self.value)


@dataclass(frozen=True, slots=True)
class Dnat:
    """`-j DNAT --to-destination`. Without a port the packet keeps its own."""

    address: int
    port: int | None
    hooks: ClassVar[frozenset[str]] = DESTINATION_HOOKS
    final: ClassVar[bool] = True

    def rewrite(self, packet: PacketState) -> PacketState:
        """The packet with the new destination."""
        return packet.translated(self.address, self.port)


@dataclass(frozen=True, slots=True)
class Redirect:
    """`-j REDIRECT`: to this host itself. Without a port the packet keeps its own."""

    port: int | None
    hooks: ClassVar[frozenset[str]] = DESTINATION_HOOKS
    final: ClassVar[bool] = True

    def rewrite(self, packet: PacketState) -> PacketState:
        """The packet with an address of this host as its destination."""
        return packet.redirected(self.port)


@dataclass(frozen=True, slots=True)
class Masquerade:
    """`-j MASQUERADE`: the address of the outgoing interface becomes the source."""

    options: frozenset[str] = frozenset()
    hooks: ClassVar[frozenset[str]] = SOURCE_HOOKS
    final: ClassVar[bool] = True

    def rewrite(self, packet: PacketState) -> PacketState:
        """The packet with this host's address as its source."""
        return packet.masquerade()


Rewrite = SetMark | Dnat | Redirect | Masquerade
"""Targets that change the packet. `hooks`: the built-in chains they may be reached from, empty for any.
`final`: the packet leaves the table after it."""

Target = End | Jump | Return | Rewrite | None
"""None: the rule only counts."""
