"""What `vipctl trace` makes of packets, of rules of others, and of a prediction that is another."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.node import Node
from tests.observe.empty_host import empty_host
from tests.observe.explain.asking import Declared, Json
from tests.observe.live_trace.tracing import PATIENCE, Predicting, predicting, traces
from vipd.model.service import Family

pytestmark = pytest.mark.root

SETTINGS = {"host_addresses": ["192.0.2.1", "127.0.0.1"]}
DECLARED = Declared(
    """
apiVersion: vipd/v1
services:
  - name: web
    address: 10.96.0.20
    ports: [{port: 80, protocol: tcp, target: 8080}]
    backends: [10.244.0.11]
  - {name: dead, address: 10.96.0.30, ports: [80/tcp], backends: []}
""",
    SETTINGS,
)
WEB, DEAD, SOURCE = "10.96.0.20:80/tcp", "10.96.0.30:80/tcp", "192.0.2.1"


class Tracing:
    """A host with vipd's rules, on which everything is at home, and a daemon that predicts."""

    def __init__(self, node: Node, daemon: Predicting) -> None:
        self.node, self.daemon = node, daemon

    def predict(self, target: str, view: Json) -> None:
        """From now on the daemon says this of packets to a target, whoever sends them."""
        self.daemon.predictions["", target] = view

    def sent(self, target: str = WEB, node: Node | None = None) -> Json:
        """What is said of a packet that is sent here."""
        words = ("--socket", str(self.daemon.socket), "trace", "--send", "-o", "json", target)
        ended = (node or self.node).run(
            sys.executable, "-m", "vipd.cli.main", *words, check=False, timeout=PATIENCE
        )
        assert ended.returncode in (0, 1), ended.stderr
        (found,) = traces(ended)
        return found | {"stderr": ended.stderr}


@pytest.fixture(scope="module")
def tracing() -> Iterator[Tracing]:
    with empty_host() as node, predicting() as daemon:
        node.run("ip", "address", "add", f"{SOURCE}/32", "dev", "lo")
        node.run("ip", "route", "add", "local", "10.244.0.0/16", "dev", "lo")
        node.run("ip", "route", "add", "10.96.0.0/16", "dev", "lo", "src", SOURCE)
        node.run("iptables-nft-restore", text=DECLARED.render(Family.IPV4))
        made = Tracing(node, daemon)
        for target in (WEB, DEAD):
            made.predict(target, DECLARED.explain(SOURCE, target))
        yield made


def changed(**changes: Any) -> Json:
    """What explain says of a packet to web, with one outcome changed."""
    view = DECLARED.explain(SOURCE, WEB)
    (outcome,) = view["outcomes"]
    return view | {"outcomes": [outcome | changes]}


def test_a_packet_that_stays_here_is_one_journey(tracing: Tracing) -> None:
    """It has one number on its way out, and another when it comes in again."""
    found = tracing.sent()
    assert (found["agrees"], found["differences"], found["prediction"]["share"]) == (True, [], 1)
    assert (found["verdict"], found["destination"]) == ("delivered", "10.244.0.11:8080")
    assert {"output", "postrouting", "input"} <= {rule["hook"] for rule in found["rules"]}
    assert all(not rule["table"].startswith("vipd-trace") for rule in found["rules"])
    found = tracing.sent(DEAD)
    assert (found["agrees"], found["verdict"], found["answer"]) == (True, "rejected", "connection refused")


CHAINS = [rule for rule in DECLARED.explain(SOURCE, WEB)["outcomes"][0]["rules"] if rule["table"] == "nat"]
DIFFERENCES: list[tuple[Json, list[str]]] = [
    ({"verdict": "rejected", "backend": None}, ["verdict: delivered in the kernel, rejected in explain"]),
    ({"verdict": "unchanged", "backend": None}, ["verdict: delivered in the kernel, unchanged in explain"]),
    (
        {"backend": "10.244.0.12:8080"},
        ["backend: 10.244.0.11:8080 in the kernel, 10.244.0.12:8080 in explain"],
    ),
    ({"masqueraded": True}, ["masqueraded: not masqueraded in the kernel, masqueraded in explain"]),
    # Chains of another dataplane are not compared.
    ({"rules": [{"table": "ip vipd", "chain": "dispatch"}]}, []),
]


def test_another_way_is_a_difference_in_a_field(tracing: Tracing) -> None:
    for changes, differences in DIFFERENCES:
        tracing.predict(WEB, changed(**changes))
        found = tracing.sent()
        assert (found["differences"], found["agrees"]) == (differences, not differences), changes
    without = [rule for rule in CHAINS if not rule["chain"].startswith("VIPD-SVC")]
    tracing.predict(WEB, changed(rules=without))
    found = tracing.sent()
    assert found["different_fields"] == ["chain"]
    assert "nat VIPD-SVC-" in found["differences"][0]
    tracing.predict(WEB, changed())


def test_groups_of_addresses_count_as_what_they_are_a_part_of(tracing: Tracing) -> None:
    some = [
        f"  - {{name: s{n}, address: 10.96.{n}.1, ports: [80/tcp], backends: [10.244.1.{n}]}}\n"
        for n in range(1, 40)
    ]
    text = DECLARED.text + "".join(some)
    grouped = Declared(text, SETTINGS | {"dispatch": "grouped"}).render(Family.IPV4)
    assert "VIPD-GRP-" in grouped
    tracing.node.run("iptables-nft-restore", text=grouped)
    found = tracing.sent()
    tracing.node.run("iptables-nft-restore", text=DECLARED.render(Family.IPV4))
    assert any(rule["chain"].startswith("VIPD-GRP-") for rule in found["rules"])
    assert found["differences"] == []


OUT = "type nat hook output priority 50; policy accept"
BEHIND = "type nat hook postrouting priority 90; policy accept"
FILTER = "type filter hook output priority 10; policy accept"
FOREIGN: list[tuple[str, str, str, bool]] = [
    # the rule of somebody else, and what becomes of the packet: verdict and whether it is masqueraded
    (
        "iptables",
        '-t nat -A POSTROUTING -m comment --comment "no -j MASQUERADE here" -j RETURN',
        "delivered",
        False,
    ),
    ("iptables", '-t nat -A POSTROUTING -j LOG --log-prefix "then -j MASQUERADE "', "delivered", False),
    ("iptables", "-t nat -A POSTROUTING -o lo -j MASQUERADE --random-fully", "delivered", True),
    ("iptables", '-A OUTPUT -p tcp -m comment --comment "-j ACCEPT" -j REJECT', "rejected", False),
    ("iptables", "-A OUTPUT -p tcp --dport 8080 -j DROP", "dropped", False),
    (BEHIND, 'counter accept comment "masquerade"', "delivered", False),
    (BEHIND, 'oifname "lo" masquerade fully-random', "delivered", True),
    (BEHIND, "tcp dport 8080 snat ip to 127.0.0.1:1024-2048", "delivered", True),
    (BEHIND, "tcp dport 8080 jump masquerades", "delivered", False),
    (FILTER, 'tcp dport 8080 log prefix "reject " drop', "dropped", False),
    (FILTER, "tcp dport 8080 reject with tcp reset", "rejected", False),
    (FILTER, "ct status snat accept", "delivered", False),
]


def test_what_a_rule_does_is_read_from_its_statement(tracing: Tracing) -> None:
    wrong = []
    for chain, rule, verdict, masqueraded in FOREIGN:
        if chain == "iptables":
            tracing.node.run("sh", "-c", f"iptables {rule}")
        else:
            table = f"table ip wall {{ chain masquerades {{ }}; chain c {{ {chain}; {rule}; }}; }}"
            tracing.node.run("nft", "-f", "-", text=table)
        found = tracing.sent()
        if chain == "iptables":
            tracing.node.run("sh", "-c", f"iptables {rule.replace('-A ', '-D ')}")
        else:
            tracing.node.run("nft", "delete", "table", "ip", "wall")
        if (found["verdict"], found["masqueraded"]) != (verdict, masqueraded):
            wrong.append((rule, found["verdict"], found["masqueraded"]))
        if verdict != "delivered":
            assert (found["agrees"], found["rules"][-1]["vipd"]) == (False, False), rule
    assert wrong == []


SCRIPT = "#!/bin/sh\necho '{said}'\necho 'no such luck' >&2\nexit {code}\n"


@pytest.mark.parametrize(
    ("said", "code"), [("", 4), ("# handle 3 chain {", 0), (f"rule # handle {'9' * 5000}", 0)]
)
def test_what_cannot_be_read_is_said_and_is_no_difference(
    tracing: Tracing, tmp_path: Path, said: str, code: int
) -> None:
    """Whether the rule that ended the packet refuses or drops is not known."""
    for name in ("nft", *(f"iptables{kind}" for kind in ("", "-save", "-nft", "-nft-save"))):
        (tmp_path / name).write_text(SCRIPT.format(said=said, code=code))
        (tmp_path / name).chmod(0o755)
    blind = tracing.node.with_environment(PATH=f"{tmp_path}:{os.environ['PATH']}")
    for verdict in ("rejected", "dropped"):
        view = json.loads(json.dumps(DECLARED.explain(SOURCE, DEAD)))
        view["outcomes"][0]["verdict"] = verdict
        tracing.predict(DEAD, view)
        found = tracing.sent(DEAD, blind)
        assert "cannot be read" in found["stderr"]
        assert found["differences"] == []
    # Nor is it whether a rule would have masqueraded a source that stays the same.
    for masqueraded in (True, False):
        tracing.predict(WEB, changed(masqueraded=masqueraded))
        assert tracing.sent(WEB, blind)["differences"] == []
    tracing.predict(DEAD, DECLARED.explain(SOURCE, DEAD))
    tracing.predict(WEB, changed())
