"""Detects features of this host's iptables and kernel by loading each rule form once into a separate chain.

No packet reaches that chain. An unsupported form would otherwise make every later restore fail as a whole,
for all services (contract 2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.limit_chain import limit_rules
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.tools import Tools, restore
from vipd.host.process import Runner
from vipd.model.flow_limits import FlowLimits
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family, Protocol


@dataclass(frozen=True, slots=True)
class Feature:
    """One rule form, and the kernel module that has it."""

    name: str
    module: str
    table: str
    rule: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which optional features work."""

    affinity: bool = True
    flow_marks: bool = True
    random_fully: bool = True
    ping: bool = True
    limits: bool = True


def shortcomings(
    capabilities: Capabilities,
    family: Family,
    affinity_services: Sequence[str],
    limited_services: Sequence[str],
    *,
    accepts: bool,
) -> list[str]:
    """The effects of missing features.

    `affinity_services`: the services that require affinity; `limited_services`: those with limits;
    `accepts`: translated flows must be accepted in FORWARD.
    """
    found = []
    if not capabilities.affinity and affinity_services:
        why = "the kernel lacks xt_recent; modprobe xt_recent"
        found.append(f"{family}: no affinity for {', '.join(affinity_services)}: {why}")
    if not capabilities.limits and limited_services:
        why = "the kernel lacks xt_hashlimit or xt_connlimit; modprobe xt_hashlimit xt_connlimit"
        found.append(f"{family}: no limits for {', '.join(limited_services)}: {why}")
    if not capabilities.ping:
        why = "the kernel lacks xt_REDIRECT; modprobe xt_REDIRECT"
        found.append(f"{family}: VIPs do not answer ping: {why}")
    if not capabilities.flow_marks and accepts:
        why = "the kernel lacks xt_connmark; modprobe xt_connmark"
        found.append(f"{family}: translated flows are not accepted in FORWARD: {why}")
    return found


async def probe(tools: Tools, names: Names, family: Family, run: Runner) -> Capabilities:
    """Try every feature. Raises ApplyError for a missing one that no service can do without, or when busy."""
    features = _features(family, names.fixed("PROBE"))
    try:
        await _try(features, tools, names, run)
    except ApplyError as error:
        if not error.rules_at_fault:
            raise
        return await _try_each(features, tools, names, run)
    return Capabilities()


async def _try_each(features: tuple[Feature, ...], tools: Tools, names: Names, run: Runner) -> Capabilities:
    missing: dict[str, str] = {}
    for feature in features:
        try:
            await _try((feature,), tools, names, run)
        except ApplyError as error:
            if feature.required:
                what = f"{tools.version_text} cannot do {feature.name} on this kernel"
                raise ApplyError(what, error.why, f"modprobe {feature.module}") from None
            missing[feature.name] = error.why
    return Capabilities(
        affinity="affinity" not in missing,
        flow_marks="flow marks" not in missing,
        random_fully="random ports" not in missing,
        ping="ping" not in missing,
        limits="limits" not in missing,
    )


async def _try(features: tuple[Feature, ...], tools: Tools, names: Names, run: Runner) -> None:
    chain = names.fixed("PROBE")
    blocks = []
    for table in dict.fromkeys(feature.table for feature in features):
        rules = [f"-A {chain} {feature.rule}" for feature in features if feature.table == table]
        blocks.append("\n".join([f"*{table}", f":{chain} - [0:0]", *rules, "COMMIT", ""]))
        blocks.append(f"*{table}\n:{chain} - [0:0]\n-X {chain}\nCOMMIT\n")
    await restore(tools, "".join(blocks), run)


def _features(family: Family, chain: str) -> tuple[Feature, ...]:
    address, version = ("192.0.2.1:9", "icmp") if family is Family.IPV4 else ("[2001:db8::1]:9", "icmp6")
    echo = "icmp -m icmp --icmp-type 8" if family is Family.IPV4 else "ipv6-icmp -m icmp6 --icmpv6-type 128"
    key = ForwardingKey("probe", "", Protocol.TCP, family)
    return (
        Feature("comments", "xt_comment", "nat", "-m comment --comment probe"),
        Feature("marks", "xt_mark", "nat", "-m mark ! --mark 0x1/0x1 -j MARK --set-xmark 0x1/0x1"),
        Feature("address types", "xt_addrtype", "nat", "-m addrtype --dst-type LOCAL"),
        Feature("random choice", "xt_statistic", "nat", "-m statistic --mode random --probability 0.5"),
        Feature("DNAT", "xt_nat", "nat", f"-p tcp -m tcp -j DNAT --to-destination {address}"),
        Feature("masquerade", "xt_MASQUERADE", "nat", "-j MASQUERADE"),
        Feature("connection states", "xt_conntrack", "filter", "-m conntrack --ctstate DNAT"),
        Feature("refusals", "ipt_REJECT", "filter", f"-j REJECT --reject-with {version}-port-unreachable"),
        Feature("ping", "xt_REDIRECT", "nat", f"-p {echo} -j REDIRECT", required=False),
        Feature("random ports", "xt_MASQUERADE", "nat", "-j MASQUERADE --random-fully", required=False),
        Feature("affinity", "xt_recent", "nat", f"-m recent --set --name {chain} --rsource", required=False),
        *(
            Feature("limits", "xt_hashlimit", "nat", rule, required=False)
            for rule in limit_rules(key, FlowLimits(1, 1, 1, 1, 1, 1), chain)
        ),
        Feature("flow marks", "xt_connmark", "nat", "-j CONNMARK --set-xmark 0x1/0x1", required=False),
        Feature("flow marks", "xt_connmark", "filter", "-m connmark --mark 0x1/0x1", required=False),
    )
