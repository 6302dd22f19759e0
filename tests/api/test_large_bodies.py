"""Whatever a body holds, reading it takes bounded memory, and a thread of its own when it is large; and what
many services come to is decided beside the event loop."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.serving import WEB, Api, served
from tests.faults.instrumented import standstills
from tests.model.samples import many_declared
from vipd.api import request_bodies
from vipd.declaration.native import parse_declaration
from vipd.declaration.operations import RefusedError, spec_of

MANY = 2000
CLIENT = "client"

HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no object": lambda: b"[]",
    "empty services": lambda: b'{"services":[' + b",".join([b"{}"] * 300_000) + b"]}",
    "numbers": lambda: b'{"services":[' + b",".join([b"1"] * 5_000_000) + b"]}",
    "lists": lambda: b'{"services":[' + b"[]," * 5_000_000 + b"[]]}",
    "lists in one service": lambda: b'{"services":[[' + b"[]," * 5_000_000 + b"[]]]}",
    "lists elsewhere": lambda: b'{"other":[' + b"[]," * 5_000_000 + b"[]]}",
    "brackets": lambda: b"[" * 15_000_000,
    "brackets in a service": lambda: b'{"services":[{"name":' + b"[" * 15_000_000,
    "braces": lambda: b'{"a":' * 3_000_000,
    "digits": lambda: b'{"prune":' + b"9" * 3_000_000 + b"}",
    "digits of a fraction": lambda: b'{"services":[{"a":0.' + b"3" * 3_000_000 + b"}]}",
    "digits of an exponent": lambda: b'{"services":[{"a":1e' + b"3" * 3_000_000 + b"}]}",
    "a text": lambda: b'{"services":[{"name":"' + b"x" * 15_000_000 + b'"}]}',
    "escapes": lambda: b'{"services":[{"name":"' + b'\\"' * 7_000_000 + b'"}]}',
    "texts without end": lambda: b'{"services":[' + b'"' * 1_000_001,
    "spaces": lambda: b" " * 15_000_000,
    "zeros": lambda: b"\x00" * 15_000_000,
    "two lists": lambda: b'{"services":[{}],"services":[{}]}',
    "no comma": lambda: b'{"services":[{} {}]}',
    "a comma too many": lambda: b'{"services":[{},]}',
    "no end": lambda: b'{"services":[{}',
    "half a surrogate pair": lambda: b'{"services":[{"name":"\\ud800"}]}',
}
"""Made when asked for: together they are 150 MB."""
REFUSED = [name for name in HOSTILE if name != "nothing"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_body_is_refused(name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        request_bodies._parse_body(lambda members, services: list(services or ()), HOSTILE[name]())
    assert caught.value.kind in ("malformed", "too-large")


MEMORY = """
import resource, sys
from tests.api.test_large_bodies import HOSTILE
from vipd.api import request_bodies
from vipd.declaration.operations import RefusedError, parse_services
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
raw = HOSTILE[sys.argv[1]]()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    request_bodies._parse_body(lambda members, services: parse_services(services), raw)
except RefusedError:
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.nightly(each_time="numbers")
@pytest.mark.parametrize("name", ["empty services", "numbers", "lists", "brackets", "digits", "a text"])
def test_a_hostile_body_takes_little_memory(name: str) -> None:
    argv = [sys.executable, "-c", MEMORY, name]
    found = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(found.stdout) < 64 << 10


@pytest.mark.parametrize("part", [1, 100, request_bodies.CHUNK_BYTES])
@pytest.mark.parametrize("space", ["", " ", "\n\t"])
def test_a_body_says_in_parts_what_it_says_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, part: int, space: str
) -> None:
    monkeypatch.setattr(request_bodies, "CHUNK_BYTES", part)
    items = [
        WEB,
        1,
        "a,]",
        [],
        {},
        None,
        [{"services": ["x"]}],
        {"a": 'q"\\', "é": "\U0001f600"},
        True,
        -1.5e3,
    ]
    for services in ([], items[:1], items, items[1:2], items * 20):
        whole = {"services": services, "prune": True, "other": {"services": [1]}}
        raw = json.dumps(whole, separators=(f"{space},{space}", f"{space}:{space}")).encode()
        members, found = request_bodies._parse_body(lambda members, read: (members, list(read or ())), raw)
        assert {**members, "services": found} == whole


def held_up(story: Any) -> list[str]:
    """What held the event loop in a story for too long, and for how many yardsticks; but the client, which
    decodes what it is answered."""
    with standstills(CLIENT) as found:
        served(story)
    return found


@pytest.fixture(scope="module")
def many() -> list[dict[str, object]]:
    declared = parse_declaration(many_declared(MANY, 5), "many.yaml").services
    return [spec_of(service) for service in declared]


def name_of(spec: dict[str, object]) -> str:
    return str(spec["name"])


def test_many_services_at_once_do_not_hold_the_loop(many: list[dict[str, object]]) -> None:
    """They took half a second for 2,000 to judge, and another one to store."""
    body = json.dumps({"services": many}).encode()

    async def story(api: Api) -> None:
        task = asyncio.current_task()
        assert task
        task.set_name(CLIENT)
        answer = await api.ask("POST", "/v1/apply?dry_run=1", data=body)
        assert [each["action"] for each in answer.body["results"]] == ["created"] * MANY
        answer = await api.ask("POST", "/v1/apply", data=body)
        assert answer.status == 200
        assert answer.body["applied"]
        assert len(api.store.services) == MANY
        assert len((await api.ask("GET", "/v1/services")).body["services"]) == MANY
        assert (await api.ask("GET", "/v1/export")).body["services"] == sorted(many, key=name_of)
        assert (await api.add({**WEB, "address": "10.250.0.1"})).status == 200
        answer = await api.ask("POST", "/v1/apply", data=body)
        assert {each["action"] for each in answer.body["results"]} == {"unchanged"}
        answer = await api.ask("POST", "/v1/apply", {"services": [], "prune": True})
        assert len(answer.body["results"]) == MANY + 1
        assert api.store.services == {}

    assert held_up(story) == []


def test_a_change_that_comes_while_many_are_judged_is_not_lost(many: list[dict[str, object]]) -> None:
    async def story(api: Api) -> None:
        large = asyncio.create_task(api.ask("POST", "/v1/apply", {"services": many}))
        small = [
            asyncio.create_task(api.add({**WEB, "name": f"w{n}", "address": f"10.250.0.{n}"}))
            for n in range(1, 6)
        ]
        answers = [await task for task in (large, *small)]
        assert [answer.status for answer in answers] == [200] * 6
        assert len(api.stored()) == MANY + 5

    served(story)


def test_many_problems_end_the_reading(many: list[dict[str, object]]) -> None:
    async def story(api: Api) -> None:
        answer = await api.ask("POST", "/v1/apply", {"services": [{}] * 5000})
        assert answer.status == 422
        assert len(answer.body["error"]["problems"]) == 1000

    served(story)
