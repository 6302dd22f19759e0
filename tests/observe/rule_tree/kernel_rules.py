"""Rules in a kernel, a daemon that says what it means by them, and `vipctl rules` of both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.cli.fake_daemon import FakeDaemon, fake_daemon
from tests.lab.inside import Vipd, running
from tests.lab.node import Node
from tests.observe.empty_host import empty_host
from tests.observe.explain.asking import Declared, Json
from tests.observe.resident import Ended, Resident
from vipd.model.service import Family

RESTORE = {Family.IPV4: "iptables-nft-restore", Family.IPV6: "ip6tables-nft-restore"}
OF_IPTABLES = {"ipv4": "iptables v1.8.9 (nf_tables)", "ipv6": "ip6tables v1.8.9 (nf_tables)"}
"""What a daemon says of where its rules are; the version is of when it started."""


class KernelRules:
    """A host whose rules a test writes. Its daemon answers once `meant` has told it what to."""

    def __init__(self, node: Node, fake: FakeDaemon) -> None:
        self.node, self._fake, self._vipctl = node, fake, Resident(node)

    def load(self, *texts: str, family: Family = Family.IPV4) -> None:
        """Replace all rules by these, of iptables or of nft; an empty one has none."""
        self.node.run("nft", "flush", "ruleset")
        for text in filter(None, texts):
            self.add(text, family)

    def add(self, text: str, family: Family) -> None:
        """Have these rules, too."""
        if text.startswith(("*", "#")):
            self.node.run(RESTORE[family], text=text)
        else:
            self.node.run("nft", "-f", "-", text=text)

    def meant(self, declared: Declared | None, **places: object) -> None:
        """A daemon with this declaration answers, with its rules in these places; None: none answers."""
        self._fake.answers.clear()
        if declared is None:
            return
        status, services = _views(declared)
        if places:
            status["dataplane"] |= places
        self._fake.answer("GET /v1/status", status)
        self._fake.answer("GET /v1/services", {"services": services})
        for service in services:
            self._fake.answer(f"GET /v1/services/{service['name']}", {"service": service})
            for forwarding in service["forwardings"]:
                for place in (*forwarding["frontends"], *forwarding["external"]):
                    self._fake.answer(f"GET /v1/services/{place}", {"service": service})

    def vipctl(self, *words: str) -> Ended:
        """`vipctl rules WORDS`."""
        return self._vipctl.run("--socket", str(self._fake.socket), "rules", *words)

    def rules(self, *words: str) -> Json:
        """What it says as JSON."""
        ended = self.vipctl(*words, "-o", "json")
        assert ended.code == 0, ended.err
        found: Json = json.loads(ended.out)["rules"]
        return found

    def end(self) -> None:
        """End the processes."""
        self._vipctl.end()


@contextmanager
def kernel_rules() -> Iterator[KernelRules]:
    """An empty host, without a daemon."""
    with (
        TemporaryDirectory(prefix="vipd-") as directory,
        empty_host() as node,
        fake_daemon(Path(directory) / "vipd.sock") as fake,
    ):
        made = KernelRules(node, fake)
        yield made
        made.end()


def _views(declared: Declared) -> tuple[Json, list[Json]]:
    """What a daemon with a declaration says of itself and of its services."""

    def prepare(vipd: Vipd) -> None:
        (vipd.services_dir / "declared.yaml").write_text(declared.text)

    async def story(vipd: Vipd) -> tuple[Json, list[Json]]:
        answer = await vipd.ask("GET", "/v1/services")
        assert answer.status == 200, answer.body
        services = answer.body["services"]
        return await vipd.status() | {"pid": 1}, services

    settings: dict[str, Any] = {**declared.settings}
    status, services = running(story, prepare, **settings)
    status.pop("apiVersion")
    if status["dataplane"]["name"] == "iptables":
        status["dataplane"] |= OF_IPTABLES
    return status, services


def nodes(trees: Sequence[Json], *kinds: str) -> Iterator[Json]:
    """Every node of some kinds, each with the name of the chain that it is in as `in`."""
    todo = [(node, "") for tree in trees for node in tree["nodes"]]
    while todo:
        node, chain = todo.pop(0)
        inner = node["name"] if node["kind"] == "chain" else chain
        todo += [(child, inner) for child in node.get("children", [])]
        if node["kind"] in kinds:
            yield node | {"in": chain}


def faults(found: Json) -> list[str]:
    """All that is said to be wrong."""
    return [fault for tree in (*found["shared"], *found["services"]) for fault in tree["faults"]]
