"""Journeys told in words, and held against a prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.trace.recorded import journeys
from vipd.model import socket_text
from vipd.observe.trace.events import Chain, Kind
from vipd.observe.trace.hits import Hit, hits_of
from vipd.observe.trace.journey import Journey
from vipd.observe.trace.outcome import Comparison, Fate, compare, outcome_of
from vipd.observe.trace.report import Report


class Known(NamedTuple):
    """A chain as it would be listed."""

    rules: dict[int, str]
    policy: str = ""
    iptables: bool = True
    ours: bool = False


WALK = (
    ("nat", "PREROUTING", '-m comment --comment "vipd services" -j VIPD-PREROUTING'),
    ("nat", "VIPD-PREROUTING", "-j CONNMARK --set-xmark 0x2000/0x2000"),
    ("nat", "VIPD-PREROUTING", "-j VIPD-SERVICES"),
    ("nat", "VIPD-SERVICES", '-m comment --comment "web cluster IP" -j VIPD-SVC-Z2ZMARD2KB633VFJ'),
    ("nat", "VIPD-SVC-Z2ZMARD2KB633VFJ", '-m comment --comment "web cluster IP" -j VIPD-MARK-MASQ'),
    ("nat", "VIPD-MARK-MASQ", "-j MARK --set-xmark 0x4000/0x4000"),
    ("nat", "VIPD-SVC-Z2ZMARD2KB633VFJ", '-m comment --comment "web -> 10.244.0.11:8080" -j VIPD-SEP-X'),
    (
        "nat",
        "VIPD-SEP-YLKAMYDXHH7566LT",
        "-m comment --comment web -j DNAT --to-destination 10.244.0.11:8080",
    ),
)
"""The rules of the recorded way through nat PREROUTING."""


def listed(journey: Journey) -> dict[Chain, Known]:
    """Rules for a journey's events: those of WALK in their order, and plain ones for all others."""
    left = list(WALK)
    found: dict[Chain, Known] = {}
    for moment in journey.moments:
        event = moment.event
        if event.kind is Kind.RULE:
            rules = found.setdefault(event.chain, Known({})).rules
            fits = left and left[0][:2] == (event.chain.table, event.chain.name)
            text = (
                left.pop(0)[2] if fits else "-j MASQUERADE" if event.chain.name == "VIPD-POSTROUTING" else ""
            )
            rules.setdefault(event.rule, text)
    return found


def hit_by(name: str) -> tuple[Journey, tuple[Hit, ...]]:
    (journey,) = journeys(name, legacy=name.startswith("legacy"))
    return journey, hits_of(journey, listed(journey), "VIPD")


def prediction(journey: Journey, hits: tuple[Hit, ...], **changes: Any) -> dict[str, Any]:
    """An explanation that says what the journey was, with one outcome changed."""
    start = journey.start
    rules = [{"table": hit.chain.table, "chain": hit.chain.name} for hit in hits]
    outcome = {
        "verdict": "delivered",
        "backend": journey.end.receiver,
        "probability": 0.25,
        "masqueraded": True,
        "rules": rules,
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
    journey, hits = hit_by("iptables-forwarded")
    return compare(outcome_of(journey, hits), hits, prediction(journey, hits, **changes))


def test_every_rule_in_words() -> None:
    journey, hits = hit_by("iptables-forwarded")
    rows = list(Report(journey, hits, outcome_of(journey, hits), None).rows())
    assert rows[:7] == [
        ("nat", "PREROUTING", "", "vipd services"),
        ("nat", "VIPD-PREROUTING", "entry", "flow marked as vipd's"),
        ("nat", "VIPD-PREROUTING", "entry", "on to VIPD-SERVICES"),
        ("nat", "VIPD-SERVICES", "dispatch", "virtual IP of web"),
        ("nat", "VIPD-SVC-Z2ZMARD2KB633VFJ", "service web", "to be masqueraded"),
        ("nat", "VIPD-MARK-MASQ", "mark", "marked for masquerade, mark 0x4000"),
        ("nat", "VIPD-SVC-Z2ZMARD2KB633VFJ", "service web", "web -> 10.244.0.11:8080"),
    ]
    assert rows[7] == ("nat", "VIPD-SEP-YLKAMYDXHH7566LT", "backend 10.244.0.11:8080", "to 10.244.0.11:8080")


def test_the_outcome_names_the_rule_that_decided() -> None:
    outcome = outcome_of(*hit_by("iptables-forwarded"))
    assert (outcome.fate, outcome.destination) == (Fate.DELIVERED, "10.244.0.11:8080")
    assert (outcome.masqueraded, outcome.source) == (True, "10.244.0.1")
    assert outcome.by is not None
    assert outcome.by.chain.name == "VIPD-SEP-YLKAMYDXHH7566LT"


@pytest.mark.parametrize(
    ("rule", "fate"), [("-j REJECT --reject-with tcp-reset", Fate.REJECTED), ("-j DROP", Fate.DROPPED)]
)
@pytest.mark.parametrize("dataplane", ["iptables", "legacy"])
def test_refused_or_dropped_is_told_by_the_rule(dataplane: str, rule: str, fate: Fate) -> None:
    (journey,) = journeys(f"{dataplane}-refused", legacy=dataplane == "legacy")
    last = journey.moments[-1].event
    hits = hits_of(journey, {last.chain: Known({last.rule: rule})}, "VIPD")
    assert outcome_of(journey, hits).fate is fate


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            "ip daddr set ip daddr . meta l4proto . th dport map @frontends goto handover",
            "@frontends: 10.96.0.20:80/tcp of web",
        ),
        ("ip daddr vmap @handlers", "@handlers: on to forwarded-random-1"),
        ("meta l4proto . th dport vmap @node_ports", "@node_ports: 80/tcp of web"),
        (
            "ip saddr & 255.255.255.0 . ct original ip daddr . meta l4proto . th dport vmap @allowed_24",
            "@allowed_24: sources in 10.10.0.0/24",
        ),
    ],
)
def test_the_packet_tells_what_a_map_was_asked(rule: str, words: str) -> None:
    """The kernel does not."""
    (journey,) = journeys("nftables-forwarded")
    asked = next(m.event for m in journey.moments if m.event.leads == "forwarded-random-1")
    known = {asked.chain: Known({asked.rule: rule}, iptables=False, ours=True)}
    (hit,) = [hit for hit in hits_of(journey, known, "VIPD", "web") if hit.leads == "forwarded-random-1"]
    assert hit.does == words


def test_a_packet_that_no_rule_ended_is_lost() -> None:
    (journey,) = journeys("legacy-refused", legacy=True)
    assert outcome_of(journey, hits_of(journey, {}, "VIPD")).fate is Fate.LOST


def test_agreement() -> None:
    found = compared()
    assert (found.differences, found.share) == ((), 0.25)


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "rejected"},
        {"verdict": "unchanged", "backend": None},
        {"backend": "10.244.0.12:8080"},
        {"masqueraded": False},
    ],
)
def test_another_way_is_a_difference(changes: dict[str, Any]) -> None:
    found = compared(**changes)
    assert (found.differences, found.share) == (("it goes another way",), None)
    assert found.predicted == "is balanced over 4 backends, masqueraded"


def test_another_chain_is_a_difference() -> None:
    _, hits = hit_by("iptables-forwarded")
    without = [{"table": "nat", "chain": h.chain.name} for h in hits if h.chain.name != "VIPD-MARK-MASQ"]
    assert compared(rules=without).differences == (
        "it passes nat VIPD-MARK-MASQ where nat VIPD-SEP-YLKAMYDXHH7566LT was to come",
    )


def test_groups_of_addresses_count_as_what_they_are_a_part_of() -> None:
    journey, hits = hit_by("iptables-forwarded")
    at = next(number for number, hit in enumerate(hits) if hit.chain.name == "VIPD-SERVICES")
    group = Chain("ip", "nat", "VIPD-GRP-ABCDEFGHIJKLMNOP")
    through = (
        *hits[:at],
        replace(hits[at], leads=group.name),
        replace(hits[at], chain=group),
        *hits[at + 1 :],
    )
    assert compare(outcome_of(journey, through), through, prediction(journey, hits)).differences == ()


def test_other_dataplanes_chains_are_not_compared() -> None:
    rules = [{"table": "ip vipd", "chain": "dispatch"}]
    assert compared(rules=rules).differences == ()


def test_a_rule_of_others_is_named() -> None:
    journey, (first, *_) = hit_by("iptables-forwarded")
    rule = "-j DNAT --to-destination 10.9.9.9:80"
    hits = (replace(first, rule=rule, does=rule, leads="", ours=False),)
    outcome = outcome_of(journey, hits)
    comparison = compare(outcome, hits, prediction(journey, hits, backend="10.1.1.1:80"))
    report = Report(journey, hits, outcome, comparison)
    assert not report.agrees
    assert report.blamed() == f"nat PREROUTING: {rule} (not a rule of vipd)"


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
    (journey,) = journeys("iptables-forwarded")
    first = next(m.event for m in journey.moments if m.event.kind is Kind.RULE)
    (hit,) = [
        hit
        for hit in hits_of(journey, {first.chain: Known({first.rule: rule}, iptables=iptables)}, "VIPD")
        if hit.rule
    ]
    assert hit.target == target


def test_a_comment_changes_no_source() -> None:
    (journey,) = journeys("iptables-loopback")
    journey = replace(journey, end=journey.end._replace(source=journey.start.source))
    said = {
        m.event.chain: Known({m.event.rule: '-m comment --comment "may masquerade later" -j RETURN'})
        for m in journey.moments
    }
    outcome = outcome_of(journey, hits_of(journey, said, "VIPD"))
    assert (outcome.masqueraded, outcome.fate) == (False, Fate.DELIVERED)


def test_chains_of_another_prefix_are_not_vipds() -> None:
    """A kube-proxy's have the same form."""
    journey, hits = hit_by("iptables-forwarded")
    at = next(number for number, hit in enumerate(hits) if hit.chain.name == "VIPD-SERVICES")
    service = Chain("ip", "nat", "KUBE-SERVICES")
    moment = next(m for m in journey.moments if m.event.kind is Kind.RULE)
    foreign = replace(moment, event=moment.event._replace(chain=service, leads="KUBE-SVC-ABCDEFGHIJKLMNOP"))
    beside = replace(journey, moments=(journey.moments[0], foreign, *journey.moments[1:]))
    found = hits_of(beside, listed(journey), "VIPD")
    (kube,) = [hit for hit in found if hit.chain == service]
    assert (kube.ours, kube.part) == (False, "")
    assert compare(outcome_of(beside, found), found, prediction(journey, hits)).differences == ()
    (kube,) = [hit for hit in hits_of(beside, listed(journey), "KUBE") if hit.chain == service]
    assert (kube.ours, kube.part) == (True, "dispatch")
    assert hits[at].ours


@pytest.mark.parametrize("verdict", ["rejected", "dropped"])
def test_what_cannot_be_read_is_said_and_is_no_difference(verdict: str) -> None:
    """Whether the rule that ended the packet refuses or drops is not known."""
    (journey,) = journeys("iptables-refused")
    hits = hits_of(journey, {}, "VIPD")
    outcome = outcome_of(journey, hits)
    comparison = compare(outcome, hits, prediction(journey, hits, verdict=verdict, backend=None))
    assert (outcome.unread, comparison.differences) == (True, ())
    report = Report(journey, hits, outcome, comparison)
    assert "a rule that cannot be read" in report.blamed()
    assert {does for *_, does in report.rows()} == {"a rule that cannot be read"}


def test_a_source_that_stays_the_same_may_be_masqueraded_by_a_rule_that_cannot_be_read() -> None:
    (journey,) = journeys("iptables-loopback")
    journey = replace(journey, end=journey.end._replace(source=journey.start.source))
    hits = hits_of(journey, {}, "VIPD")
    for masqueraded in (True, False):
        predicted = prediction(journey, hits, masqueraded=masqueraded)
        assert compare(outcome_of(journey, hits), hits, predicted).differences == ()
