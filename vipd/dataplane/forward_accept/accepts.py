"""vipd's accept rules in foreign chains at the hook forward, as values: where, and which rules. Pure.

A forwarded packet passes every chain of that hook, and is dropped if one of them drops it, whatever
the others accept. So the accept is in each chain that would drop flows that vipd translated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vipd.dataplane.accept_order import Effect
from vipd.dataplane.iptables.base_chains import accept_jump, accept_rules, kube_proxy_accept_rules
from vipd.dataplane.iptables.foreign_rules import ForeignChains, effect_of, refusals_of
from vipd.dataplane.iptables.foreign_rules import accepts_translated as iptables_accepts_translated
from vipd.dataplane.iptables.jump_order import JumpNeighbours, JumpOrder
from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.saved_rules import listed_policy, listed_rules
from vipd.dataplane.iptables.words import target_of
from vipd.dataplane.refusals import Refusal
from vipd.model.service import Family

FORWARD = "FORWARD"
OTHER_TABLES = ("mangle", "security")
"""Tables of iptables with a chain FORWARD, besides filter."""
NFT_FAMILIES = {Family.IPV4: "ip", Family.IPV6: "ip6"}
"""nft's words for the address families; tables of `inet` see both."""
_STEMS = {"ip": "iptables", "ip6": "ip6tables"}
_ACCEPT_TRANSLATED = "-m conntrack --ctstate DNAT -j ACCEPT"
_NO_ACCEPTS = {"", "DROP", "REJECT", "LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "DSCP", "TOS", "TTL", "HL"}
"""Targets of rules after which a flow is not accepted."""
_COMMENT_END = "-FORWARD: vipd translated flows"
_TRANSLATED = {"ct": {"key": "status"}}
_ADVISED = [
    [{"match": {"op": op, "left": _TRANSLATED, "right": "dnat"}}, {"accept": None}] for op in ("in", "==")
]
"""`ct status dnat accept` in nft's JSON."""


@dataclass(frozen=True, slots=True)
class ForwardChain:
    """A base chain of the hook forward that is not vipd's."""

    family: str
    """`ip`, `ip6` or `inet`."""
    table: str
    chain: str
    variant: str = ""
    """`nft` or `legacy` for the chain FORWARD of iptables; empty for a chain that nft writes."""

    @classmethod
    def of_iptables(cls, family: Family, variant: str, table: str = "filter") -> ForwardChain:
        """FORWARD of an iptables variant."""
        return cls(NFT_FAMILIES[family], table, FORWARD, variant)

    @property
    def writable(self) -> bool:
        """Whether vipd may write its accept there. It does not in tables of iptables other than filter:
        other programs do not accept there either."""
        return not self.variant or self.table == "filter"

    @property
    def program(self) -> str:
        """`iptables-nft` and the like; `nft` for all other chains."""
        return f"{_STEMS[self.family]}-{self.variant}" if self.variant else "nft"

    @property
    def nft_words(self) -> str:
        """The chain as nft commands name it: `inet filter forward`."""
        return f"{self.family} {self.table} {self.chain}"

    def serves(self, families: Collection[Family]) -> bool:
        """Whether packets of one of these families pass here."""
        return any(self.family in ("inet", NFT_FAMILIES[family]) for family in families)

    def __str__(self) -> str:
        if self.variant:
            table = "" if self.writable else f"-t {self.table}, "
            return f"chain {self.chain} of {table}{self.program}"
        return f"chain {self.chain} of table {self.family} {self.table}"


@dataclass(frozen=True, slots=True)
class ForwardChainState:
    """Current state of one such chain."""

    forward_chain: ForwardChain
    drops: bool
    """Without vipd's rules, flows that vipd translated are dropped there, or may be."""
    accepted: bool = False
    """vipd's rules are there, and have their effect."""
    present: bool = False
    """Something of vipd's is there."""
    insert_text: str = ""
    """Input for `place.program` that replaces vipd's rules there."""
    delete_text: str = ""
    """The input that deletes them."""
    obstacle: str = ""
    """Why they cannot be written."""
    managed: bool = False
    """The dataplane in use writes its own accept there."""
    in_place: bool = True
    """The jump to vipd's chain is there, and need not move."""
    refusals: tuple[Refusal, ...] = ()
    """Rules of others that may refuse translated flows before vipd's accept sees them."""
    called: frozenset[str] = frozenset()
    """Chains of iptables that were read for that."""
    denials: tuple[Refusal, ...] = ()
    """What ufw denies to this host itself, as it was told: it does not see translated flows."""


@dataclass(frozen=True, slots=True)
class AcceptStep:
    """One chain's rules to be written or deleted."""

    found: ForwardChainState
    writes: bool

    def __str__(self) -> str:
        sign = "+" if self.writes else "-"
        return f"{sign} {self.found.forward_chain}: accept flows that vipd translated"


@dataclass(frozen=True, slots=True)
class AcceptPlan:
    """Steps to run. False when the kernel is as wanted."""

    steps: tuple[AcceptStep, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __str__(self) -> str:
        return "".join(f"{step}\n" for step in self.steps)


@dataclass(frozen=True, slots=True)
class AcceptOptions:
    """Everything that shapes the rules."""

    prefix: str
    mark: int
    flow_mark: int
    first: bool = False
    """Before any rule of another program."""
    kube_proxy: bool = False
    """Accept what kube-proxy accepts, too: flows translated by its exact rules have no mark."""

    def native(self) -> tuple[str, ...]:
        """The rules in nft syntax."""
        flow, mark, said = self.flow_mark, self.mark, f'accept comment "{self.comment}"'
        ours = f"ct mark & {flow:#x} == {flow:#x} ct status dnat {said}"
        if not self.kube_proxy:
            return (ours,)
        return ours, f"meta mark & {mark:#x} == {mark:#x} {said}", f"ct state established,related {said}"

    @property
    def comment(self) -> str:
        """Identifies the rules of a prefix in foreign tables."""
        return f"{self.prefix}{_COMMENT_END}"

    def of_iptables(self, family: Family) -> tuple[Rules, str]:
        """The rules of the chain `PREFIX-FORWARD`, and the jump to it."""
        options = RuleOptions(family, self.prefix, self.mark, self.flow_mark)
        more = kube_proxy_accept_rules(options) if self.kube_proxy else ()
        return (*accept_rules(options), *more), accept_jump(options)


def comment_start(prefix: str) -> str:
    """The start of the comments of a prefix."""
    return f"{prefix}-FORWARD: "


def make_plan(
    found: Collection[ForwardChainState], families: Collection[Family]
) -> tuple[AcceptPlan, tuple[str, ...]]:
    """The changes that let translated flows of these families pass, and the obstacles to
    them."""
    steps, problems = [], []
    for each in found:
        if each.managed:
            continue
        wanted = each.drops and each.forward_chain.serves(families)
        if wanted and not each.accepted and each.obstacle:
            problems.append(f"{each.forward_chain} drops flows that vipd translated: {each.obstacle}")
        elif wanted and not each.accepted:
            steps.append(AcceptStep(each, writes=True))
        elif each.present and not wanted:
            steps.append(AcceptStep(each, writes=False))
    return AcceptPlan(tuple(steps)), tuple(problems)


def found_in_iptables(
    place: ForwardChain,
    listed: str,
    own: Rules | None,
    options: AcceptOptions,
    called: ForeignChains = MappingProxyType({}),
    neighbours: JumpNeighbours | None = None,
) -> ForwardChainState:
    """FORWARD of an iptables variant, from the output of `-S FORWARD`, the rules of vipd's chain (None: there
    is none), and those of other programs' chains that it calls. `neighbours` of its jumps are updated."""
    names = Names(options.prefix)
    family = Family.IPV4 if place.family == "ip" else Family.IPV6
    builtin = ChainId("filter", FORWARD)
    order = JumpOrder(
        names, called, {} if neighbours is None else neighbours, {builtin} if options.first else ()
    )
    wanted, jump = options.of_iptables(family)
    chain, rules = names.fixed(FORWARD), listed_rules(listed, FORWARD)
    order.note(builtin, rules)
    jumps = [rule for rule in rules if target_of(rule) == chain]
    others = (rule for rule in rules if order.owns(builtin, rule) and rule not in jumps)
    lines = order.arranged(builtin, rules, (*dict.fromkeys(others), jump)).lines
    effects = [effect_of(rule, called) for rule in rules if not order.owns(builtin, rule)]
    closing = (
        {Effect.FILTERS, Effect.CLOSES, Effect.ISOLATES}
        if options.first
        else {
            Effect.CLOSES,
            Effect.ISOLATES,
        }
    )
    written = "".join(f"-A {chain} {rule}\n" for rule in wanted)
    declared = f":{chain} - [0:0]\n"
    deleted = "".join(f"-D {FORWARD} {rule}\n" for rule in jumps)
    inserted = "".join(f"{line}\n" for line in lines)
    return ForwardChainState(
        place,
        drops=listed_policy(listed, FORWARD) != "ACCEPT" or not closing.isdisjoint(effects),
        accepted=own == wanted and not lines,
        present=own is not None or bool(jumps),
        in_place=not lines,
        insert_text=f"*filter\n{declared}{written}{inserted}COMMIT\n",
        delete_text=f"*filter\n{declared}{deleted}-X {chain}\nCOMMIT\n",
        refusals=tuple(_refusals_in_iptables(rules, chain, called, order)),
        called=frozenset(called),
    )


def _refusals_in_iptables(
    rules: Rules, own_chain: str, called: ForeignChains, order: JumpOrder
) -> Iterator[Refusal]:
    for rule in rules:
        if target_of(rule) == own_chain or iptables_accepts_translated(rule):
            return
        if not order.owns(ChainId("filter", FORWARD), rule):
            yield from refusals_of(rule, FORWARD, called)


def found_in_other_table(place: ForwardChain, listed: str) -> ForwardChainState:
    """FORWARD of iptables' table mangle or security, from the output of `-S FORWARD`. It counts as dropping
    only if no rule can accept a flow that vipd translated: a chain of another program may."""
    rules = [rule for rule in listed_rules(listed, FORWARD) if "RELATED,ESTABLISHED" not in rule]
    drops = listed_policy(listed, FORWARD) == "DROP" and all(target_of(rule) in _NO_ACCEPTS for rule in rules)
    written = f"{place.program} -t {place.table} -I {FORWARD} {_ACCEPT_TRANSLATED}"
    return ForwardChainState(place, drops, obstacle=f"vipd writes no rules into this table; hint: {written}")


def found_by_nft(
    place: ForwardChain, policy: str, listed: Sequence[Mapping[str, Any]], options: AcceptOptions
) -> ForwardChainState:
    """A chain that nft writes, from the objects that `nft -j list table` prints of its table.

    Rules of others are not interpreted: vipd's accept stands behind all of them, in place of the policy or of
    a last rule that refuses everything, or before all of them.
    """
    rules = rules_of(listed, place.chain)
    own = {at: rule for at, rule in enumerate(rules) if is_ours(rule, options.prefix)}
    others = [at for at, rule in enumerate(rules) if not _is_of_vipd(rule)]
    last = others.pop() if others and not options.first and _refuses_everything(rules[others[-1]]) else None
    drops = (policy == "drop" or last is not None) and not any(map(accepts_translated, rules))
    deleted = "".join(f"delete rule {place.nft_words} handle {rule['handle']}\n" for rule in own.values())
    if options.first:
        drops = drops or bool(others)
        in_place = all(mine < other for mine in own for other in others)
        inserted = [f"insert rule {place.nft_words} {rule}\n" for rule in reversed(options.native())]
    else:
        end = len(rules) if last is None else last
        in_place = all(other < mine < end for mine in own for other in (-1, *others))
        verb = f"add rule {place.nft_words}"
        if last is not None:
            verb = f"insert rule {place.nft_words} handle {rules[last]['handle']}"  # before that one
        inserted = [f"{verb} {rule}\n" for rule in options.native()]
    comments = [rule["comment"] for rule in own.values()]
    return ForwardChainState(
        place,
        drops=drops,
        accepted=comments == [options.comment] * len(options.native()) and in_place,
        present=bool(own),
        insert_text=deleted + "".join(inserted),
        delete_text=deleted,
    )


def rules_of(listed: Iterable[Mapping[str, Any]], chain: str) -> list[Mapping[str, Any]]:
    """The rules of a chain among the objects that `nft -j` prints. Raises KeyError and TypeError."""
    return [item["rule"] for item in listed if "rule" in item and item["rule"]["chain"] == chain]


def is_ours(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether it is an accept of a vipd with this prefix."""
    return str(rule.get("comment", "")).startswith(comment_start(prefix))


def _is_of_vipd(rule: Mapping[str, Any]) -> bool:
    """Whether it is an accept of any vipd: two of them must not move their rules behind each other's."""
    return str(rule.get("comment", "")).endswith(_COMMENT_END)


def accepts_translated(rule: Mapping[str, Any]) -> bool:
    """Whether it is the rule `ct status dnat accept`, as an administrator is advised to write it."""
    return [statement for statement in rule["expr"] if "counter" not in statement] in _ADVISED


def _refuses_everything(rule: Mapping[str, Any]) -> bool:
    """Whether it is a `drop` or `reject` without a condition, such as stands at the end of many chains."""
    *others, verdict = [next(iter(statement)) for statement in rule["expr"]] or [""]
    return verdict in ("drop", "reject") and set(others) <= {"counter", "log"}
