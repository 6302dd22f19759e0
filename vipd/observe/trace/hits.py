"""A journey as the rules that the packet hit, each in words. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from ipaddress import ip_network
from itertools import pairwise
from typing import Protocol

from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.words import split_words, target_of
from vipd.dataplane.nftables.chains import limits_sources
from vipd.dataplane.nftables.options import table_name
from vipd.observe.reasons import meaning
from vipd.observe.trace.events import Chain, Event, Kind, Verdict
from vipd.observe.trace.journey import Journey, Moment
from vipd.observe.tracer import Step

UNREADABLE = "a rule that cannot be read"
"""What is said of a rule whose chain no tool could show."""

IPTABLES = frozenset({"raw", "mangle", "nat", "filter", "security"})
"""Tables of iptables."""

_PARTS = {
    "SERVICES": "dispatch",
    "GRP": "dispatch",
    "PREROUTING": "entry",
    "POSTROUTING": "postrouting",
    "NODEPORTS": "node ports",
    "MARK-MASQ": "mark",
    "MARK-OFF-CLUSTER": "mark",
    "EXTERNAL-SERVICES": "from outside",
    "PROXY-FIREWALL": "source limits",
    "UNUSED": "unused ports",
    "FORWARD": "forwarding",
    "FIREWALL": "firewall",
    "PROBE": "probe",
    "SVC": "service",
    "SVL": "local policy",
    "EXT": "from outside",
    "FW": "source limits",
    "SEP": "backend",
}
_NFT_PARTS = {
    "prerouting": "entry",
    "output": "entry",
    "input": "entry",
    "dispatch": "dispatch",
    "handover": "dispatch",
    "unused": "unused ports",
    "counting": "counters",
    "postrouting": "postrouting",
    "refuse": "refusal",
    "silence": "refusal",
    "silence-reset": "refusal",
    "removed": "refusal",
    "node-removed": "refusal",
}
_QUOTED = re.compile(r'"[^"]*"')
_NFT_TARGETS = {
    "MASQUERADE": re.compile(r"(?<!jump )(?<!goto )(?<!\S)masquerade(?!\S)"),
    # `ct status snat` is a condition: the statement says to what.
    "SNAT": re.compile(r"(?<!jump )(?<!goto )(?<!\S)snat (?:[\w.]+ )*to "),
    "REJECT": re.compile(r"(?<!jump )(?<!goto )(?<!\S)reject(?!\S)"),
}
_XT_TARGET = re.compile(r'\bxt target "(\w+)"')
"""How nft shows a target of iptables that it cannot say in its own words."""
_DRAWN = re.compile(r"\bip6? daddr set (?:numgen|jhash)\b")
_LIMIT = re.compile(r"vmap @allowed_(\d+)")
_COMMENT = re.compile(r' comment "[^"]*"$')
_SERVICE = re.compile(
    r"(?P<name>\S+) (?:->.*|cluster IP|external IP|loadbalancer IP|has no .*|traffic not accepted by .*)"
)


class Listed(Protocol):
    """What is known of a chain; see `rules.ChainRules`."""

    @property
    def rules(self) -> Mapping[int, str]:
        """Text by handle or number."""

    @property
    def policy(self) -> str:
        """Of a legacy chain."""

    @property
    def iptables(self) -> bool:
        """The text is iptables'."""

    @property
    def ours(self) -> bool:
        """It is a chain of the nftables dataplane."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One rule that the packet hit, or a policy that let it go no further."""

    chain: Chain
    part: str
    """What the chain is for; empty for a chain that is not vipd's."""
    rule: str
    """The rule's text, or `policy DROP`; empty when it cannot be read, or is gone."""
    target: str
    """iptables' word for what the rule does (`MASQUERADE`, `REJECT`), or the chain that it leads to. For a
    rule of nft only where it changes the source or refuses. Empty when it is not known."""
    does: str
    ours: bool
    """It is vipd's."""
    verdict: Verdict
    leads: str
    """The chain that it leads to, if any."""
    destination: str
    """`ip:port` that the packet had for its destination then."""
    mark: int | None = None
    """The packet's mark, where this has changed it."""


def table_of(chain: Chain) -> str:
    """The table as `explain` names it: `nat` for iptables', `ip vipd` for nft's."""
    return chain.table if chain.legacy or _is_iptables(chain) else f"{chain.family} {chain.table}"


def hits_of(
    journey: Journey, listed: Mapping[Chain, Listed], prefix: str, service_port: str = ""
) -> tuple[Hit, ...]:
    """The rules hit, in order; policies only where they drop.

    `prefix` is that of vipd's chains: others of the same form are a kube-proxy's, or another vipd's.
    `service_port` is that of the packet's first destination, if it is known: maps do not name it.
    """
    names = Names(prefix)
    moments = tuple(_with_kind(moment, listed.get(moment.event.chain)) for moment in journey.moments)
    told = [moment for moment in moments if _tells(moment, moments, listed, journey.passed)]
    passed = frozenset(moment.event.chain for moment in moments)
    before, found = journey.mark, []
    for number, moment in enumerate(told):
        after = _mark_after(told, number)
        known = listed.get(moment.event.chain)
        if known is not None and not known.iptables:
            found.append(_table_hit(moment, known, prefix, service_port))
        else:
            found.append(_iptables_hit(moment, known, passed, names))
        if after != before:
            found[-1] = replace(found[-1], mark=after)
        before = after
    return tuple(found)


def chains_of(journey: Journey) -> set[Chain]:
    """The chains to list, so that every hit has its text."""
    events = (moment.event for moment in journey.moments)
    return {event.chain for event in events if event.kind is not Kind.RETURN or event.chain.legacy}


def _with_kind(moment: Moment, listed: Listed | None) -> Moment:
    """Legacy iptables takes some rules for the ends of their chains; their numbers tell them."""
    event = moment.event
    if not event.chain.legacy or listed is None or event.rule not in listed.rules:
        return moment
    return Moment(event._replace(kind=Kind.RULE), moment.headers)


def _tells(moment: Moment, moments: tuple[Moment, ...], listed: Mapping[Chain, Listed], passed: bool) -> bool:
    event = moment.event
    if event.kind is not Kind.POLICY:
        return event.kind is Kind.RULE
    if event.chain.legacy:
        # Legacy iptables does not say what a policy is; but it is the last thing that a packet meets.
        known = listed.get(event.chain)
        return not passed and moment is moments[-1] and known is not None and known.policy == "DROP"
    return event.verdict is Verdict.DROP


def _mark_after(told: list[Moment], number: int) -> int:
    """Legacy iptables says the mark before a rule, so that after it is told by the next one."""
    event = told[number].event
    if event.chain.legacy and number + 1 < len(told):
        return told[number + 1].event.mark
    return event.mark


def _table_hit(moment: Moment, listed: Listed, prefix: str, service_port: str) -> Hit:
    """A rule that nft has listed."""
    event, chain = moment.event, moment.event.chain
    rule = _COMMENT.sub("", _text(event, listed))
    ours = listed.ours and chain.table == table_name(prefix)
    does = _nft_meaning(rule, moment, service_port) if ours else rule
    part, target = _nft_part(chain.name) if ours else "", _nft_target(rule)
    return Hit(chain, part, rule, target, does, ours, event.verdict, event.leads, moment.headers.receiver)


def _nft_target(rule: str) -> str:
    if xt := _XT_TARGET.search(rule):
        return xt[1]
    plain = _QUOTED.sub('""', rule)
    return next((target for target, form in _NFT_TARGETS.items() if form.search(plain)), "")


def _iptables_hit(moment: Moment, listed: Listed | None, passed: Collection[Chain], names: Names) -> Hit:
    """A rule that iptables has listed."""
    event, chain = moment.event, moment.event.chain
    rule = _text(event, listed)
    target = target_of(rule)
    leads, verdict = event.leads, event.verdict
    if chain.legacy:
        # Every chain that a packet enters is heard of; all other names are targets.
        leads = target if chain._replace(name=target) in passed else ""
        verdict = _legacy_verdict(target, event)
    part = _part(chain, listed, names)
    ours = bool(part) or names.owns(ChainId(chain.table, leads))
    does = _iptables_meaning(chain, rule) if ours and rule else rule
    if listed is None and not rule:
        does = UNREADABLE
    return Hit(chain, part, rule, target, does, ours, verdict, leads, moment.headers.receiver)


def _text(event: Event, listed: Listed | None) -> str:
    if event.kind is Kind.POLICY:
        return "policy DROP"
    return listed.rules.get(event.rule, "") if listed else ""


def _legacy_verdict(target: str, event: Event) -> Verdict:
    if event.kind is Kind.POLICY or target in ("DROP", "REJECT"):
        return Verdict.DROP
    return Verdict.ACCEPT if target in ("ACCEPT", "DNAT", "SNAT", "MASQUERADE") else event.verdict


def _is_iptables(chain: Chain) -> bool:
    """Its name is that of one of iptables' tables; nft users may have such, too, and then it does no harm."""
    return chain.table in IPTABLES and chain.family in ("ip", "ip6")


def _part(chain: Chain, listed: Listed | None, names: Names) -> str:
    """What one of vipd's chains is for, with the service or backend that is meant; else empty."""
    here = ChainId(chain.table, chain.name)
    if not names.owns(here):
        return ""
    kind = chain.name.removeprefix(f"{names.prefix}-")
    if names.is_fixed(here):
        return _PARTS[kind]
    kind = kind.partition("-")[0]
    about = _backend(listed) if kind == "SEP" else _service(listed) if kind != "GRP" else ""
    return f"{_PARTS[kind]} {about}".rstrip()


def _service(listed: Listed | None) -> str:
    """The service that the rules of a chain are for, by their comments."""
    comments = (_comment(rule) for rule in (listed.rules.values() if listed else ()))
    return next((found["name"] for comment in comments if (found := _SERVICE.fullmatch(comment))), "")


def _backend(listed: Listed | None) -> str:
    targets = (rule.partition(" --to-destination ")[2] for rule in (listed.rules.values() if listed else ()))
    return next((target.partition(" ")[0] for target in targets if target), "")


def _comment(rule: str) -> str:
    try:
        words = split_words(rule)
    except ValueError:
        return ""
    return next((after for word, after in pairwise(words) if word == "--comment"), "")


def _iptables_meaning(chain: Chain, rule: str) -> str:
    told = meaning(Step(chain.table, chain.name, f"-A {chain.name} {rule}", _comment(rule)))
    return f"{told}, kept for this client" if " --rcheck " in rule else told


def _nft_part(name: str) -> str:
    if name in _NFT_PARTS:
        return _NFT_PARTS[name]
    if limits_sources(name):
        return "source limits"
    if name.startswith(("gate-", "edge-")):
        return {"gate": "node port", "edge": "from outside"}[name.partition("-")[0]]
    return (
        "masquerade" if name.startswith(("always-", "forwarded-", "off-cluster-", "hairpin-")) else "backends"
    )


def _nft_meaning(rule: str, moment: Moment, service_port: str) -> str:
    """What a rule of the nftables dataplane does. The kernel does not say which element of a map it found:
    where the packet goes tells it."""
    chain = moment.event.chain
    if _DRAWN.search(rule) and " map @" not in rule:
        return "a slot is chosen"
    element = _element(rule, moment)
    return meaning(Step(f"{chain.family} {chain.table}", chain.name, rule, element=element), service_port)


def _element(rule: str, moment: Moment) -> str:
    """What a rule must have found in a map or set, as far as the packet tells."""
    headers, limit = moment.headers, _LIMIT.search(rule)
    if "map @frontends" in rule:
        return f"{headers.destination} . {headers.protocol} . {headers.port}"
    if "vmap @handlers" in rule:
        return f"goto {moment.event.leads}"
    if limit:
        return str(ip_network(f"{headers.source}/{limit[1]}", strict=False).network_address)
    if "vmap @" in rule:
        return f"{headers.protocol} . {headers.port}"
    return "" if " map @" in rule else headers.destination
