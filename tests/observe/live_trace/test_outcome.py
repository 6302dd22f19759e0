"""TraceAssembler told in words, and held against a prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.observe.live_trace.recorded import traces
from vipd.model.service import socket_text
from vipd.observe.live_trace.events import Chain, EventKind
from vipd.observe.live_trace.matched_rules import MatchedRule, matched_rules
from vipd.observe.live_trace.matching import ChainRules
from vipd.observe.live_trace.outcome import Comparison, Difference, FinalVerdict, compare, outcome_of
from vipd.observe.live_trace.packet_trace import PacketTrace
from vipd.observe.live_trace.report import Report

TO_WEB = '-d 10.96.0.20/32 -p tcp -m comment --comment "web cluster IP" -m tcp --dport 80'
WALK = (
    ("nat", "PREROUTING", '-m comment --comment "vipd services" -j VIPD-PREROUTING'),
    ("nat", "VIPD-PREROUTING", "-j CONNMARK --set-xmark 0x2000/0x2000"),
    ("nat", "VIPD-PREROUTING", "-j VIPD-SERVICES"),
    ("nat", "VIPD-SERVICES", f"{TO_WEB} -j VIPD-SVC-Z2ZMARD2KB633VFJ"),
    ("nat", "VIPD-SVC-Z2ZMARD2KB633VFJ", f"{TO_WEB} -m addrtype ! --src-type LOCAL -j VIPD-MARK-MASQ"),
    ("nat", "VIPD-MARK-MASQ", "-j MARK --set-xmark 0x4000/0x4000"),
    (
        "nat",
        "VIPD-SVC-Z2ZMARD2KB633VFJ",
        '-m comment --comment "web -> 10.244.0.11:8080" -j VIPD-SEP-YLKAMYDXHH7566LT',
    ),
    (
        "nat",
        "VIPD-SEP-YLKAMYDXHH7566LT",
        "-p tcp -m comment --comment web -m tcp -j DNAT --to-destination 10.244.0.11:8080",
    ),
)
"""The rules of the recorded way through nat PREROUTING."""


def listed(trace: PacketTrace) -> dict[Chain, ChainRules]:
    """Rules for a trace's events: those of WALK in their order, and plain ones for all others."""
    left = list(WALK)
    rules: dict[Chain, dict[int, str]] = {}
    for traced in trace.events:
        event = traced.event
        if event.kind is EventKind.RULE:
            texts = rules.setdefault(event.chain, {})
            fits = left and left[0][:2] == (event.chain.table, event.chain.name)
            text = (
                left.pop(0)[2] if fits else "-j MASQUERADE" if event.chain.name == "VIPD-POSTROUTING" else ""
            )
            texts.setdefault(event.rule, text)
    return {chain: ChainRules(texts) for chain, texts in rules.items()}


def traced_rules(name: str) -> tuple[PacketTrace, tuple[MatchedRule, ...]]:
    (trace,) = traces(name, legacy=name.startswith("legacy"))
    return trace, matched_rules(trace, listed(trace), "VIPD")


def prediction(trace: PacketTrace, matched: tuple[MatchedRule, ...], **changes: Any) -> dict[str, Any]:
    """An explanation that says what the trace was, with one outcome changed."""
    start = trace.start
    chains = [{"table": rule.chain.table, "chain": rule.chain.name} for rule in matched]
    outcome = {
        "verdict": "delivered",
        "backend": trace.end.receiver,
        "probability": 0.25,
        "masqueraded": True,
        "rules": chains,
    }
    place = f"{start.source} -> {socket_text(start.destination, start.port)}/{start.protocol}"
    return {
        "packet": start._asdict() | {"protocol": str(start.protocol)},
        "summary": f"{place} is balanced over 4 backends, masqueraded",
        "backends": [],
        "service_port": "web",
        "outcomes": [outcome | changes],
    }


def compared(**changes: Any) -> Comparison:
    trace, rules = traced_rules("iptables-forwarded")
    return compare(outcome_of(trace, rules), rules, prediction(trace, rules, **changes))


def test_every_rule_in_words() -> None:
    trace, rules = traced_rules("iptables-forwarded")
    rows = list(Report(trace, rules, outcome_of(trace, rules), None).rows())
    assert rows[:7] == [
        ("nat, hook prerouting", "PREROUTING", "", "on to VIPD-PREROUTING"),
        ("nat, hook prerouting", "VIPD-PREROUTING", "entry", "flow marked as vipd's"),
        ("nat, hook prerouting", "VIPD-PREROUTING", "entry", "on to VIPD-SERVICES"),
        ("nat, hook prerouting", "VIPD-SERVICES", "dispatch", "10.96.0.20:80/tcp of web"),
        (
            "nat, hook prerouting",
            "VIPD-SVC-Z2ZMARD2KB633VFJ",
            "service web",
            "to be masqueraded, unless from this host",
        ),
        ("nat, hook prerouting", "VIPD-MARK-MASQ", "mark", "marked for masquerade, mark 0x4000"),
        (
            "nat, hook prerouting",
            "VIPD-SVC-Z2ZMARD2KB633VFJ",
            "service web",
            "to 10.244.0.11:8080, all others",
        ),
    ]
    assert rows[7] == (
        "nat, hook prerouting",
        "VIPD-SEP-YLKAMYDXHH7566LT",
        "backend 10.244.0.11:8080",
        "DNAT to 10.244.0.11:8080",
    )


def test_the_outcome_names_the_rule_that_decided() -> None:
    outcome = outcome_of(*traced_rules("iptables-forwarded"))
    assert (outcome.verdict, outcome.destination) == (FinalVerdict.DELIVERED, "10.244.0.11:8080")
    assert (outcome.masqueraded, outcome.source) == (True, "10.244.0.1")
    assert outcome.decided_by is not None
    assert outcome.decided_by.chain.name == "VIPD-SEP-YLKAMYDXHH7566LT"


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [("-j REJECT --reject-with tcp-reset", FinalVerdict.REJECTED), ("-j DROP", FinalVerdict.DROPPED)],
)
@pytest.mark.parametrize("dataplane", ["iptables", "legacy"])
def test_refused_or_dropped_is_told_by_the_rule(dataplane: str, rule: str, verdict: FinalVerdict) -> None:
    (trace,) = traces(f"{dataplane}-refused", legacy=dataplane == "legacy")
    last = trace.events[-1].event
    rules = matched_rules(trace, {last.chain: ChainRules({last.rule: rule})}, "VIPD")
    assert outcome_of(trace, rules).verdict is verdict


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            "ip daddr set ip daddr . meta l4proto . th dport map @frontends goto handover",
            "by address and port: 10.96.0.20:80/tcp of web",
        ),
        ("ip daddr vmap @handlers", "the chain for services of its kind: forwarded-random-1"),
        ("meta l4proto . th dport vmap @node_ports", "node ports: node port 80/tcp of web"),
        (
            "ip saddr & 255.255.255.0 . ct original ip daddr . meta l4proto . th dport vmap @allowed_24",
            "allowed sources, by /24: 10.10.0.0/24",
        ),
    ],
)
def test_the_packet_tells_what_a_map_was_asked(rule: str, words: str) -> None:
    """The kernel does not."""
    (trace,) = traces("nftables-forwarded")
    asked = next(m.event for m in trace.events if m.event.jump_target == "forwarded-random-1")
    known = {asked.chain: ChainRules({asked.rule: rule}, iptables=False, ours=True)}
    (hit,) = [
        hit for hit in matched_rules(trace, known, "VIPD", "web") if hit.jump_target == "forwarded-random-1"
    ]
    assert hit.does == words


def test_a_packet_that_no_rule_ended_is_lost() -> None:
    (trace,) = traces("legacy-refused", legacy=True)
    assert outcome_of(trace, matched_rules(trace, {}, "VIPD")).verdict is FinalVerdict.LOST


def test_agreement() -> None:
    found = compared()
    assert (found.differences, found.share) == ((), 0.25)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"verdict": "rejected"}, Difference("verdict", "delivered", "rejected")),
        ({"verdict": "unchanged", "backend": None}, Difference("verdict", "delivered", "unchanged")),
        ({"backend": "10.244.0.12:8080"}, Difference("backend", "10.244.0.11:8080", "10.244.0.12:8080")),
        ({"masqueraded": False}, Difference("masqueraded", "masqueraded", "not masqueraded")),
    ],
)
def test_another_way_is_a_difference_in_a_field(changes: dict[str, Any], difference: Difference) -> None:
    found = compared(**changes)
    assert (found.differences, found.share) == ((difference,), None)
    assert found.predicted == "is balanced over 4 backends, masqueraded"


def test_another_chain_is_a_difference() -> None:
    _, rules = traced_rules("iptables-forwarded")
    without = [{"table": "nat", "chain": h.chain.name} for h in rules if h.chain.name != "VIPD-MARK-MASQ"]
    assert compared(rules=without).differences == (
        Difference("chain", "nat VIPD-MARK-MASQ", "nat VIPD-SEP-YLKAMYDXHH7566LT"),
    )


def test_groups_of_addresses_count_as_what_they_are_a_part_of() -> None:
    trace, rules = traced_rules("iptables-forwarded")
    at = next(number for number, hit in enumerate(rules) if hit.chain.name == "VIPD-SERVICES")
    group = Chain("ip", "nat", "VIPD-GRP-ABCDEFGHIJKLMNOP")
    through = (
        *rules[:at],
        replace(rules[at], jump_target=group.name),
        replace(rules[at], chain=group),
        *rules[at + 1 :],
    )
    assert compare(outcome_of(trace, through), through, prediction(trace, rules)).differences == ()


def test_other_dataplanes_chains_are_not_compared() -> None:
    rules = [{"table": "ip vipd", "chain": "dispatch"}]
    assert compared(rules=rules).differences == ()


def test_a_rule_of_others_is_named() -> None:
    trace, (first, *_) = traced_rules("iptables-forwarded")
    rule = "-j DNAT --to-destination 10.9.9.9:80"
    rules = (replace(first, rule=rule, does=rule, jump_target="", ours=False),)
    outcome = outcome_of(trace, rules)
    comparison = compare(outcome, rules, prediction(trace, rules, backend="10.1.1.1:80"))
    report = Report(trace, rules, outcome, comparison)
    assert not report.agrees
    assert report.deciding_rule() == f"nat PREROUTING: {rule} (not a rule of vipd)"


@pytest.mark.parametrize(
    ("rule", "iptables", "target"),
    [
        ('-m comment --comment "no masquerade, no -j MASQUERADE here" -j RETURN', True, "RETURN"),
        ('-j LOG --log-prefix "then -j MASQUERADE "', True, "LOG"),
        ("-m comment --comment -j -j ACCEPT", True, "ACCEPT"),
        ('-m comment --comment "not closed -j REJECT', True, ""),
        ("-o eth0 -g VIPD-SERVICES", True, "VIPD-SERVICES"),
        ("-m mark --mark 0x1", True, ""),
        ("-j MASQUERADE --random-fully", True, "MASQUERADE"),
        ('counter accept comment "masquerade"', False, ""),
        ('log prefix "reject " drop', False, ""),
        ("ct status snat accept", False, ""),
        ("ip saddr @masquerade jump masquerade", False, ""),
        ("meta mark vmap { 0x00000001 : goto reject }", False, ""),
        ('oifname "eth0" masquerade fully-random', False, "MASQUERADE"),
        ("counter packets 0 bytes 0 snat ip to 192.0.2.1:1024-2048", False, "SNAT"),
        ("reject with tcp reset", False, "REJECT"),
        ('counter xt target "MASQUERADE"', False, "MASQUERADE"),
    ],
)
def test_what_a_rule_does_is_read_from_its_statement(rule: str, iptables: bool, target: str) -> None:
    (trace,) = traces("iptables-forwarded")
    first = next(m.event for m in trace.events if m.event.kind is EventKind.RULE)
    (hit,) = [
        hit
        for hit in matched_rules(
            trace, {first.chain: ChainRules({first.rule: rule}, iptables=iptables)}, "VIPD"
        )
        if hit.rule
    ]
    assert hit.target == target


def test_a_comment_changes_no_source() -> None:
    (trace,) = traces("iptables-loopback")
    trace = replace(trace, end=trace.end._replace(source=trace.start.source))
    said = {
        m.event.chain: ChainRules({m.event.rule: '-m comment --comment "may masquerade later" -j RETURN'})
        for m in trace.events
    }
    outcome = outcome_of(trace, matched_rules(trace, said, "VIPD"))
    assert (outcome.masqueraded, outcome.verdict) == (False, FinalVerdict.DELIVERED)


def test_chains_of_another_prefix_are_not_vipds() -> None:
    """A kube-proxy's have the same form."""
    trace, rules = traced_rules("iptables-forwarded")
    at = next(number for number, hit in enumerate(rules) if hit.chain.name == "VIPD-SERVICES")
    service = Chain("ip", "nat", "KUBE-SERVICES")
    moment = next(m for m in trace.events if m.event.kind is EventKind.RULE)
    foreign = replace(
        moment, event=moment.event._replace(chain=service, jump_target="KUBE-SVC-ABCDEFGHIJKLMNOP")
    )
    beside = replace(trace, events=(trace.events[0], foreign, *trace.events[1:]))
    found = matched_rules(beside, listed(trace), "VIPD")
    (kube,) = [hit for hit in found if hit.chain == service]
    assert (kube.ours, kube.role) == (False, "")
    assert compare(outcome_of(beside, found), found, prediction(trace, rules)).differences == ()
    (kube,) = [hit for hit in matched_rules(beside, listed(trace), "KUBE") if hit.chain == service]
    assert (kube.ours, kube.role) == (True, "dispatch")
    assert rules[at].ours


@pytest.mark.parametrize("verdict", ["rejected", "dropped"])
def test_what_cannot_be_read_is_said_and_is_no_difference(verdict: str) -> None:
    """Whether the rule that ended the packet refuses or drops is not known."""
    (trace,) = traces("iptables-refused")
    rules = matched_rules(trace, {}, "VIPD")
    outcome = outcome_of(trace, rules)
    comparison = compare(outcome, rules, prediction(trace, rules, verdict=verdict, backend=None))
    assert (outcome.unread, comparison.differences) == (True, ())
    report = Report(trace, rules, outcome, comparison)
    assert "a rule that cannot be read" in report.deciding_rule()
    assert {does for *_, does in report.rows()} == {"a rule that cannot be read"}


def test_a_source_that_stays_the_same_may_be_masqueraded_by_a_rule_that_cannot_be_read() -> None:
    (trace,) = traces("iptables-loopback")
    trace = replace(trace, end=trace.end._replace(source=trace.start.source))
    rules = matched_rules(trace, {}, "VIPD")
    for masqueraded in (True, False):
        predicted = prediction(trace, rules, masqueraded=masqueraded)
        assert compare(outcome_of(trace, rules), rules, predicted).differences == ()
