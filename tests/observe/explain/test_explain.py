"""What `vipctl explain` says of a packet, and that it says the same with both dataplanes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.inside import DATAPLANES
from tests.observe.explain.asking import Declared, Json
from tests.observe.terminal import on_terminal

HOST = ["10.10.0.1", "127.0.0.1", "192.168.100.1", "fd00:10::1", "::1", "fe80::1"]
CLIENT, BACKEND = "10.10.0.9", "10.244.1.10"
WEB: Json = {
    "name": "web",
    "address": "10.96.0.20",
    "ports": [{"port": 80, "protocol": "tcp", "target": 8080}],
    "backends": [BACKEND, {"address": "10.244.1.11", "weight": 3}],
}
SIX = WEB | {"name": "six", "address": "fd00::20", "backends": ["fd00:244::1", "fd00:244::2"]}
DEAD = WEB | {"name": "dead", "address": "10.96.0.30", "backends": []}
DEAD_UDP = DEAD | {"ports": ["80/udp"]}
NODE = WEB | {"ports": [{"port": 80, "protocol": "tcp", "target": 8080, "node_port": 30080}]}
ALLOWED = ["203.0.113.0/24", "198.51.100.0/28"]
LIMITED = WEB | {"external_addresses": [{"address": "198.51.100.5", "allow_from": ALLOWED}]}
PRIVATE = NODE | {"allow_from": ALLOWED}
ELSEWHERE = WEB | {"traffic_policy": {"internal": "local"}}
HEALTH = NODE | {"traffic_policy": {"external": "local"}, "health_port": 32100}


def declared(*services: Json, **settings: object) -> Declared:
    text = json.dumps({"apiVersion": "vipd/v1", "services": services})
    return Declared(text, {"host_addresses": HOST, "node_name": "here"} | settings)


IS_WEB = f"{CLIENT} -> 10.96.0.20:80/tcp"
NOT_ALLOWED = {"verdict": "dropped", "reason": f"allowed are {', '.join(ALLOWED)}"}
UNCHANGED = "is left alone: no service has this address and port"
UNUSED = {"verdict": "rejected", "summary": "is refused: no service has this address and port"}
ALIAS = "30080 is a node port of web, but not at this address"

CASES: dict[str, tuple[Declared, str, str, Json]] = {
    "balanced and masqueraded": (
        declared(WEB),
        CLIENT,
        "10.96.0.20:80",
        {
            "verdict": "delivered",
            "summary": f"{IS_WEB} is balanced over 2 backends, masqueraded",
            "backends": [("10.244.1.10:8080", 0.25, True), ("10.244.1.11:8080", 0.75, True)],
            "service_port": "web",
            "reason": "",
            "hint": "",
            "notes": [],
        },
    ),
    "one backend that sees the client": (
        declared(WEB | {"backends": [BACKEND]}),
        "local",
        "web",
        {
            "summary": "10.10.0.1 -> 10.96.0.20:80/tcp goes to 10.244.1.10:8080, not masqueraded",
            "notes": ["10.10.0.1 is assumed as the source; --from ADDRESS tells another"],
            "arriving": "local",
        },
    ),
    "a backend that meets itself": (
        declared(WEB | {"masquerade": "hairpin"}),
        BACKEND,
        "web",
        {
            "backends": [("10.244.1.10:8080", 0.25, True), ("10.244.1.11:8080", 0.75, False)],
            "summary": "masqueraded for some",
        },
    ),
    "IPv6": (
        declared(SIX),
        "fd00::9",
        "six",
        {"backends": [("[fd00:244::1]:8080", 0.5, True), ("[fd00:244::2]:8080", 0.5, True)]},
    ),
    "no backend, TCP": (
        declared(DEAD),
        CLIENT,
        "dead",
        {
            "verdict": "rejected",
            "summary": "is refused: no backend of dead is ready",
            "reason": "refused by a TCP reset: clients see connection refused",
            "backends": [],
        },
    ),
    "no backend, UDP": (
        declared(DEAD_UDP),
        CLIENT,
        "10.96.0.30:80/udp",
        {
            "verdict": "rejected",
            "reason": "refused by an ICMP error, port unreachable: clients see connection refused",
        },
    ),
    "no backend, and silence is wanted": (
        declared(DEAD | {"fallback": "drop"}),
        CLIENT,
        "dead",
        {"verdict": "dropped", "summary": "is dropped: no backend of dead is ready"},
    ),
    "no backend on this host": (
        declared(ELSEWHERE),
        CLIENT,
        "web",
        {"verdict": "dropped", "summary": "is dropped: web has no backends on this host"},
    ),
    "a source that may not use an external address": (
        declared(LIMITED),
        CLIENT,
        "198.51.100.5:80",
        NOT_ALLOWED | {"summary": "is dropped: this source may not use web"},
    ),
    "a source that may": (declared(LIMITED), "203.0.113.9", "198.51.100.5:80", {"verdict": "delivered"}),
    "a source that may, and nobody serves it": (
        declared(LIMITED | {"traffic_policy": {"external": "local"}}),
        "203.0.113.9",
        "198.51.100.5:80",
        {"summary": "is dropped: web has no backends on this host"},
    ),
    **{
        f"a source that may not use a service: {target}": (
            declared(PRIVATE),
            CLIENT,
            target,
            NOT_ALLOWED | {"summary": "is dropped: this source may not use web"},
        )
        for target in ("web", "10.96.0.20:80", "192.168.100.1:30080")
    },
    "one that may": (declared(PRIVATE), "203.0.113.9", "web", {"verdict": "delivered"}),
    "a port that nobody has": (
        declared(WEB),
        CLIENT,
        "10.96.0.20:81",
        UNUSED | {"hint": "10.96.0.20 serves 80/tcp"},
    ),
    "a protocol that nobody has": (
        declared(WEB),
        CLIENT,
        "10.96.0.20:80/udp",
        UNUSED | {"hint": "10.96.0.20 serves 80/tcp"},
    ),
    "unused ports that are left alone": (
        declared(WEB, reject_unused_ports=False),
        CLIENT,
        "10.96.0.20:81",
        {"verdict": "unchanged", "summary": UNCHANGED},
    ),
    "an address that nobody has": (
        declared(WEB),
        CLIENT,
        "10.96.0.99:80",
        {"verdict": "unchanged", "summary": UNCHANGED, "hint": "", "backends": []},
    ),
    "a node port": (declared(NODE), CLIENT, "192.168.100.1:30080", {"verdict": "delivered"}),
    "a node port of another protocol": (
        declared(NODE),
        CLIENT,
        "192.168.100.1:30080/udp",
        {"verdict": "unchanged", "hint": "there is node port 30080/tcp (web)"},
    ),
    "a node port elsewhere": (
        declared(NODE),
        CLIENT,
        "10.96.0.99:30080/tcp",
        {"verdict": "unchanged", "hint": "there is node port 30080/tcp (web), at this host's own addresses"},
    ),
    "a node port at 127.0.0.1": (
        declared(NODE),
        "local",
        "127.0.0.1:30080/tcp",
        {"verdict": "unchanged", "hint": ALIAS},
    ),
    "a node port at another of the host's addresses": (
        declared(NODE, node_port_addresses=["10.10.0.0/24"]),
        CLIENT,
        "192.168.100.1:30080",
        {"verdict": "unchanged", "hint": ALIAS},
    ),
    "a health port": (
        declared(HEALTH),
        CLIENT,
        "192.168.100.1:32100",
        {"summary": "is left to this host: 32100 is the health port of web"},
    ),
    "affinity": (
        declared(WEB | {"affinity": {"by": "client-ip", "timeout": "3h"}}),
        CLIENT,
        "web",
        {"notes": ["a client that connected within 3h keeps its backend; the shares are for others"]},
    ),
    "affinity to one backend": (
        declared(WEB | {"backends": [BACKEND], "affinity": {"by": "client-ip", "timeout": "3h"}}),
        CLIENT,
        "web",
        {"notes": []},
    ),
    "a program that is a client of its own port": (
        declared(WEB),
        f"{CLIENT}:4000",
        "web",
        {"source_port": 4000},
    ),
    "an address of this host": (declared(WEB), "10.10.0.1", "web", {"arriving": "local"}),
    "127.0.0.1, which every host has": (
        declared(WEB, host_addresses=["192.0.2.1"]),
        "127.0.0.1",
        "127.0.0.1:1",
        {"arriving": "local"},
    ),
    "the lowest address that is no link's": (
        declared(WEB, host_addresses=["169.254.0.5", "192.0.2.10", "192.0.2.9", "127.0.0.1"]),
        "local",
        "web",
        {"source": "192.0.2.9"},
    ),
    "a program here, and the address that fits": (
        declared(WEB),
        "local",
        "192.168.100.1:1",
        {"source": "192.168.100.1"},
    ),
    "both families, the source's": (
        declared(WEB | {"address": ["10.96.0.20", "fd00::20"], "backends": [BACKEND, "fd00:244::1"]}),
        "fd00::9",
        "web",
        {"destination": "fd00::20"},
    ),
    "both families, from here": (
        declared(WEB | {"address": ["10.96.0.20", "fd00::20"], "backends": [BACKEND, "fd00:244::1"]}),
        "local",
        "web",
        {"destination": "10.96.0.20"},
    ),
    "an IPv6 target, from here": (declared(SIX), "local", "[fd00::20]:80", {"source": "fd00:10::1"}),
}
SAME = ("packet", "service_port", "verdict", "summary", "reason", "hint", "notes", "backends")


def seen(view: Json, expected: Json) -> Json:
    """What a view has in the place of what is expected: of sentences the end, of a hint the first part."""
    flat = view | view["packet"]
    flat["backends"] = [(b["endpoint"], round(b["share"], 6), b["masqueraded"]) for b in view["backends"]]
    flat["hint"] = view["hint"].partition(";")[0]
    found = {name: flat[name] for name in expected}
    if found.get("summary", "").endswith(expected.get("summary", "")):
        found |= {"summary": expected["summary"]} if "summary" in expected else {}
    return found


def test_what_is_said_of_a_packet() -> None:
    wrong: dict[str, Any] = {}
    for name, (services, source, target, expected) in CASES.items():
        one, other = (services.explain(source, target, dataplane) for dataplane in DATAPLANES)
        if (said := seen(one, expected)) != expected:
            wrong[name] = said
        if differing := [key for key in SAME if one[key] != other[key]]:
            wrong[f"{name}, by nftables"] = {key: (one[key], other[key]) for key in differing}
    assert wrong == {}


FAULTS = {
    ("fd00::9", "10.96.0.20:80"): "fd00::9 and 10.96.0.20 are of different families",
    (CLIENT, "10.96.0.20:0"): "the port 0 is out of range",
    (CLIENT, "two"): "two has several ports",
    (CLIENT, ""): "no target is given",
    (f"{CLIENT}@2", "web"): f"{CLIENT}@2 has a weight",
    ("", "web"): "the address is empty",
}


def test_questions_without_an_answer() -> None:
    ports = [{"name": "a", "port": 80}, {"name": "b", "port": 81}]
    services = declared(WEB, WEB | {"name": "two", "address": "10.96.0.40", "ports": ports})
    for (source, target), what in FAULTS.items():
        ended = services.ask(source, target)
        assert (ended.code, ended.out) == (2, ""), (source, target)
        assert what in ended.err
        assert "hint: " in ended.err
    unknown = declared(SIX, host_addresses=["127.0.0.1", "fd00::1"]).ask("local", "10.96.0.20:80")
    assert "no address" in unknown.err


def test_how_kube_proxys_form_refuses() -> None:
    found = declared(DEAD, compat="kube-proxy", chain_prefix="KUBE").explain(CLIENT, "dead")
    assert found["reason"].startswith("refused by an ICMP error")
    assert "tcp-reset" not in found["outcomes"][0]["rules"][-1]["rule"]
    found = declared(DEAD).explain(CLIENT, "dead")
    assert "tcp-reset" in found["outcomes"][0]["rules"][-1]["rule"]
    assert found["outcomes"][0]["rules"][-1]["chain"] == "VIPD-SERVICES"


def test_a_client_s_own_slot_is_told() -> None:
    services = declared(WEB | {"balance": "source-hash"}, dataplane="nftables")
    reached = [services.explain(f"10.10.{n}.9", "web", "nftables")["backends"] for n in range(12)]
    assert {len(backends) for backends in reached} == {1}
    assert {backend["endpoint"] for (backend,) in reached} == {"10.244.1.10:8080", "10.244.1.11:8080"}
    found = services.explain(CLIENT, "web", "nftables")
    words = [rule["meaning"] for rule in found["outcomes"][0]["rules"]]
    assert any("one of 4093 slots, by the client's address: slot " in text for text in words)
    assert found["notes"] == ["web gives each client one backend by its address"]


def test_other_services_change_nothing() -> None:
    """Of many services those are compiled that a packet may meet."""
    some = [
        WEB
        | {"name": f"s{n}", "address": f"10.96.{n}.1", "backends": [BACKEND] if n % 3 else []}
        | {"ports": [{"port": 80, "target": 8080, "node_port": 30000 + n}]}
        for n in range(40)
    ]
    besides = [
        WEB | {"name": "itself", "address": "10.97.0.2", "backends": ["10.10.0.1", BACKEND]},
        WEB | {"name": "keeping", "address": "10.97.0.3", "backends": ["10.10.0.1"], "masquerade": "hairpin"},
        HEALTH | {"name": "nowhere", "address": "10.97.0.1", "ports": [{"port": 80, "node_port": 30200}]},
    ]
    targets = {
        "web": WEB,
        "s3": some[3],
        "s4": some[4],
        "192.168.100.1:30005": some[5],
        "192.168.100.1:30200": besides[2],
    }
    many = declared(WEB, *some, *besides)
    for target, own in targets.items():
        alone = declared(own)
        for source in (CLIENT, "10.10.0.1", BACKEND):
            for dataplane in DATAPLANES:
                one, other = (d.explain(source, target, dataplane) for d in (many, alone))
                for key in ("verdict", "summary", "backends"):
                    assert one[key] == other[key], (source, target, dataplane)
    # Whether a program reaches itself is looked up in one set of the table, whatever service it asks.
    itself = many.explain("10.10.0.1", "itself", "nftables")
    assert itself["summary"].endswith("is balanced over 2 backends, masqueraded for some")


STEPS = [
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


def test_steps_by_the_table() -> None:
    outcomes = declared(WEB).explain(CLIENT, "web", "nftables")["outcomes"]
    to_11 = next(o["rules"] for o in outcomes if "1.11" in o["backend"])
    assert [f"{rule['chain']}: {rule['meaning']}" for rule in to_11] == STEPS
    assert {rule["table"] for rule in to_11} == {"ip vipd"}
    first, second, third = (rule["element"] for rule in to_11 if rule["element"])
    number = first.removeprefix("10.96.0.20 . tcp . 80 : ")
    assert (second, third) == (
        f"{number} : jump forwarded-random-4",
        "10.96.0.20 . tcp . 80 . 0.0.0.1 : 10.244.1.11 . 8080",
    )
    assert all('comment "' not in rule["rule"] for rule in to_11)


def test_packets_of_no_service_walk_the_rules_that_all_walk() -> None:
    (outcome,) = declared(WEB).explain(CLIENT, "1.2.3.4:5")["outcomes"]
    assert [r["chain"] for r in outcome["rules"] if r["table"] == "nat"][:2] == [
        "PREROUTING",
        "VIPD-PREROUTING",
    ]
    assert declared().explain(CLIENT, "1.2.3.4:5")["outcomes"][0]["rules"] == []


KINDS: list[Json] = [
    {"affinity": {"by": "client-ip", "timeout": "10m"}},
    {"balance": "source-hash"},
    {"balance": "round-robin", "masquerade": "hairpin"},
    {"traffic_policy": {"external": "local"}, "affinity": {"by": "client-ip", "timeout": "1m"}},
    {"masquerade": "off-cluster"},
    {"allow_from": ["10.10.0.0/16", "203.0.113.7/32"]},
    {"backends": []},
    {"backends": [], "fallback": "drop"},
]


def test_no_rule_of_the_table_is_left_as_nft_spells_it() -> None:
    words = (" set ", " . ", "daddr", "saddr", "mark set")
    external = [{"address": "198.51.100.5", "allow_from": ["10.10.0.0/16"]}]
    sources = (CLIENT, BACKEND, "203.0.113.7", "local")
    for number, kind in enumerate(KINDS):
        own = {"cluster_cidrs": ["10.244.0.0/16"], "dataplane": "nftables"}
        services = declared(NODE | {"external_addresses": external} | kind, **own)
        for place, target in enumerate(("web", "198.51.100.5:80", "192.168.100.1:30080", "10.96.0.20:81")):
            outcomes = services.explain(sources[(number + place) % 4], target, "nftables")["outcomes"]
            told = [rule["meaning"] for outcome in outcomes for rule in outcome["rules"]]
            assert [text for text in told if any(word in text for word in words)] == []


@pytest.mark.parametrize("dataplane", DATAPLANES)
def test_long_names_of_chains_fit_the_screen(dataplane: str, tmp_path: Path) -> None:
    long = HEALTH | {"affinity": {"by": "client-ip", "timeout": "3h"}, "allow_from": ["10.0.0.0/8"]}
    long |= {"backends": [{"address": f"10.244.1.{n}", "node": "here"} for n in range(1, 30)]}
    services = declared(long | {"name": "a-service/with-quite-a-long-name"})
    file = tmp_path / "services.yaml"
    file.write_text(services.text)
    argv = [
        sys.executable,
        "-m",
        "vipd.cli.main",
        "explain",
        "-f",
        str(file),
        *services.words("--dataplane", dataplane),
    ]
    said = on_terminal([*argv, "--from", CLIENT, "192.168.100.1:30080"], 80)
    assert max(map(len, said.splitlines())) <= 80
    assert "Rules" in said


def test_the_option_has_the_last_word_over_the_setting() -> None:
    """The text of both ways: tests/cli/screens/explain.txt."""
    for setting, option in (("iptables", "nftables"), ("nftables", "iptables")):
        ended = declared(WEB, dataplane=setting).ask(CLIENT, "web", option)
        assert (ended.code, ended.err) == (0, "")
        assert ("VIPD-SERVICES" in ended.out) is (option == "iptables")
