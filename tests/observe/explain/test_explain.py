from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.iptables.render import render
from vipd.model.forwarding import Endpoint, Forwarding, ForwardingKey
from vipd.model.service import ExternalAddress, Family, Masquerade, Protocol, RejectAction, TrafficPolicy
from vipd.observe.explain.explanation import Explanation, explain
from vipd.observe.explain.query import QueryError, ask, parse_source
from vipd.observe.simulator import Arrival, Host, parse_ruleset, trace

HOST = ("10.10.0.1", "127.0.0.1", "192.168.100.1", "fd00:10::1", "::1", "fe80::1")


def forwarding(name: str, address: str, *endpoints: str, **changes: Any) -> Forwarding:
    family = Family.IPV6 if ":" in address else Family.IPV4
    split = (endpoint.partition("@") for endpoint in endpoints)
    known = tuple(Endpoint(address, 8080, int(weight or 1)) for address, _, weight in split)
    plain = Forwarding(
        ForwardingKey(name, "", Protocol.TCP, family),
        (address,),
        80,
        known,
        Masquerade.FORWARDED,
        has_endpoints=bool(known),
    )
    return replace(plain, **changes)


WEB = forwarding("web", "10.96.0.20", "10.244.1.10", "10.244.1.11@3")


def explanation_of(source: str, target: str, *forwardings: Forwarding, **options: Any) -> Explanation:
    question = ask(source, target, forwardings, HOST)
    chosen = RuleOptions(question.packet.family, **options)
    return explain(question, forwardings, chosen, HOST)


def test_balanced_and_masqueraded() -> None:
    found = explanation_of("10.10.0.9", "10.96.0.20:80", WEB)
    assert found.verdict == "delivered"
    assert found.summary == "10.10.0.9 -> 10.96.0.20:80/tcp is balanced over 2 backends, masqueraded"
    assert [(r.endpoint, round(r.share, 6), r.masqueraded) for r in found.backends()] == [
        ("10.244.1.10:8080", 0.25, True),
        ("10.244.1.11:8080", 0.75, True),
    ]
    assert (found.service_port, found.reason, found.hint, found.notes) == ("web", "", "", ())


def test_one_backend_that_sees_the_client() -> None:
    found = explanation_of("local", "web", forwarding("web", "10.96.0.20", "10.244.1.10"))
    assert found.summary == "10.10.0.1 -> 10.96.0.20:80/tcp goes to 10.244.1.10:8080, not masqueraded"
    assert found.packet.arriving is Arrival.LOCAL
    assert "assumed" in found.notes[0]


def test_a_backend_is_masqueraded_only_on_the_way_to_itself() -> None:
    found = explanation_of("10.244.1.10", "web", replace(WEB, masquerade=Masquerade.HAIRPIN))
    assert [r.masqueraded for r in found.backends()] == [True, False]
    assert found.summary.endswith("masqueraded for some")


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, "rejected", "is refused: no backend of dead is ready"),
        ({"refusal": RejectAction.DROP}, "dropped", "is dropped: no backend of dead is ready"),
        ({"has_endpoints": True}, "dropped", "is dropped: dead has no backends on this host"),
    ],
)
def test_refusals(changes: dict[str, Any], verdict: str, words: str) -> None:
    found = explanation_of("10.10.0.9", "dead", forwarding("dead", "10.96.0.30", **changes))
    assert (found.verdict, found.backends()) == (verdict, ())
    assert found.summary.endswith(words)
    assert found.reason
    rules = found.view()["outcomes"][0]["rules"]  # type: ignore[index]
    assert rules[-1]["chain"] == "VIPD-SERVICES"
    assert "dead has no" in rules[-1]["meaning"]


@pytest.mark.parametrize(
    ("protocol", "prefix", "words"),
    [
        (Protocol.TCP, "VIPD", "refused by a TCP reset"),
        (Protocol.UDP, "VIPD", "refused by an ICMP error"),
        (Protocol.TCP, "KUBE", "refused by an ICMP error"),
    ],
)
def test_how_a_client_is_refused_is_told_as_the_rule_does_it(
    protocol: Protocol, prefix: str, words: str
) -> None:
    dead = forwarding("dead", "10.96.0.30")
    dead = replace(dead, key=dead.key._replace(protocol=protocol))
    found = explanation_of("10.10.0.9", f"10.96.0.30:80/{protocol}", dead, prefix=prefix)
    assert found.reason.startswith(words)
    assert ("tcp-reset" in found.trace.outcomes[0].steps[-1].rule) == ("TCP reset" in words)


def test_a_source_that_may_not() -> None:
    limited = ExternalAddress("198.51.100.5", allow_from=("203.0.113.0/24",))
    web = replace(WEB, external_addresses=(limited,))
    found = explanation_of("10.10.0.9", "198.51.100.5:80", web)
    assert found.summary.endswith("is dropped: this source may not use web")
    assert found.reason == "allowed are 203.0.113.0/24"
    assert explanation_of("203.0.113.9", "198.51.100.5:80", web).verdict == "delivered"


@pytest.mark.parametrize("target", ["web", "10.96.0.20:80", "192.168.100.1:30080"])
def test_a_source_that_may_not_use_a_service_at_all(target: str) -> None:
    web = replace(WEB, node_port=30080, allow_from=("203.0.113.0/24",))
    found = explanation_of("10.10.0.9", target, web)
    assert found.summary.endswith("is dropped: this source may not use web")
    assert found.reason == "allowed are 203.0.113.0/24"
    assert explanation_of("203.0.113.9", target, web).verdict == "delivered"
    assert explanation_of("local", target, web).verdict == "dropped"
    host = replace(web, allow_host_inside=True)
    if target.startswith("192"):
        assert explanation_of("192.168.100.1", target, host).verdict == "delivered"


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("10.96.0.99:80", ""),
        ("192.168.100.1:30080/udp", "there is node port 30080/tcp (web)"),
        ("10.96.0.99:30080/tcp", "there is node port 30080/tcp (web), at this host's own addresses"),
        ("127.0.0.1:30080/tcp", "30080 is a node port of web, but not at this address"),
    ],
)
def test_unchanged_with_a_hint(target: str, hint: str) -> None:
    found = explanation_of(
        "local" if target.startswith("127") else "10.10.0.9", target, replace(WEB, node_port=30080)
    )
    assert (found.verdict, found.backends()) == ("unchanged", ())
    assert found.summary.endswith("is left alone: no service has this address and port")
    assert found.hint.partition(";")[0] == hint


@pytest.mark.parametrize("target", ["10.96.0.20:81", "10.96.0.20:80/udp"])
def test_an_unused_port_of_a_vip_is_refused_with_a_hint(target: str) -> None:
    found = explanation_of("10.10.0.9", target, WEB)
    assert (found.verdict, found.backends()) == ("rejected", ())
    assert found.summary.endswith("is refused: no service has this address and port")
    assert found.hint.partition(";")[0] == "10.96.0.20 serves 80/tcp"
    left = explanation_of("10.10.0.9", target, WEB, reject_unused_ports=False)
    assert left.verdict == "unchanged"


def test_node_ports_of_every_address_or_of_some() -> None:
    web = replace(WEB, node_port=30080)
    assert explanation_of("10.10.0.9", "192.168.100.1:30080", web).verdict == "delivered"
    elsewhere = explanation_of("10.10.0.9", "192.168.100.1:30080", web, node_port_addresses=("10.10.0.1",))
    assert elsewhere.verdict == "unchanged"
    assert elsewhere.hint.startswith("30080 is a node port of web, but not at this address")


def test_a_health_port_is_left_to_the_host() -> None:
    web = replace(WEB, health_port=32100)
    found = explanation_of("10.10.0.9", "192.168.100.1:32100", web)
    assert found.summary.endswith("is left to this host: 32100 is the health port of web")


def test_affinity_is_told() -> None:
    assert "within 3h" in explanation_of("10.10.0.9", "web", replace(WEB, affinity_timeout=10800)).notes[0]
    one = forwarding("one", "10.96.0.20", "10.244.1.10", affinity_timeout=10800)
    assert explanation_of("10.10.0.9", "one", one).notes == ()


def test_a_backend_that_is_the_address_of_a_dead_service() -> None:
    """Its refusal meets the translated packet, although it is for another address."""
    web = replace(WEB, endpoints=(Endpoint("10.96.0.30", 80), Endpoint("10.244.1.10", 80)))
    found = explanation_of("10.10.0.9", "web", web, forwarding("dead", "10.96.0.30"))
    assert found.verdict == "mixed"
    assert [(r.endpoint, r.share) for r in found.backends()] == [("10.244.1.10:80", 0.5)]
    told_of_dead = "in 50.0% is translated to 10.96.0.30:80, then refused: no backend of dead is ready"
    assert told_of_dead in found.summary


def test_forwardings_left_out_change_nothing() -> None:
    many = [
        forwarding(f"s{n}", f"10.96.{n}.1", *(["10.244.1.10"] if n % 3 else []), node_port=30000 + n)
        for n in range(100)
    ]
    local = {"external_policy": TrafficPolicy.LOCAL, "has_endpoints": True, "node_port": 30200}
    every = (*many, WEB, forwarding("nowhere", "10.97.0.1", "10.244.1.11", **local))
    options = RuleOptions(Family.IPV4)
    whole = parse_ruleset(render(every, options), Family.IPV4)
    for source in ("10.10.0.9", "10.10.0.1", "10.244.1.10"):
        for target in (
            "web",
            "s3",
            "s4",
            "nowhere",
            "192.168.100.1:30005",
            "192.168.100.1:30200",
            "1.2.3.4:5",
        ):
            question = ask(source, target, every, HOST)
            found = explain(question, every, options, HOST).trace.outcomes
            full = trace(whole, question.packet, Host(HOST)).outcomes
            assert [replace(o, steps=()) for o in found] == [replace(o, steps=()) for o in full]


def test_packets_of_no_service_walk_the_rules_that_all_walk() -> None:
    (outcome,) = explanation_of("10.10.0.9", "1.2.3.4:5", WEB).trace.outcomes
    assert [step.chain for step in outcome.steps if step.table == "nat"][:2] == [
        "PREROUTING",
        "VIPD-PREROUTING",
    ]
    assert explanation_of("10.10.0.9", "1.2.3.4:5").trace.outcomes[0].steps == ()


def test_names_prefer_the_source_s_family() -> None:
    both = (WEB, forwarding("web", "fd00::20", "fd00:244::1"))
    assert explanation_of("fd00::9", "web", *both).packet.destination == "fd00::20"
    assert explanation_of("local", "web", *both).packet.destination == "10.96.0.20"
    assert explanation_of("local", "[fd00::20]:80", *both).packet.source == "fd00:10::1"


@pytest.mark.parametrize(
    ("source", "target", "what", "unknown"),
    [
        ("fd00::9", "web", "web has no ipv6 address", False),
        ("fd00::9", "10.96.0.20:80", "fd00::9 and 10.96.0.20 are of different families", False),
        ("10.10.0.9", "nope", "no service nope", True),
        ("10.10.0.9", "10.96.0.99", '"10.96.0.99" has no port', False),
        ("10.10.0.9", "10.96.0.20:0", "the port 0 is out of range", False),
        ("10.10.0.9", "two", "two has several ports", False),
        ("10.10.0.9", "", "no target is given", False),
        ("10.10.0.9@2", "web", "10.10.0.9@2 has a weight", False),
        ("", "web", "the address is empty", False),
        ("here", "web", '"here" is a name, not an IP address', False),
    ],
)
def test_questions_without_an_answer(source: str, target: str, what: str, unknown: bool) -> None:
    two = forwarding("two", "10.96.0.40", "10.244.1.10")
    other = replace(two, key=two.key._replace(port_name="b"), port=81)
    with pytest.raises(QueryError) as caught:
        ask(source, target, [WEB, two, other], HOST)
    assert (caught.value.what, caught.value.unknown) == (what, unknown)
    assert caught.value.hint


def test_sources() -> None:
    assert (parse_source("local").address, parse_source("10.0.0.1").port) == ("", None)
    assert parse_source("[fd00::9]:4000") == parse_source("[fd00:0::9]:4000")
    assert ask("10.10.0.9:4000", "web", [WEB], HOST).packet.source_port == 4000
    assert ask("10.10.0.1", "web", [WEB], HOST).packet.arriving is Arrival.LOCAL
    assert ask("127.0.0.1", "127.0.0.1:1", [WEB], ()).packet.arriving is Arrival.LOCAL
    assert ask("local", "192.168.100.1:1", [WEB], HOST).packet.source == "192.168.100.1"
    assert ask("local", "web", [WEB], ["10.10.0.10", "10.10.0.9"]).packet.source == "10.10.0.9"
    with pytest.raises(QueryError, match="no address"):
        ask("local", "web", [WEB], ["127.0.0.1", "fd00::1"])
