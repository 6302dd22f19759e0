"""`GET /v1/explain` of the real server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

from tests.api.serving import DNS, Api, served
from tests.api.test_hostile_requests import WORDS, encoded
from tests.dataplane.fake_dataplane import FakeDataplane
from vipd.api import explain_answers, explain_routes
from vipd.api.explain_routes import MAX_CONCURRENT
from vipd.api.peers import Permission
from vipd.dataplane.iptables.options import RuleOptions
from vipd.dataplane.nftables.options import TableOptions
from vipd.model.service import Family
from vipd.observe.explain.host_rules import HostState
from vipd.observe.explain.rule_words import Options


@dataclass(slots=True)
class Explained(FakeDataplane):
    """A fake whose rules would be vipd's defaults."""

    by_table: bool = False

    def options_of(self, family: Family) -> Options:
        return TableOptions(family) if self.by_table else RuleOptions(family)

    def host_addresses(self) -> frozenset[str]:
        return frozenset({"192.0.2.1"})


def wired(api: Api) -> None:
    api.dataplane = Explained()


def wired_by_table(api: Api) -> None:
    api.dataplane = Explained(by_table=True)


@pytest.mark.parametrize(("wire", "table"), [(wired, "nat"), (wired_by_table, "ip vipd")])
def test_it_answers_of_the_daemon_s_own_services(wire: Callable[[Api], None], table: str) -> None:
    async def story(api: Api) -> None:
        await api.add(DNS)
        answer = await api.ask("GET", "/v1/explain?from=10.10.0.9&target=10.96.0.10%3A53%2Fudp")
        found = answer.body["explanation"]
        assert found["service_port"] == "kube-system/kube-dns"
        assert {b["endpoint"]: b["share"] for b in found["backends"]} == {
            "10.244.0.5:53": 0.333333,
            "10.244.0.6:53": 0.666667,
        }
        outcome = found["outcomes"][0]
        assert table in {rule["table"] for rule in outcome["rules"]}
        assert found["notes"] == []
        named = await api.ask("GET", "/v1/explain?from=local&target=kube-system%2Fkube-dns")
        assert named.body["explanation"]["packet"]["arriving"] == "local"

    served(story, wire)


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("from=local&target=nope", 404),
        ("from=local&target=10.96.0.10", 400),
        ("from=fd00%3A%3A1&target=10.96.0.10%3A53", 400),
        ("target=dns", 400),
        ("from=local", 400),
    ],
)
def test_what_cannot_be_answered(query: str, status: int) -> None:
    async def story(api: Api) -> None:
        assert (await api.ask("GET", f"/v1/explain?{query}")).status == status

    served(story, wired)


def test_rules_of_this_host_are_for_who_may_change_services(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    async def host(family: Family, prefix: str, addresses: Collection[str]) -> HostState:
        read.extend(addresses)
        return HostState(iptables={"nft": "*filter\n-A FORWARD -m quota --quota 5 -j DROP\nCOMMIT"})

    async def never(*_: object) -> bool:
        return False

    async def story(api: Api) -> None:
        await api.add(DNS)
        question = "/v1/explain?from=10.10.0.9&target=10.96.0.10%3A53%2Fudp"
        found = (await api.ask("GET", f"{question}&on_host=true")).body["explanation"]
        assert (found["verdict"], found["outcomes"]) == ("unknown", [])
        assert "filter: -A FORWARD -m quota --quota 5 -j DROP" in found["reason"]
        assert set(read) == {"10.10.0.9", "10.96.0.10", "10.244.0.5", "10.244.0.6"}
        assert (await api.ask("GET", question)).body["explanation"]["verdict"] == "delivered"
        monkeypatch.setattr(Permission, "may_change", never)
        assert (await api.ask("GET", f"{question}&on_host=true")).kind == "forbidden"
        assert (await api.ask("GET", question)).status == 200

    monkeypatch.setattr(explain_answers, "READ_HOST", host)
    served(story, wired_by_table)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (HostState({"nft": "*filter\n-A NOWHERE -j DROP\nCOMMIT"}), "iptables (nft): -A NOWHERE -j DROP"),
        (HostState(tables={"inet x": "table inet x {\nchain c {\n"}), "table inet x"),
        (HostState(unread=("table ip x: it printed more than 9 bytes",)), "could not be read: table ip x"),
    ],
)
def test_what_cannot_be_read_leaves_the_answer_open(
    monkeypatch: pytest.MonkeyPatch, host: HostState, reason: str
) -> None:
    async def read(family: Family, prefix: str, addresses: Collection[str]) -> HostState:
        return host

    async def story(api: Api) -> None:
        await api.add(DNS)
        question = "/v1/explain?from=10.10.0.9&target=10.96.0.10%3A53%2Fudp&on_host=true"
        found = (await api.ask("GET", question)).body["explanation"]
        assert (found["verdict"], found["backends"]) == ("unknown", [])
        assert reason in found["reason"]

    monkeypatch.setattr(explain_answers, "READ_HOST", read)
    served(story, wired_by_table)


def test_with_iptables_its_rules_must_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(family: Family, prefix: str, addresses: Collection[str]) -> HostState:
        return HostState(faults=("routes: why",))

    async def story(api: Api) -> None:
        await api.add(DNS)
        question = "/v1/explain?from=10.10.0.9&target=10.96.0.10%3A53%2Fudp&on_host=true"
        found = (await api.ask("GET", question)).body["explanation"]
        assert (found["verdict"], found["reason"]) == ("unknown", "the kernel has no rules of iptables")
        assert "not looked at: routes: why" in found["notes"]

    monkeypatch.setattr(explain_answers, "READ_HOST", read)
    served(story, wired)


def test_a_dataplane_without_such_rules() -> None:
    async def story(api: Api) -> None:
        assert (await api.ask("GET", "/v1/explain?from=local&target=dns")).kind == "invalid"

    served(story)


def many(api: Api) -> None:
    """4,000 services, and one of so many backends that explaining it takes a second."""
    wired(api)
    blocks = [
        f"  - {{name: s{n}, address: 10.{96 + n // 50000}.{n // 250 % 200}.{n % 250 + 1}, ports: 80, "
        f"backends: [10.244.{n // 250 % 200}.{n % 250 + 1}]}}\n"
        for n in range(4_000)
    ]
    backends = ", ".join(f"10.245.{n // 250}.{n % 250 + 1}" for n in range(1_000))
    blocks.append(f"  - {{name: large, address: 10.97.255.1, ports: 80, backends: [{backends}]}}\n")
    api.declare("many.yaml", *blocks)


@pytest.mark.slow
def test_the_loop_goes_on_while_a_large_table_is_explained() -> None:
    """However long it takes, the loop misses but a part of it; before, all of it."""

    async def story(api: Api) -> None:
        await api.until(lambda: len(api.reconciler.services) == 4_001)
        for target in ("large", "10.96.3.3%3A81"):
            began = last = time.perf_counter()
            asked = asyncio.ensure_future(api.ask("GET", f"/v1/explain?from=10.10.0.9&target={target}"))
            longest = 0.0
            while not asked.done():
                await asyncio.sleep(0)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            assert (await asked).status == 200
            if target == "large":
                took = time.perf_counter() - began
                assert longest < took / 3, f"{longest:.3f} s of {took:.3f} s"

    served(story, many)


def test_so_many_questions_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    free, running = threading.Event(), []

    def slow(*_: object) -> dict[str, object]:
        running.append(1)
        free.wait(60)
        return {"service_port": None, "backends": []}

    monkeypatch.setattr(explain_answers, "answer", slow)
    monkeypatch.setattr(explain_routes, "MAX_QUEUED", 3)

    async def story(api: Api) -> None:
        query = "/v1/explain?from=local&target=dns"
        asked = [asyncio.ensure_future(api.ask("GET", query)) for _ in range(MAX_CONCURRENT + 3)]
        await api.until(lambda: len(running) == MAX_CONCURRENT and api.begun >= len(asked))
        assert (await api.ask("GET", query)).kind == "conflict"
        assert (await api.ask("GET", "/v1/version")).status == 200
        assert len(running) == MAX_CONCURRENT
        free.set()
        assert {(await one).status for one in asked} == {200}
        assert (await api.ask("GET", query)).status == 200

    served(story, wired)


def test_hostile_words_are_no_fault() -> None:
    async def story(api: Api) -> None:
        await api.add(DNS)
        for word in map(encoded, WORDS):
            for query in (f"from={word}&target=10.96.0.10%3A53%2Fudp", f"from=local&target={word}"):
                assert (await api.ask("GET", f"/v1/explain?{query}")).status < 500, query[:200]

    served(story, wired)


def test_the_daemon_imports_no_simulator_before_the_first_question() -> None:
    code = "import sys, vipd.__main__; print([name for name in sys.modules if 'simulator' in name])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
