"""The whole ruleset of some forwardings as one iptables-restore input, for an empty namespace. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from vipd.dataplane.iptables.names import ChainId, Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.ruleset import Ruleset
from vipd.model.forwarding import Forwarding

TABLES = ("filter", "nat")


def render(forwardings: Iterable[Forwarding], options: RuleOptions, tables: Iterable[str] = TABLES) -> str:
    """vipd's chains and the jumps from the built-in ones. Forwardings of other families are left out."""
    ruleset = Ruleset(options)
    for forwarding in forwardings:
        if forwarding.key.family is options.family:
            ruleset.update(forwarding.key, forwarding)
    wanted = ruleset.whole({})
    chains: dict[ChainId, Rules] = {c: r for group in wanted.service_chains for c, r in group.items()}
    chains.update(wanted.shared)
    return "".join(_table(table, chains, dict(wanted.jumps)) for table in tables)


def _table(table: str, chains: dict[ChainId, Rules], jumps: dict[ChainId, Rules]) -> str:
    own = sorted(chain for chain in chains if chain.table == table)
    declared = [f":{chain.name} - [0:0]" for chain in own]
    entries = [f"-A {c.name} {rule}" for c, rules in jumps.items() if c.table == table for rule in rules]
    rules = [f"-A {chain.name} {rule}" for chain in own for rule in chains[chain]]
    return "\n".join([f"*{table}", *declared, *entries, *rules, "COMMIT", ""])
