"""Iptables rules of other programs: which of them may refuse translated flows, and which flows. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from vipd.dataplane.accept_order import Effect, effect_of_call
from vipd.dataplane.iptables.names import Rules
from vipd.dataplane.iptables.words import split_words, target_of
from vipd.dataplane.refusals import MAX_REFUSALS, Refusal, Scope, network

UNREADABLE: Rules = ("(unreadable)",)
"""Placeholder for rules that iptables cannot show. Differs from all wanted rules; one of others filters."""

ForeignChains = Mapping[str, Rules]
"""The rules of chains that other programs made, as far as they are known."""

_PASSING = frozenset(
    (
        *("", "ACCEPT", "LOG", "NFLOG", "ULOG", "MARK", "CONNMARK", "TCPMSS", "DSCP", "TOS", "TTL", "HL"),
        *("CLASSIFY", "CT", "NOTRACK", "TRACE", "SET", "SECMARK", "CONNSECMARK", "AUDIT", "CHECKSUM", "TEE"),
        *("RATEEST", "HMARK", "TCPOPTSTRIP", "LED", "FLOWOFFLOAD", "ECN"),
    )
)
"""Targets that refuse nothing."""
_REFUSING = frozenset({"DROP", "REJECT", "TARPIT"})
_ISOLATING = re.compile(r"DOCKER(?!-USER$)|LIBVIRT_|NETAVARK|CNI-")
"""Chains of Docker, libvirt, Podman and CNI; DOCKER-USER is the administrator's."""
_POLICY_OF_UFW = re.compile(r"ufw6?-(after-logging|reject|track)-(input|forward)$")
"""The chains that ufw calls behind all of its rules: they log what the policy drops, or refuse it."""
UFW_USER_INPUT = ("ufw-user-input", "ufw6-user-input")
"""ufw's chains with the rules of `ufw allow` and `ufw deny`, for packets to this host itself."""
_MAX_DEPTH = 8
"""Jumps within jumps that are followed; iptables allows more, which are not known to refuse nothing."""


def effect_of(rule: str, chains: ForeignChains, depth: int = 0) -> Effect:
    """The effect of another program's rule. What is not understood filters."""
    target, conditions = target_of(rule), _conditions(rule)
    if target in _PASSING and rule not in UNREADABLE:
        return Effect.PASSES
    if isolates(target):
        return Effect.ISOLATES
    if _POLICY_OF_UFW.match(target) or refuses(rule) or target == "RETURN":
        return _closing(conditions)
    if depth >= _MAX_DEPTH or target not in chains:  # or it is UNREADABLE
        return Effect.FILTERS
    inner = [(effect_of(each, chains, depth + 1), target_of(each) == "RETURN") for each in chains[target]]
    effect = effect_of_call(inner)
    return Effect.FILTERS if effect is Effect.CLOSES and conditions else effect


def _closing(conditions: Sequence[str]) -> Effect:
    """The effect of a rule that refuses under these conditions."""
    match conditions:
        case []:
            return Effect.CLOSES
        case ["-m", "conntrack" | "state", "--ctstate" | "--state", states] if "NEW" in states.split(","):
            return Effect.CLOSES
        case ["-p", _] | ["-p", _, "-m", _]:
            return Effect.CLOSES_PARTLY
    return Effect.FILTERS


def may_be_chain(target: str) -> bool:
    """Whether a target may be a chain, and not one of the kernel's targets."""
    return target not in _PASSING and target not in _REFUSING and target != "RETURN"


def isolates(target: str) -> bool:
    """Whether a target is a chain by which a program isolates its containers or virtual machines."""
    return _ISOLATING.match(target) is not None


def refuses(rule: str) -> bool:
    """Whether the target of a rule is a refusal."""
    return target_of(rule) in _REFUSING


def refusals_of(
    rule: str, chain: str, chains: ForeignChains, scopes: tuple[Scope, ...] = ()
) -> Iterator[Refusal]:
    """The rules that refuse: this one, or those in the chain that it jumps to. Of a long list the first ones.

    `scopes`: the conditions of the jumps to its chain.
    """
    target = target_of(rule)
    scopes = (*scopes, scope_of(rule))
    if target in chains and len(scopes) <= _MAX_DEPTH:
        for number, inner in enumerate(chains[target]):
            if number >= MAX_REFUSALS:
                return
            yield from refusals_of(inner, target, chains, scopes)
    elif target not in _PASSING and target != "RETURN":
        yield Refusal(chain, rule, scopes)


def accepts_translated(rule: str) -> bool:
    """Whether a rule accepts every flow that somebody translated, as firewalld's does."""
    match _conditions(rule):
        case ["-m", "conntrack", "--ctstate", states]:
            return target_of(rule) == "ACCEPT" and "DNAT" in states.split(",")
        case conditions:
            return target_of(rule) == "ACCEPT" and not conditions


def scope_of(rule: str) -> Scope:
    """The conditions of a rule. One that is not understood does not count."""
    conditions = _conditions(rule)
    values: dict[str, str] = {
        option: value
        for before, option, value in zip(["", *conditions], conditions, conditions[1:], strict=False)
        if before != "!"
    }
    ports = values.get("--dport") or values.get("--dports")
    protocol, states = values.get("-p"), values.get("--ctstate", values.get("--state"))
    return Scope(
        sources=network(values["-s"]) if "-s" in values else None,
        destinations=network(values["-d"]) if "-d" in values else None,
        original=network(values["--ctorigdst"]) if "--ctorigdst" in values else None,
        protocols=frozenset({protocol}) if protocol and protocol.isalpha() else None,
        ports=_ports(ports) if ports else None,
        only_invalid=states == "INVALID",
    )


def _ports(text: str) -> tuple[tuple[int, int], ...] | None:
    found = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        if not (first.isdigit() and (not last or last.isdigit())):
            return None
        found.append((int(first), int(last or first)))
    return tuple(found)


def _conditions(rule: str) -> list[str]:
    """The words before the target, without the comment. Of a rule that cannot be split: one unknown word."""
    try:
        words = split_words(rule)
    except ValueError:
        return ["?"]
    end = next((index for index, word in enumerate(words) if word in ("-j", "-g")), len(words))
    kept: list[str] = []
    index = 0
    while index < end:
        if words[index : index + 3 : 2] == ["-m", "--comment"] and words[index + 1] == "comment":
            index += 4
        else:
            kept.append(words[index])
            index += 1
    return kept
