"""The chains that all services share: entries, marks, masquerade; and single chains by name. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vipd.dataplane.iptables.base_chains import entry_jumps
from vipd.dataplane.iptables.descriptions import Role
from vipd.dataplane.iptables.names import TABLES, ChainId
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.saved_rules import Count, SavedRule
from vipd.dataplane.iptables.words import target_of
from vipd.observe.rule_tree.iptables_tree import EMPTY, UNREACHED, IptablesRules, foreign
from vipd.observe.rule_tree.tree import Node, NodeKind, SharedTree

_SERVICES = frozenset({Role.FRONTEND, Role.ADDRESS, Role.GROUP})
_WORKING = {"PREROUTING": "SERVICES", "POSTROUTING": "MASQUERADE", "MARK-MASQ": "MARK"}
"""The chain or target that some rule of these chains of nat must lead to."""
_MAX_UNREACHABLE = 5


def shared_tree(rules: IptablesRules, reached: set[str]) -> SharedTree:
    """The fixed chains, from the built-in ones on. `reached` are the chains in the trees of services.

    Rules for services are only counted here.
    """
    nodes = []
    for table in TABLES:
        shown: set[str] = set()
        for hook in sorted(chain for chain in rules.tables.policies if chain.table == table):
            children = tuple(_incoming_jumps(rules, hook, shown))
            nodes += [Node(NodeKind.CHAIN, table, hook.name, children=children)] if children else []
        # Marks: only chains of services lead there.
        rest = (c for c in rules.tables.chains if c.table == table and rules.names.is_fixed(c))
        nodes += [_chain(rules, chain, None, shown) for chain in sorted(rest) if chain.name not in shown]
    return SharedTree(rules.family, rules.place, (*nodes, *_unreachable_chains(rules, reached)))


def single_chain(rules: IptablesRules, name: str) -> SharedTree:
    """One chain of vipd's, in each table that has it, rule by rule. Empty if there is none."""
    nodes = []
    for table in TABLES:
        chain = ChainId(table, name)
        if rules.tables.chains.get(chain) is not None and rules.names.owns(chain):
            children = tuple(_shared_rule(rules, chain, rule) for rule in rules.tables.chains[chain])
            nodes.append(Node(NodeKind.CHAIN, _purpose(rules, chain), name, children=children))
    return SharedTree(rules.family, rules.place, tuple(nodes))


def _incoming_jumps(rules: IptablesRules, hook: ChainId, shown: set[str]) -> Iterator[Node]:
    """Our jumps in a built-in chain, and those that are not there."""
    found = set()
    for rule in rules.tables.chains[hook]:
        target = ChainId(hook.table, rule.target)
        if rules.names.is_fixed(target):
            found.add(target.name)
            yield _chain(rules, target, rule, shown)
    if rules.accepts_only:
        return
    kube = rules.tables.rules("nat", rules.names.fixed("PREROUTING")) is None
    options = RuleOptions(rules.family, rules.names.prefix, kube_proxy=kube)
    for wanted in entry_jumps(options).get(hook, ()):
        target_name = target_of(wanted)
        if target_name not in found:
            fault = f"no rule of {hook.name} leads there"
            yield Node(NodeKind.MISSING, f"jump to {target_name}", target_name, wanted, fault=fault)


def _chain(rules: IptablesRules, chain: ChainId, jump: SavedRule | None, shown: set[str]) -> Node:
    text = _purpose(rules, chain)
    text_of_jump, count = (jump.text, jump.counted) if jump else ("", None)
    place = jump.place if jump else ""
    if chain.name in shown:
        return Node(NodeKind.CHAIN, text, chain.name, text_of_jump, count, repeated=True, place=place)
    shown.add(chain.name)
    children = tuple(_fixed_rules(rules, chain, shown))
    fault = _why_ineffective(rules, chain)
    return Node(
        NodeKind.CHAIN, text, chain.name, text_of_jump, count, fault=fault, children=children, place=place
    )


def _fixed_rules(rules: IptablesRules, chain: ChainId, shown: set[str]) -> Iterator[Node]:
    """The rules of a chain that exists once; those for services as one line."""
    of_services: Counter[str] = Counter()
    entered = Count(0, 0)
    for rule in rules.tables.chains.get(chain, ()):
        target, parsed = ChainId(chain.table, rule.target), rules.parser.parse(chain, rule.text)
        if parsed is not None and parsed.role in _SERVICES:
            of_services["group" if parsed.role is Role.GROUP else "rule"] += 1
            entered += rule.counted or Count(0, 0)
        elif parsed is not None and rules.names.is_fixed(target):
            yield _chain(rules, target, rule, shown)
        else:
            yield _shared_rule(rules, chain, rule)
    for what, number in sorted(of_services.items()):
        text = f"{number} {what} for services" if number == 1 else f"{number} {what}s for services"
        yield Node(NodeKind.RULE, text, count=entered if len(of_services) == 1 else None)


def _shared_rule(rules: IptablesRules, chain: ChainId, rule: SavedRule) -> Node:
    parsed = rules.parser.parse(chain, rule.text)
    if parsed is None:
        return foreign(rule)
    note = parsed.service_port if parsed.role is Role.FRONTEND else ""
    target = ChainId(chain.table, rule.target)
    onward = (
        (Node(NodeKind.CHAIN, note or _purpose(rules, target), target.name),)
        if rules.names.owns(target)
        else ()
    )
    return Node(
        NodeKind.RULE,
        parsed.text,
        parsed.frontend,
        rule.text,
        rule.counted,
        children=onward,
        place=rule.place,
    )


def _purpose(rules: IptablesRules, chain: ChainId) -> str:
    """The purpose of a chain, as far as its name shows it."""
    purposes = {
        "SERVICES": "services by address" if chain.table == "nat" else "services without backends",
        "PREROUTING": "flows from other hosts",
        "POSTROUTING": "masquerade",
        "NODEPORTS": "node ports" if chain.table == "nat" else "health ports",
        "MARK-MASQ": "mark for masquerade",
        "MARK-OFF-CLUSTER": "mark for masquerade, but from inside",
        "EXTERNAL-SERVICES": "external addresses without backends",
        "PROXY-FIREWALL": "sources that may not come",
        "UNUSED": "ports that no service has",
        "FORWARD": "what vipd translated is let through",
        "FIREWALL": "loopback addresses from elsewhere",
        "GRP": "a group of addresses",
    }
    return purposes.get(rules.parser.kind_of(chain.name), chain.table)


def _why_ineffective(rules: IptablesRules, chain: ChainId) -> str:
    """Why a chain cannot fulfil its purpose."""
    wanted = _WORKING.get(rules.parser.kind_of(chain.name)) if chain.table == "nat" else None
    if wanted is None:
        return ""
    found = rules.tables.chains.get(chain, ())
    ways = {rule.target.removeprefix(f"{rules.names.prefix}-") for rule in found}
    return "" if wanted in ways else f"no rule leads to {wanted}" if found else EMPTY


def _unreachable_chains(rules: IptablesRules, reached: set[str]) -> Iterator[Node]:
    """Chains of services that no service's tree has."""
    found = rules.unreachable_chains(reached)
    for chain in found[:_MAX_UNREACHABLE]:
        yield Node(NodeKind.CHAIN, _owner_text(rules, chain), chain.name, fault=UNREACHED)
    if len(found) > _MAX_UNREACHABLE:
        text = f"and {len(found) - _MAX_UNREACHABLE} more such chains"
        yield Node(NodeKind.RULE, text, fault=UNREACHED)


def _owner_text(rules: IptablesRules, chain: ChainId) -> str:
    owners = rules.owners(chain.name) if chain.table == "nat" else []
    return owners[0].service_port if owners else f"{chain.table}, nobody's"
