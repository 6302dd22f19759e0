"""The outcome of a traced packet, and whether it is the predicted one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from vipd.model.service import socket_text
from vipd.observe.live_trace.events import TraceVerdict
from vipd.observe.live_trace.matched_rules import MatchedRule
from vipd.observe.live_trace.matching import BUILT_IN, table_of
from vipd.observe.live_trace.packet_trace import PacketTrace

Json = Mapping[str, Any]
"""An explanation in the form that docs/api.md describes."""

MAX_NAMED = 4
"""More backends are not listed."""

_SOURCE_CHANGES = ("MASQUERADE", "SNAT")


class FinalVerdict(StrEnum):
    """The outcome of a packet; all but LOST have the names of `explain`."""

    DELIVERED = "delivered"
    """Sent on to another destination than it named."""
    UNCHANGED = "unchanged"
    REJECTED = "rejected"
    DROPPED = "dropped"
    LOST = "lost"
    """It was not observed to leave, and no rule dropped it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a packet."""

    verdict: FinalVerdict
    destination: str
    """`ip:port` that it had in the end."""
    source: str
    """Its final source address."""
    masqueraded: bool
    decided_by: MatchedRule | None
    """The rule that translated, refused or dropped it, if known."""
    unread: bool = False
    """Some rules could not be read: whether one of them refuses, drops, or masquerades without a change of
    the source, is unknown."""

    def __str__(self) -> str:
        match self.verdict:
            case FinalVerdict.DELIVERED:
                return f"goes to {self.destination}, {masquerade_words(self.masqueraded)}"
            case FinalVerdict.UNCHANGED:
                return "goes on unchanged" + (", masqueraded" if self.masqueraded else "")
            case FinalVerdict.REJECTED:
                return "is refused"
            case FinalVerdict.DROPPED:
                return "is dropped"
            case FinalVerdict.LOST:
                return "is lost, by no rule: a route, or a reverse path filter"


class Difference(NamedTuple):
    """A field of the outcome that is not as predicted."""

    field: str
    """`verdict`, `backend`, `masqueraded` or `chain`."""
    found: str
    """The kernel's."""
    predicted: str
    """That of `explain`; several with commas."""

    def __str__(self) -> str:
        return f"{self.field}: {self.found} in the kernel, {self.predicted} in explain"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A packet's outcome beside its prediction."""

    differences: tuple[Difference, ...]
    """Empty when they agree."""
    share: float | None
    """The predicted part of such flows, 0..1, with this outcome; None if there was none."""
    predicted: str
    """Every predicted way, in words."""


def masquerade_words(masqueraded: bool) -> str:
    """In the words of `explain`."""
    return "masqueraded" if masqueraded else "not masqueraded"


def outcome_of(trace: PacketTrace, rules: Sequence[MatchedRule]) -> Outcome:
    """The outcome of a packet that matched these rules."""
    end = trace.end
    changed = end.source != trace.start.source or any(rule.target in _SOURCE_CHANGES for rule in rules)
    dropper = next((rule for rule in rules if rule.verdict is TraceVerdict.DROP), None)
    if dropper is not None and not trace.passed:
        verdict = FinalVerdict.REJECTED if dropper.target == "REJECT" else FinalVerdict.DROPPED
        return Outcome(verdict, end.receiver, end.source, changed, dropper, not dropper.rule)
    unread = any(not rule.rule for rule in rules)
    if not trace.passed:
        return Outcome(FinalVerdict.LOST, end.receiver, end.source, changed, rules[-1] if rules else None)
    verdict = FinalVerdict.DELIVERED if trace.translated else FinalVerdict.UNCHANGED
    return Outcome(verdict, end.receiver, end.source, changed, _translator(trace, rules), unread)


def compare(outcome: Outcome, rules: Sequence[MatchedRule], explanation: Json) -> Comparison:
    """Compares the outcome with the API's explanation of the same packet.

    Of vipd's own chains those that the packet passed are compared, too, if any were observed.
    """
    predicted: Sequence[Json] = explanation["outcomes"]
    words = predicted_words(explanation)
    same = [each for each in predicted if _agrees(outcome, each)]
    if not same:
        return Comparison((_difference(outcome, predicted),), None, words)
    share = sum(float(each["probability"]) for each in same)
    walked = list(_visited_chains(rules))
    planned = [list(_expected_chains(each["rules"])) for each in same]
    if any(not rule.role and rule.target in ("ACCEPT", *_SOURCE_CHANGES) for rule in rules):
        # Rules of others stay before vipd's jumps: what they decide passes over some of its chains.
        planned = [[chain for chain in way if chain in walked] for way in planned]
    if walked in planned or not _comparable(walked, planned[0]):
        return Comparison((), share, words)
    return Comparison((_chain_difference(planned[0], walked),), share, words)


def _difference(outcome: Outcome, predicted: Sequence[Json]) -> Difference:
    """The first field in which an outcome differs from each prediction that agreed so far."""
    same = [each for each in predicted if each["verdict"] == outcome.verdict]
    if not same:
        return Difference("verdict", str(outcome.verdict), _distinct(each["verdict"] for each in predicted))
    near = [each for each in same if each["backend"] == outcome.destination]
    if outcome.verdict is FinalVerdict.DELIVERED and not near:
        return Difference("backend", outcome.destination, _distinct(each["backend"] for each in same))
    wanted = (masquerade_words(bool(each["masqueraded"])) for each in near or same)
    return Difference("masqueraded", masquerade_words(outcome.masqueraded), _distinct(wanted))


def _distinct(values: Iterable[object]) -> str:
    """Some different values, in their order."""
    found = list(dict.fromkeys(map(str, values)))
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more if found else "nothing"


def _agrees(outcome: Outcome, predicted: Json) -> bool:
    ended = (FinalVerdict.REJECTED, FinalVerdict.DROPPED)
    if outcome.unread and outcome.verdict in ended and predicted["verdict"] in ended:
        return True
    if outcome.verdict != predicted["verdict"]:
        return False
    if outcome.verdict is FinalVerdict.DELIVERED and outcome.destination != predicted["backend"]:
        return False
    unsure = outcome.verdict in ended or (outcome.unread and not outcome.masqueraded)
    return unsure or outcome.masqueraded is bool(predicted["masqueraded"])


def predicted_words(explanation: Json) -> str:
    """The predicted outcome of the packet, with some of the backends."""
    packet = explanation["packet"]
    place = (
        f"{packet['source']} -> {socket_text(packet['destination'], packet['port'])}/{packet['protocol']} "
    )
    summary = str(explanation["summary"]).removeprefix(place)
    backends = [backend["endpoint"] for backend in explanation["backends"]]
    if len(backends) < 2:
        return summary
    more = f" and {len(backends) - MAX_NAMED} more" if len(backends) > MAX_NAMED else ""
    return f"{summary}: {', '.join(backends[:MAX_NAMED])}{more}"


def _translator(trace: PacketTrace, rules: Sequence[MatchedRule]) -> MatchedRule | None:
    """The last rule that saw the packet with its first destination."""
    if not trace.translated:
        return None
    untouched = [rule for rule in rules if rule.destination == trace.start.receiver]
    return untouched[-1] if untouched else None


def _visited_chains(rules: Sequence[MatchedRule]) -> Iterator[str]:
    """vipd's chains, as `table CHAIN`, in which it matched rules; a group counts as its dispatch chain."""
    roots: dict[tuple[str, str], str] = {}
    last = ""
    for rule in rules:
        table, name = table_of(rule.chain), rule.chain.name
        if not rule.role:
            continue  # a chain of others, or a built-in one
        root = roots.get((table, name), name)
        if "-GRP-" in rule.jump_target:
            # An explanation has too few services for groups.
            roots[table, rule.jump_target] = root
            continue
        if (place := f"{table} {root}") != last:
            yield place
        last = place


def _expected_chains(rules: Sequence[Json]) -> Iterator[str]:
    last = ""
    for rule in rules:
        place = f"{rule['table']} {rule['chain']}"
        if rule["chain"] not in BUILT_IN and place != last:
            yield place
            last = place


def _comparable(walked: Sequence[str], planned: Sequence[str]) -> bool:
    """Both are of the same dataplane, and at least one chain was observed."""
    nft = [any(place.count(" ") > 1 for place in way) for way in (walked, planned)]
    return bool(walked) and nft[0] is nft[1]


def _chain_difference(planned: Sequence[str], walked: Sequence[str]) -> Difference:
    """The first chain at which two different ways part."""
    for number in range(max(len(planned), len(walked))):
        wanted, found = (way[number] if number < len(way) else "no more chain" for way in (planned, walked))
        if wanted != found:
            return Difference("chain", found, wanted)
    raise ValueError("the ways are the same")
