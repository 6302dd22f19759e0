"""Writes the LIM chain of a service port: a rule for each limit on its new flows. Pure.

A flow over a limit leaves the nat table untranslated (`-j ACCEPT`), and a rule in filter, where the kernel
allows it, refuses what is still for the service's own address; a flow within all limits returns.

The chain is separate from SVC and SVL so that a change of backends leaves it as it is: a new rule counts
connections from zero. Rates are in tables of their own (/proc/net/ipt_hashlimit), which have the numbers in
their names, because the kernel gives a rule an existing table of that name whatever numbers the rule has.
"""

from __future__ import annotations

from vipd.dataplane.iptables.names import Rules
from vipd.dataplane.iptables.syntax import comment
from vipd.model.flow_limits import AppliedLimit, FlowLimits
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family

MAX_CLIENTS = 65_536
"""Clients in one table of rates. The kernel drops packets of further ones."""

_MICROSECONDS = 1_000_000
"""The unit in which xt_hashlimit stores the time between two flows."""


def limit_rules(key: ForwardingKey, limits: FlowLimits, chain: str) -> Rules:
    """The rules of the LIM chain, in the order of the limits."""
    return tuple(
        f"{comment(f'{key.service_port} over {each.limit}')} {_over(each, key, limits, chain)} -j ACCEPT"
        for each in limits.applied()
    )


def _over(each: AppliedLimit, key: ForwardingKey, limits: FlowLimits, chain: str) -> str:
    """The match for a flow that exceeds a limit, as iptables-save prints it."""
    ipv6 = key.family is Family.IPV6
    length = limits.client_ipv6_prefix if ipv6 else key.family.bits
    if not each.limit.is_rate:
        mask = length if each.limit.per_client else 0
        return f"-m connlimit --connlimit-above {each.most} --connlimit-mask {mask} --connlimit-saddr"
    name = f"{chain}-{'client' if each.limit.per_client else 'all'}-{each.most}-{each.burst}"
    by_client = "--hashlimit-mode srcip " if each.limit.per_client else ""
    if each.limit.per_client and ipv6:
        name += f"-{length}"
    masked = f" --hashlimit-srcmask {length}" if each.limit.per_client and length < key.family.bits else ""
    return (
        f"-m hashlimit --hashlimit-above {stored_rate(each.most)}/sec --hashlimit-burst {each.burst} "
        f"{by_client}--hashlimit-name {name} --hashlimit-htable-max {MAX_CLIENTS}"
        f" --hashlimit-htable-expire {each.idle_seconds * 1000}{masked}"
    )


def stored_rate(per_second: int) -> int:
    """The rate that the kernel stores for another one, and iptables-save prints: a little higher above 1,000
    a second."""
    return _MICROSECONDS // (_MICROSECONDS // per_second)
