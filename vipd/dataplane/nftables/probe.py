"""Detects features of this host's nft and kernel: they check each form of rule, and write nothing.

An unsupported form would otherwise make every transaction fail as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vipd.dataplane.base import ApplyError
from vipd.dataplane.nftables.balance_chain import BalanceChain
from vipd.dataplane.nftables.base_chains import HOOKS, fixed_chains
from vipd.dataplane.nftables.chains import RejectChain
from vipd.dataplane.nftables.layout import FLOWS, HAIRPIN, PINGED, NftSet, Rules, affinity_map, fixed_sets
from vipd.dataplane.nftables.limit_chain import LimitChain
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.tools import Nft, check_transaction
from vipd.dataplane.programs import PROBE_SECONDS
from vipd.host.process import Runner
from vipd.model.flow_limits import FlowLimits
from vipd.model.service import Balance, Family

SCRATCH = "vipd-probe"


@dataclass(frozen=True, slots=True)
class Feature:
    """One form of rule, and the kernel module that has it."""

    name: str
    module: str
    rules: Rules
    holders: tuple[NftSet, ...] = ()
    hook: str = "prerouting"
    required: bool = True


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which optional features work."""

    affinity: bool = True
    random_fully: bool = True
    ping: bool = True
    counts: bool = True
    limits: bool = True


def shortcomings(
    capabilities: Capabilities,
    family: Family,
    affinity_services: Sequence[str],
    limited_services: Sequence[str],
) -> list[str]:
    """The effects of missing features on the services that require affinity, and on those with limits."""
    found = []
    if not capabilities.affinity and affinity_services:
        found.append(
            f"{family}: no affinity for {', '.join(affinity_services)}: nft or the kernel lacks dynamic maps"
        )
    if not capabilities.limits and limited_services:
        why = "the kernel lacks nft_limit or nft_connlimit; modprobe nft_connlimit"
        found.append(f"{family}: no limits for {', '.join(limited_services)}: {why}")
    if not capabilities.ping:
        why = "the kernel lacks nft_redir; modprobe nft_redir"
        found.append(f"{family}: VIPs do not answer ping: {why}")
    return found


async def probe(nft: Nft, options: TableOptions, run: Runner) -> Capabilities:
    """Try every feature. Raises ApplyError for a missing one that no service can do without."""
    features = _features(options)
    try:
        await check_transaction("".join(_text(feature, options) for feature in features), run, PROBE_SECONDS)
    except ApplyError as error:
        if not error.rules_at_fault:
            raise
        return await _try_each(features, nft, options, run)
    return Capabilities()


async def _try_each(
    features: tuple[Feature, ...], nft: Nft, options: TableOptions, run: Runner
) -> Capabilities:
    missing: set[str] = set()
    for feature in features:
        try:
            await check_transaction(_text(feature, options), run, PROBE_SECONDS)
        except ApplyError as error:
            if feature.required:
                what = f"{nft.version_text} cannot do {feature.name} on this kernel"
                raise ApplyError(what, error.why, f"modprobe {feature.module}") from None
            missing.add(feature.name)
    return Capabilities(
        affinity="affinity" not in missing,
        random_fully="random ports" not in missing,
        ping="ping" not in missing,
        counts="counters" not in missing,
        limits="limits" not in missing,
    )


def _text(feature: Feature, options: TableOptions) -> str:
    """A separate table for one feature."""
    table = f"{options.ip} {SCRATCH}-{feature.name.replace(' ', '-')}"
    family = options.family
    holders = [f"add {h.kind} {table} {h.name} {{ {h.declaration(family)} }}" for h in feature.holders]
    rules = [f"add rule {table} probe {rule}" for rule in feature.rules]
    chain = f"add chain {table} probe {{ {HOOKS[feature.hook]} }}"
    lines = [f'add table {table} {{ comment "probe"; }}', *holders, chain, *rules, ""]
    return "\n".join(lines)


def _echo(fixed: Mapping[str, Rules]) -> str:
    return next(rule for rule in fixed["dispatch"] if "redirect" in rule)


def _features(options: TableOptions) -> tuple[Feature, ...]:
    ip, fixed = options.ip, fixed_chains(options)
    plain, pinned = BalanceChain(2, Balance.RANDOM), BalanceChain(2, Balance.RANDOM, timeout=60)
    by_hash = BalanceChain(2, Balance.SOURCE_HASH, local=True)
    dispatch = fixed["dispatch"][0].partition(" goto ")[0], fixed["handover"][0]
    limited = LimitChain(FlowLimits(1, 1, 1, 1, 1, 1), RejectChain(), plain)
    maps = tuple(holder for holder in fixed_sets(options.family, 1000) if not holder.dynamic_flags)
    return (
        Feature("maps and translation", "nft_nat", (*dispatch, *plain.rules(options)), maps),
        Feature("source hashes", "nft_hash", by_hash.rules(options), maps),
        Feature("refusals", "nft_reject", ("meta l4proto tcp reject with tcp reset", "reject")),
        Feature("address types", "nft_fib", ("fib daddr type != local return",)),
        Feature("masquerade", "nft_masq", ("masquerade",), hook="postrouting"),
        Feature("hairpin", "nft_masq", (f"{ip} saddr . {ip} daddr @hairpin",), (HAIRPIN,)),
        Feature("ping", "nft_redir", (_echo(fixed),), (PINGED,), required=False),
        Feature("random ports", "nft_masq", ("masquerade fully-random",), (), "postrouting", required=False),
        Feature(
            "affinity",
            "nf_tables",
            pinned.rules(options),
            (*maps, affinity_map(options.family, 1000)),
            required=False,
        ),
        # Without their last words: the chains that they lead to are not in this table.
        Feature(
            "limits",
            "nft_connlimit",
            tuple(rule.partition(" goto ")[0] for rule in limited.rules(options)),
            (*maps, *limited.sets()),
            required=False,
        ),
        Feature("counters", "nf_tables", fixed["counting"], (FLOWS,), "postrouting", required=False),
    )
