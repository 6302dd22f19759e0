"""Changes of what is declared: what each does to the store, and which are refused, with the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.inside import Answer, Vipd, declare, running
from tests.lab.stored import stored as on_disk
from tests.lab.stories import story_of

Json = dict[str, Any]

DNS: Json = {
    "name": "dns",
    "address": "10.96.0.10",
    "ports": ["53/udp"],
    "backends": ["10.244.0.5", {"address": "10.244.0.6", "weight": 2}],
}
WEB: Json = {"name": "web", "address": "10.96.0.11", "ports": ["80/tcp"]}
FILED = "  - {name: filed, address: 10.96.0.20, ports: [53/udp], backends: [10.244.0.5]}\n"
NAMED: Json = WEB | {"name": "named", "address": "10.96.0.33", "backends": ["srv:_x._tcp.a.b", "dns:a.b:80"]}
TEXT = (Path(__file__).parent / "operations.txt").read_text()
CHANGED, REFUSED = TEXT.replace("DNS", json.dumps(DNS)).replace("WEB", json.dumps(WEB)).split("\n## Refusals")


def with_filed(vipd: Vipd) -> None:
    vipd.declare(FILED)


async def ask(vipd: Vipd, request: str) -> Answer:
    """Send a request such as `DELETE /v1/services/dns`, with its body as JSON behind it."""
    method, path, *body = request.split(" ", 2)
    return await vipd.ask(method, path, json.loads(body[0]) if body else None)


async def stored(vipd: Vipd) -> dict[str, Json]:
    """What is exported, by name, without the service of a file."""
    exported = (await vipd.ask("GET", "/v1/export")).body["services"]
    return {service["name"]: service for service in exported if service["name"] != "filed"}


async def begin(vipd: Vipd, *specs: Json) -> dict[str, Json]:
    """The store holds these and nothing else."""
    answer = await vipd.ask("POST", "/v1/apply", {"services": list(specs), "prune": True})
    assert answer.status == 200, answer
    return await stored(vipd)


@story_of(running, with_filed)
async def test_what_each_change_does(vipd: Vipd) -> None:
    for change in CHANGED.split("\n\n")[1:]:
        name, *lines = change.strip().splitlines()
        parts = dict(line.split(": ", 1) for line in lines)
        began = await begin(vipd, *yaml.safe_load(parts["before"]))
        answer = await ask(vipd, parts["request"])
        assert answer.status == 200, (name, answer)
        results = {each["name"]: each["action"] for each in answer.body["results"]}
        assert results == yaml.safe_load(parts["results"]), name
        found, after = await stored(vipd), yaml.safe_load(parts["after"])
        assert found.keys() == after.keys(), name
        for service, fields in after.items():
            assert {key: found[service].get(key) for key in fields} == fields, name
        assert answer.body["changed"] is (found != began), name
        assert (await vipd.service("filed"))["spec"]["backends"] == ["10.244.0.5"], name


@story_of(running, with_filed)
async def test_what_is_refused_changes_nothing_and_says_why_or_what_to_do(vipd: Vipd) -> None:
    before = await begin(vipd, DNS, WEB | {"address": "10.96.0.30"}, NAMED)
    differing = []
    for refusal in REFUSED.partition("\n\n")[2].replace("\n    ", "\0").splitlines():
        expected, request = refusal.split("\0")
        kind, _, words = expected.partition(": ")
        answer = await ask(vipd, request)
        error = answer.body.get("error", {})
        said = " ".join(str(error.get(key)) for key in ("what", "why", "hint"))
        if answer.kind != kind or words not in said:
            differing.append((request, answer.kind, said))
    assert not differing
    assert await stored(vipd) == before


@story_of(running)
async def test_every_problem_of_a_request_is_told_at_once_with_its_place(vipd: Vipd) -> None:
    many = await vipd.add({"address": "10.96.0.300", "ports": ["99999/tcp"], "colour": 1})
    assert len(many.body["error"]["problems"]) == 3
    one = (await vipd.add(DNS | {"colour": "red"})).body["error"]
    assert one["what"] == 'unknown key "colour"'
    assert one["problems"] == [f"{one['what']}; {one['hint']}"]
    (placed,) = (await vipd.add(DNS | {"backends": ["10.244.0.5", "oops"]})).body["error"]["problems"]
    assert placed.startswith("backends[1]: ")
    specs = [{"name": name, "address": name, "ports": [1]} for name in ("x", "y")]
    both = "\n".join((await vipd.ask("POST", "/v1/apply", {"services": specs})).body["error"]["problems"])
    assert '"x"' in both
    assert '"y"' in both


@pytest.mark.parametrize("fallback", [False, True])
@story_of(running, with_filed)
async def test_what_names_resolved_to_is_neither_exported_nor_stored(vipd: Vipd, *, fallback: bool) -> None:
    backends = ["10.244.0.5", {"dns": "a.b", "port": 80}]
    keys: Json = {"fallback": {"backends": backends}} if fallback else {"backends": backends}
    served = {key: value for key, value in DNS.items() if key != "backends"} | keys
    vipd.names["dns:a.b"] = ["10.244.7.7"]
    await vipd.add(served)
    await vipd.until(lambda: "10.244.7.7" in str(vipd.kernel.serving()) or fallback)
    grown = await vipd.ask("PATCH", "/v1/services/dns", {"service": {"affinity": "client-ip"}})
    assert grown.status == 200, grown
    assert (await stored(vipd))["dns"] == served | {"affinity": "client-ip"}
    assert "10.244.7.7" not in on_disk(vipd.state_dir)


OLD = """apiVersion: vipd/v1
services:
  - {name: dns, address: 10.96.0.10, ports: [53/udp], backends: [10.244.0.5]}
  - {name: web, address: 10.96.0.30, ports: [80/tcp], backends: [10.96.0.10, 10.244.0.9]}
  - {name: own, address: 10.96.0.3, ports: [53/udp], backends: ['10.96.0.3:54']}
  - {name: body, address: 10.96.0.4, ports: 80, backends: 10.244.0.6, check: {type: http, body: '(?=a)a'}}
  - {name: exec, address: 10.96.0.6, ports: 80, backends: 10.244.0.8, check: {type: exec, command: /x -q}}
  - {name: port, address: 10.96.0.5, ports: [{name: x, port: 53, protocol: udp}, {name: y, port: 80}],
     backends: [{address: 10.244.0.7, ports: {x: 53}}], check: tcp}
"""
"""What an earlier version has stored: a later rule forbids a part of each service but the first."""


def test_what_an_earlier_version_stored_serves_though_a_later_rule_forbids_it_and_may_be_mended() -> None:
    def prepare(vipd: Vipd) -> None:
        assert [problem.line for problem in declare(OLD).problems] == [4, 5, 6, 7, 9]
        (vipd.state_dir / "services.yaml").write_text(OLD)

    async def story(vipd: Vipd) -> None:
        status = await vipd.status()
        assert status["state"] == "in-sync"
        assert [status[key] for key in ("services", "ready", "backends")] == [6, 7, 7]
        assert [(source["problems"], source["refused"]) for source in status["sources"]] == [([], [])] * 2
        backend, port = status["warnings"]
        assert backend.startswith("10.96.0.10: both a virtual IP and the address of a backend of another")
        assert port.startswith("port: the check of 10.244.0.7 finds no port, so that it serves unchecked")
        assert vipd.kernel.names() == {"dns", "web", "own", "body", "exec", "port"}
        assert vipd.kernel.serving()["own 10.96.0.3:53/udp"] == {"10.96.0.3:54": 1}
        assert (vipd.state_dir / "services.yaml.taken-over").read_text() == OLD
        for request in (
            'PATCH /v1/services/web/backends/10.244.0.9 {"weight": 2}',
            'DELETE /v1/services/web/backends {"backends": ["10.96.0.10"]}',
        ):
            answer = await ask(vipd, request)
            assert answer.body.get("changed"), answer
        assert (await stored(vipd))["web"]["backends"] == [{"address": "10.244.0.9", "weight": 2}]

    running(story, prepare, exec_checks="anywhere")


@story_of(running)
async def test_the_same_declaration_has_the_same_version(vipd: Vipd) -> None:
    await vipd.add(DNS)
    versions = [(await vipd.ask("GET", "/v1/services/dns")).body["version"]]
    for fallback in ("drop", None):
        path = f"/v1/services/dns?version={versions[-1]}"
        assert (await vipd.ask("PATCH", path, {"service": {"fallback": fallback}})).status == 200
        versions.append((await vipd.ask("GET", "/v1/services/dns")).body["version"])
    assert versions[0] == versions[2] != versions[1]
