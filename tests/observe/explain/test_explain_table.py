"""Explanations by the nftables dataplane's own table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.observe.explain.test_explain import HOST, WEB, forwarding
from tests.observe.explain.test_explain import explanation_of as explanation_by_rules
from vipd.dataplane.nftables.chains import TableNumbers
from vipd.dataplane.nftables.options import TableOptions
from vipd.dataplane.nftables.render import render
from vipd.model.forwarding import Endpoint, Forwarding
from vipd.model.service import Balance, ExternalAddress, Family, Masquerade, RejectAction, TrafficPolicy
from vipd.observe.explain.explanation import Explanation, explain
from vipd.observe.explain.query import ask
from vipd.observe.simulator import Host, parse_tables, trace


def explanation_of(source: str, target: str, *forwardings: Forwarding, **options: Any) -> Explanation:
    question = ask(source, target, forwardings, HOST)
    chosen = TableOptions(question.packet.family, **options)
    return explain(question, forwardings, chosen, HOST)


def rules(found: Explanation, backend: str = "") -> list[dict[str, str]]:
    outcomes: Any = found.view()["outcomes"]
    chosen: list[dict[str, str]] = next(o["rules"] for o in outcomes if backend in (o["backend"] or ""))
    return chosen


def meanings(found: Explanation, backend: str = "") -> list[str]:
    return [f"{rule['chain']}: {rule['meaning']}" for rule in rules(found, backend)]


def test_steps_are_the_table_s_own() -> None:
    found = explanation_of("10.10.0.9", "web", WEB)
    assert found.summary == "10.10.0.9 -> 10.96.0.20:80/tcp is balanced over 2 backends, masqueraded"
    assert {rule["table"] for rule in rules(found)} == {"ip vipd"}
    assert meanings(found, "1.11") == [
        "prerouting: on to dispatch",
        "dispatch: by address and port: 10.96.0.20:80/tcp of web",
        "handover: the chain for services of its kind: forwarded-random-4",
        "forwarded-random-4: marked for masquerade, unless from this host",
        "forwarded-random-4: on to random-4",
        "random-4: flow marked as vipd's",
        "random-4: one of 4 slots at random: 3 of them",
        "random-4: DNAT to the backend in that slot: 10.244.1.11:8080",
        "postrouting: on to counting",
        "counting: flow counted, tcp",
        "postrouting: this host's address becomes the source",
    ]
    assert meanings(found, "1.10")[6] == "random-4: one of 4 slots at random: slot 0"
    number = TableNumbers(Family.IPV4).chain("forwarded-random-4")
    assert [rule["element"] for rule in rules(found, "1.11") if rule["element"]] == [
        f"10.96.0.20 . tcp . 80 : {number}",
        f"{number} : jump forwarded-random-4",
        "10.96.0.20 . tcp . 80 . 0.0.0.1 : 10.244.1.11 . 8080",
    ]
    assert all('comment "' not in rule["rule"] for rule in rules(found))


def test_every_rule_on_the_way_has_a_meaning_of_its_own() -> None:
    """None is left as nft spells it, whatever kind of service it is for."""
    limited = ExternalAddress("198.51.100.5", allow_from=("10.10.0.0/16",))
    kinds: list[dict[str, Any]] = [
        {"affinity_timeout": 600},
        {"balance": Balance.SOURCE_HASH},
        {"balance": Balance.ROUND_ROBIN, "masquerade": Masquerade.HAIRPIN},
        {
            "external_policy": TrafficPolicy.LOCAL,
            "local_endpoints": WEB.endpoints[:1],
            "affinity_timeout": 60,
        },
        {"masquerade": Masquerade.OFF_CLUSTER},
        {"allow_from": ("10.10.0.0/16", "203.0.113.7/32"), "allow_host_inside": True},
        {"endpoints": (), "has_endpoints": False},
        {"endpoints": (), "has_endpoints": False, "refusal": RejectAction.DROP},
    ]
    for kind in kinds:
        web = replace(WEB, node_port=30080, external_addresses=(limited,), **kind)
        for source in ("10.10.0.9", "10.244.1.10", "203.0.113.7", "local"):
            for target in ("web", "198.51.100.5:80", "192.168.100.1:30080", "10.96.0.20:81"):
                found = explanation_of(source, target, web, cluster_cidrs=("10.244.0.0/16",))
                view: Any = found.view()
                for rule in (rule for outcome in view["outcomes"] for rule in outcome["rules"]):
                    words = (" set ", " . ", "daddr", "saddr", "mark set")
                    assert not any(word in rule["meaning"] for word in words), rule


def test_a_client_s_own_slot_is_told() -> None:
    hashed = replace(WEB, balance=Balance.SOURCE_HASH)
    reached = {client: explanation_of(f"10.10.{client}.9", "web", hashed).backends() for client in range(40)}
    assert {len(backends) for backends in reached.values()} == {1}
    assert {backend.endpoint for (backend,) in reached.values()} == {"10.244.1.10:8080", "10.244.1.11:8080"}
    found = explanation_of("10.10.0.9", "web", hashed)
    assert any("one of 4093 slots, by the client's address: slot " in m for m in meanings(found))
    assert found.notes == ("web gives each client one backend by its address",)


@pytest.mark.parametrize(
    ("changes", "source", "target", "options"),
    [
        ({}, "10.10.0.9", "web", {}),
        ({"masquerade": Masquerade.HAIRPIN}, "10.244.1.10", "web", {}),
        ({"endpoints": (), "has_endpoints": False}, "10.10.0.9", "web", {}),
        ({"endpoints": (), "has_endpoints": False, "refusal": RejectAction.DROP}, "10.10.0.9", "web", {}),
        ({"endpoints": ()}, "10.10.0.9", "web", {}),
        ({"affinity_timeout": 10800}, "10.10.0.9", "web", {}),
        ({"node_port": 30080}, "10.10.0.9", "192.168.100.1:30080", {}),
        ({"node_port": 30080}, "10.10.0.9", "10.96.0.99:30080/tcp", {}),
        ({"node_port": 30080}, "local", "127.0.0.1:30080/tcp", {}),
        ({"health_port": 32100}, "10.10.0.9", "192.168.100.1:32100", {}),
        ({}, "10.10.0.9", "10.96.0.20:81", {}),
        ({}, "10.10.0.9", "10.96.0.20:81", {"reject_unused_ports": False}),
        ({}, "10.10.0.9", "10.96.0.20:80/udp", {}),
        ({}, "10.10.0.9", "1.2.3.4:5", {}),
    ],
)
def test_the_words_are_the_same_for_both_dataplanes(
    changes: dict[str, Any], source: str, target: str, options: dict[str, Any]
) -> None:
    web = replace(WEB, **changes)
    one, other = (
        explain(source, target, web, **options).view() for explain in (explanation_by_rules, explanation_of)
    )
    for key in ("packet", "service_port", "verdict", "summary", "reason", "hint", "notes", "backends"):
        assert one[key] == other[key], key


def test_a_source_that_may_not_and_one_that_may_but_finds_nobody() -> None:
    limited = ExternalAddress("198.51.100.5", allow_from=("203.0.113.0/24",))
    web = replace(WEB, external_addresses=(limited,))
    nowhere = replace(web, external_policy=TrafficPolicy.LOCAL)
    for ask_for in (explanation_of, explanation_by_rules):
        found = ask_for("10.10.0.9", "198.51.100.5:80", web)
        assert found.summary.endswith("is dropped: this source may not use web")
        assert found.reason == "allowed are 203.0.113.0/24"
        assert ask_for("203.0.113.9", "198.51.100.5:80", web).verdict == "delivered"
        missing = ask_for("203.0.113.9", "198.51.100.5:80", nowhere)
        assert missing.summary.endswith("is dropped: web has no backends on this host")


def test_forwardings_left_out_change_nothing() -> None:
    many = [
        forwarding(f"s{n}", f"10.96.{n}.1", *(["10.244.1.10"] if n % 3 else []), node_port=30000 + n)
        for n in range(60)
    ]
    itself = forwarding("itself", "10.97.0.2", "10.10.0.1", "10.244.1.10")
    keeping = forwarding("keeping", "10.97.0.3", "10.10.0.1", masquerade=Masquerade.HAIRPIN)
    local = {"external_policy": TrafficPolicy.LOCAL, "has_endpoints": True, "node_port": 30200}
    every = (*many, WEB, itself, keeping, forwarding("nowhere", "10.97.0.1", "10.244.1.11", **local))
    options = TableOptions(Family.IPV4)
    whole = parse_tables(render(every, options), Family.IPV4)
    for source in ("10.10.0.9", "10.10.0.1", "10.244.1.10"):
        targets = (
            "web",
            "s3",
            "s4",
            "itself",
            "keeping",
            "192.168.100.1:30005",
            "192.168.100.1:30200",
            "1.2.3.4:5",
        )
        for target in targets:
            question = ask(source, target, every, HOST)
            found = explain(question, every, options, HOST).trace.outcomes
            assert found == trace(whole, question.packet, Host(HOST)).outcomes


def test_a_backend_that_is_the_address_of_a_dead_service() -> None:
    """The table looks at an address once, before the translation, so nobody refuses it then."""
    web = replace(WEB, endpoints=(Endpoint("10.96.0.30", 80), Endpoint("10.244.1.10", 80)))
    found = explanation_of("10.10.0.9", "web", web, forwarding("dead", "10.96.0.30"))
    assert [(r.endpoint, r.share) for r in found.backends()] == [
        ("10.96.0.30:80", 0.5),
        ("10.244.1.10:80", 0.5),
    ]


def test_ipv6() -> None:
    six = forwarding("six", "fd00::20", "fd00:244::1", "fd00:244::2", affinity_timeout=600)
    found = explanation_of("fd00::9", "six", six)
    assert {r.endpoint: r.share for r in found.backends()} == {
        "[fd00:244::1]:8080": 0.5,
        "[fd00:244::2]:8080": 0.5,
    }
    assert rules(found)[1]["meaning"] == "by address and port: [fd00::20]:80/tcp of six"
