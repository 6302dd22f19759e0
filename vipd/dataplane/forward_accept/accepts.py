"""vipd's accept rules in foreign chains at the hook forward, as values: where, and which rules. Pure.

A forwarded packet passes every chain of that hook, and is dropped if one of them drops it, whatever
the others accept. So the accept is in each chain that would drop flows that vipd translated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vipd.dataplane.forward_accept.chain_verdicts import ForwardVerdict, NftForward
from vipd.dataplane.iptables.base_chains import accept_jump, accept_rules, kube_proxy_accept_rules
from vipd.dataplane.iptables.names import ChainId, Names, Rules
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.saved_rules import listed_policy, listed_rules
from vipd.dataplane.iptables.words import target_of
from vipd.dataplane.nftables.saved_table import rules_by_chain
from vipd.model.service import Family

FORWARD = "FORWARD"
NFT_FAMILIES = {Family.IPV4: "ip", Family.IPV6: "ip6"}
"""nft's words for the address families; tables of `inet` see both."""
_STEMS = {"ip": "iptables", "ip6": "ip6tables"}
_ACCEPT_TRANSLATED = "-m conntrack --ctstate DNAT -j ACCEPT"
_NO_ACCEPTS = {"", "DROP", "REJECT", "LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "DSCP", "TOS", "TTL", "HL"}
"""Targets of rules after which a flow is not accepted."""


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
        return f"{comment_start(self.prefix)}vipd translated flows"

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
        wanted = each.drops and each.forward_chain.serves(families)
        if wanted and not each.accepted and each.obstacle:
            problems.append(f"{each.forward_chain} drops flows that vipd translated: {each.obstacle}")
        elif wanted and not each.accepted:
            steps.append(AcceptStep(each, writes=True))
        elif each.present and not wanted:
            steps.append(AcceptStep(each, writes=False))
    return AcceptPlan(tuple(steps)), tuple(problems)


def found_in_iptables(
    place: ForwardChain, listed: str, own: Rules | None, options: AcceptOptions
) -> ForwardChainState:
    """FORWARD of an iptables variant, from the output of `-S FORWARD` and the rules of vipd's chain (None:
    there is none).

    Any foreign rule counts as one that may drop: so vipd's flows pass first, as with vipd's
    iptables dataplane, and changing the dataplane changes nothing for them.
    """
    names = Names(options.prefix)
    family = Family.IPV4 if place.family == "ip" else Family.IPV6
    wanted, jump = options.of_iptables(family)
    chain, rules = names.fixed(FORWARD), listed_rules(listed, FORWARD)
    ours = [names.owns(ChainId("filter", target_of(rule))) for rule in rules]
    jumps = [rule for rule in rules if target_of(rule) == chain]
    first = ours.index(False) if False in ours else len(rules)
    deleted = "".join(f"-D {FORWARD} {rule}\n" for rule in jumps)
    written = "".join(f"-A {chain} {rule}\n" for rule in wanted)
    declared = f":{chain} - [0:0]\n"
    return ForwardChainState(
        place,
        drops=listed_policy(listed, FORWARD) != "ACCEPT" or not all(ours),
        accepted=own == wanted and jumps == [jump] and jump in rules[:first],
        present=own is not None or bool(jumps),
        insert_text=f"*filter\n{declared}{written}{deleted}-I {FORWARD} 1 {jump}\nCOMMIT\n",
        delete_text=f"*filter\n{declared}{deleted}-X {chain}\nCOMMIT\n",
    )


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
    """A chain that nft writes, from the objects that `nft -j list table` prints of its table."""
    start = comment_start(options.prefix)
    others = [item for item in listed if not _is_ours(item, place, start)]
    handles = [item["rule"]["handle"] for item in listed if _is_ours(item, place, start)]
    comments = [item["rule"]["comment"] for item in listed if _is_ours(item, place, start)]
    rules = options.native()

    def forward_verdict(items: Sequence[Mapping[str, Any]]) -> ForwardVerdict:
        chain = NftForward(place.family, place.table, place.chain, policy, rules_by_chain(items))
        return chain.forward_verdict(options.flow_mark)

    deleted = "".join(f"delete rule {place.nft_words} handle {handle}\n" for handle in handles)
    inserted = "".join(f"insert rule {place.nft_words} {rule}\n" for rule in reversed(rules))
    return ForwardChainState(
        place,
        drops=forward_verdict(others) is not ForwardVerdict.PASSES,
        accepted=comments == [options.comment] * len(rules)
        and forward_verdict(listed) is ForwardVerdict.PASSES,
        present=bool(handles),
        insert_text=deleted + inserted,
        delete_text=deleted,
    )


def _is_ours(item: Mapping[str, Any], place: ForwardChain, start: str) -> bool:
    rule = item.get("rule", {})
    return rule.get("chain") == place.chain and str(rule.get("comment", "")).startswith(start)
