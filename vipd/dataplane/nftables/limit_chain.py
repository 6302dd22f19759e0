"""The chains that limit the new flows of a service, and the sets in which the kernel counts them. Pure.

A `LimitChain` stands before the `BalanceChain` of a service with limits. Its state is in dynamic sets, not in
its rules: a chain is written anew when the number of backends changes, and rules would then count from zero.
Every set is for one limit with its numbers, because an element keeps the numbers that it was made with. A set
that is full limits no further clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address

from vipd.dataplane.nftables.balance_chain import BalanceChain
from vipd.dataplane.nftables.chains import Chain, RejectChain
from vipd.dataplane.nftables.layout import Field, NftSet, Rules, refused_flows, short_digest
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.flow_limits import AppliedLimit, FlowLimits, Limit
from vipd.model.service import Family

MAX_CLIENTS = 262_144
"""Elements of one set: clients of all services that have this limit with the same numbers."""


def limit_set(applied: AppliedLimit) -> NftSet:
    """Number of the service port, and the client if each is limited by itself, with the kernel's state."""
    name = f"{applied.limit}_{applied.most}"
    key = (Field.ADDRESS, Field.ADDRESS) if applied.limit.per_client else (Field.ADDRESS,)
    if applied.limit.is_rate:
        return NftSet(f"{name}_{applied.burst}", key, (), "dynamic,timeout", MAX_CLIENTS)
    # The kernel deletes an element by itself once none of its flows exists.
    return NftSet(name, key, (), "dynamic", MAX_CLIENTS)


@dataclass(frozen=True, slots=True)
class OverLimitChain:
    """Counts a flow that is over a limit, and refuses it."""

    limit: Limit
    refusal: RejectChain

    @property
    def name(self) -> str:
        """`over-new_per_client-refuse`."""
        return f"over-{self.limit}-{self.refusal.name}"

    def rules(self, options: TableOptions) -> Rules:
        """The destination address contains the number of the service port, which the refusal replaces."""
        frontend = f"ct original {options.ip} daddr . meta l4proto . th dport"
        count = f"update @{refused_flows(self.limit).name} {{ {frontend} counter }}"
        return (*((count,) if options.counts else ()), *self.refusal.rules(options))

    def targets(self) -> tuple[Chain, ...]:
        """Returns an empty tuple."""
        return ()

    def sets(self) -> tuple[NftSet, ...]:
        """The set that it counts in."""
        return (refused_flows(self.limit),)


@dataclass(frozen=True, slots=True)
class LimitChain:
    """Passes flows that are within all limits to the next chain."""

    limits: FlowLimits
    refusal: RejectChain
    target: BalanceChain

    @property
    def name(self) -> str:
        """`limits-5c0ffee05c0ffee0-random-3`: the digest is of the limits."""
        return f"limits-{short_digest(f'{self.limits} {self.refusal.name}')}-{self.target.name}"

    def rules(self, options: TableOptions) -> Rules:
        """The destination address serves as the register that contains the number of the service port; the
        last rule restores it, as later chains take some numbers for those of endpoints."""
        daddr = f"{options.ip} daddr"
        numbers = self.target.frontend_kind.service_numbers.name
        number = f"{daddr} set {self.target.frontend(options)} map @{numbers}"
        over = [
            f"{self._exceeds(each, options)} goto {self._over(each).name}" for each in self.limits.applied()
        ]
        return (number, *over, f"{daddr} set ct original {daddr} goto {self.target.name}")

    def targets(self) -> tuple[Chain, ...]:
        """The next chain, and those for flows over a limit."""
        return (self.target, *(self._over(each) for each in self.limits.applied()))

    def sets(self) -> tuple[NftSet, ...]:
        """The sets that contain the kernel's counts."""
        return tuple(limit_set(each) for each in self.limits.applied())

    def _over(self, applied: AppliedLimit) -> OverLimitChain:
        return OverLimitChain(applied.limit, self.refusal)

    def _exceeds(self, each: AppliedLimit, options: TableOptions) -> str:
        """The statement that counts a flow, and matches if it exceeds a limit."""
        key = f"{options.ip} daddr"
        if each.limit.per_client:
            key += f" . {self._client(options)}"
        if not each.limit.is_rate:
            return f"add @{limit_set(each).name} {{ {key} ct count over {each.most} }}"
        rate = f"limit rate over {each.most}/second burst {each.burst} packets"
        return f"update @{limit_set(each).name} {{ {key} timeout {each.idle_seconds}s {rate} }}"

    def _client(self, options: TableOptions) -> str:
        """The source address, or the part of it that counts as one client."""
        length, saddr = self.limits.client_ipv6_prefix, f"{options.ip} saddr"
        if options.family is Family.IPV4 or length == Family.IPV6.bits:
            return saddr
        return f"{saddr} & {IPv6Address(((1 << length) - 1) << (Family.IPV6.bits - length))}"
