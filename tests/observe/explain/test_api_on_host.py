"""`GET /v1/explain?on_host=true`: rules of other programs, read or not."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.lab.inside import Vipd, running
from tests.observe.explain.test_api import DNS, QUESTION
from vipd.api import explain_answers
from vipd.api.peers import Permission
from vipd.model.service import Family
from vipd.observe.explain.host_rules import HostState

QUOTA = HostState({"nft": "*filter\n-A FORWARD -m quota --quota 5 -j DROP\nCOMMIT"})
HOSTS: list[tuple[str, HostState, str]] = [
    ("nftables", QUOTA, "filter: -A FORWARD -m quota --quota 5 -j DROP"),
    (
        "nftables",
        HostState({"nft": "*filter\n-A NOWHERE -j DROP\nCOMMIT"}),
        "iptables (nft): -A NOWHERE -j DROP",
    ),
    ("nftables", HostState(tables={"inet x": "table inet x {\nchain c {\n"}), "table inet x"),
    (
        "nftables",
        HostState(unread=("table ip x: it printed more than 9 bytes",)),
        "could not be read: table ip x",
    ),
    ("iptables", HostState(faults=("routes: why",)), "the kernel has no rules of iptables"),
]


@pytest.mark.parametrize(("dataplane", "host", "reason"), HOSTS)
def test_what_is_not_understood_leaves_the_answer_open(
    monkeypatch: pytest.MonkeyPatch, dataplane: str, host: HostState, reason: str
) -> None:
    asked_for: list[str] = []

    async def read(family: Family, prefix: str, addresses: Collection[str]) -> HostState:
        asked_for.extend(addresses)
        return host

    async def never(*_: object) -> bool:
        return False

    async def story(vipd: Vipd) -> None:
        await vipd.add(DNS)
        found = (await vipd.ask("GET", f"{QUESTION}&on_host=true")).body["explanation"]
        assert (found["verdict"], found["backends"], found["outcomes"]) == ("unknown", [], [])
        assert reason in found["reason"]
        assert [note for note in found["notes"] if "routes" in note] == [
            f"not looked at: {fault}" for fault in host.faults
        ]
        assert set(asked_for) == {"10.10.0.9", "10.96.0.10", "10.244.0.5", "10.244.0.6"}
        assert (await vipd.ask("GET", QUESTION)).body["explanation"]["verdict"] == "delivered"
        monkeypatch.setattr(Permission, "may_change", never)
        assert (await vipd.ask("GET", f"{QUESTION}&on_host=true")).kind == "forbidden"
        assert (await vipd.ask("GET", QUESTION)).status == 200

    monkeypatch.setattr(explain_answers, "READ_HOST", read)
    running(story, dataplane=dataplane)
