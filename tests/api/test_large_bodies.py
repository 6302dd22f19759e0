"""Whatever a body holds, reading it takes bounded memory; and what many services come to is decided beside
the event loop."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
import yaml

from tests.api.specs import WEB, stored
from tests.faults.instrumented import standstills
from tests.lab.inside import Vipd, running
from tests.lab.stories import story_of
from tests.model.samples import many_declared

MANY = 2000
CLIENT = "client"
MILLION = 1_000_000

HOSTILE: dict[str, Callable[[int], bytes]] = {
    "nothing": lambda million: b"",
    "no object": lambda million: b"[]",
    "empty services": lambda million: b'{"services":[' + b",".join([b"{}"] * (3 * million // 10)) + b"]}",
    "numbers": lambda million: b'{"services":[' + b",".join([b"1"] * (5 * million)) + b"]}",
    "lists": lambda million: b'{"services":[' + b"[]," * (5 * million) + b"[]]}",
    "lists in one service": lambda million: b'{"services":[[' + b"[]," * (5 * million) + b"[]]]}",
    "lists elsewhere": lambda million: b'{"other":[' + b"[]," * (5 * million) + b"[]]}",
    "brackets": lambda million: b"[" * (15 * million),
    "brackets in a service": lambda million: b'{"services":[{"name":' + b"[" * (15 * million),
    "braces": lambda million: b'{"a":' * (3 * million),
    "digits": lambda million: b'{"prune":' + b"9" * (3 * million) + b"}",
    "digits of a fraction": lambda million: b'{"services":[{"a":0.' + b"3" * (3 * million) + b"}]}",
    "digits of an exponent": lambda million: b'{"services":[{"a":1e' + b"3" * (3 * million) + b"}]}",
    "a text": lambda million: b'{"services":[{"name":"' + b"x" * (15 * million) + b'"}]}',
    "escapes": lambda million: b'{"services":[{"name":"' + b'\\"' * (7 * million) + b'"}]}',
    "texts without end": lambda million: b'{"services":[' + b'"' * (million + 1),
    "spaces": lambda million: b" " * (15 * million),
    "zeros": lambda million: b"\x00" * (15 * million),
    "two lists": lambda million: b'{"services":[{}],"services":[{}]}',
    "no comma": lambda million: b'{"services":[{} {}]}',
    "a comma too many": lambda million: b'{"services":[{},]}',
    "no end": lambda million: b'{"services":[{}',
    "half a surrogate pair": lambda million: b'{"services":[{"name":"\\ud800"}]}',
}
"""Made when asked for: of a whole million they are 150 MB together."""


async def posted(vipd: Vipd, body: bytes) -> tuple[int, str]:
    async with vipd.session.post("http://vipd/v1/apply", data=io.BytesIO(body)) as response:
        answer = await response.json()
    return response.status, str(answer.get("error", {}).get("kind", ""))


@story_of(running)
async def test_a_hostile_body_is_refused(vipd: Vipd) -> None:
    answers = {name: await posted(vipd, made(MILLION // 10)) for name, made in HOSTILE.items()}
    refusals = ((400, "malformed"), (413, "too-large"), (422, "invalid"))
    assert {name: answer for name, answer in answers.items() if answer not in refusals} == {}
    assert (await vipd.add(WEB)).status == 200


def added_memory(name: str) -> None:
    """Print how many KiB reading a body adds to the most that this process has had, beside the body."""
    import resource

    async def story(vipd: Vipd) -> None:
        body = io.BytesIO(HOSTILE[name](MILLION))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with vipd.session.post("http://vipd/v1/apply", data=body) as response:
            assert response.status >= 400
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(after - before - 2 * len(body.getbuffer()) // 1024)

    running(story)


@pytest.mark.nightly(each_time="numbers")
@pytest.mark.parametrize("name", ["empty services", "numbers", "lists", "brackets", "digits", "a text"])
def test_a_hostile_body_takes_little_memory(name: str) -> None:
    code = f"from tests.api.test_large_bodies import added_memory; added_memory({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 10


def held_up(story: Callable[[Vipd], Awaitable[None]]) -> list[str]:
    """What held the event loop in a story for too long, and for how many yardsticks; but the client, which
    decodes what it is answered."""
    with standstills(CLIENT) as found:
        running(story)
    return found


@pytest.fixture(scope="module")
def many() -> list[dict[str, object]]:
    return list(yaml.safe_load(many_declared(MANY, 5))["services"])


def test_many_services_at_once_do_not_hold_the_loop(many: list[dict[str, object]]) -> None:
    """They took half a second for 2,000 to judge, and another one to store."""
    body = json.dumps({"services": many}).encode()

    async def apply(vipd: Vipd, query: str = "") -> set[str]:
        async with vipd.session.post(f"http://vipd/v1/apply{query}", data=io.BytesIO(body)) as response:
            answer = await response.json()
        assert response.status == 200, answer
        assert answer["applied"] or query
        assert len(answer["results"]) == MANY
        return {each["action"] for each in answer["results"]}

    async def story(vipd: Vipd) -> None:
        task = asyncio.current_task()
        assert task
        task.set_name(CLIENT)
        assert await apply(vipd, "?dry_run=1") == {"created"}
        assert await apply(vipd) == {"created"}
        assert (
            len(vipd.kernel.names()) == len((await vipd.ask("GET", "/v1/services")).body["services"]) == MANY
        )
        exported = (await vipd.ask("GET", "/v1/export")).body["services"]
        declared = {spec["name"]: spec["backends"] for spec in many}
        assert {spec["name"]: spec["backends"] for spec in exported} == declared
        assert (await vipd.add({**WEB, "address": "10.250.0.1"})).status == 200
        assert await apply(vipd) == {"unchanged"}
        answer = await vipd.ask("POST", "/v1/apply", {"services": [], "prune": True})
        assert len(answer.body["results"]) == MANY + 1
        assert stored(vipd) == vipd.kernel.names() == set()

    assert held_up(story) == []


@pytest.mark.parametrize("space", ["", " ", "\n\t"])
@story_of(running)
async def test_a_large_body_says_the_same(vipd: Vipd, *, space: str) -> None:
    """However it is spaced, and whatever its texts hold."""
    check = {"type": "dns", "port": 53, "answer": 'q"\\, ]}[{ "services": [é\U0001f600'}
    specs = [{**WEB, "name": f"w{n}", "address": f"10.96.1.{n}", "check": check} for n in range(200)]
    whole = {"prune": True, "services": specs}
    raw = json.dumps(whole, separators=(f"{space},{space}", f"{space}:{space}")).encode()
    assert await posted(vipd, raw) == (200, "")
    exported = (await vipd.ask("GET", "/v1/export")).body["services"]
    assert {spec["name"]: spec["check"]["answer"] for spec in exported} == {
        spec["name"]: check["answer"] for spec in specs
    }


@story_of(running)
async def test_a_change_that_comes_while_many_are_judged_is_not_lost(
    vipd: Vipd, *, many: list[dict[str, object]]
) -> None:
    large = asyncio.create_task(posted(vipd, json.dumps({"services": many}).encode()))
    small = [
        asyncio.create_task(vipd.add({**WEB, "name": f"w{n}", "address": f"10.250.0.{n}"}))
        for n in range(1, 6)
    ]
    assert [(await task).status for task in small] == [200] * 5
    assert await large == (200, "")
    assert len(stored(vipd)) == len(vipd.kernel.names()) == MANY + 5


@story_of(running)
async def test_many_problems_end_the_reading(vipd: Vipd) -> None:
    answer = await vipd.ask("POST", "/v1/apply", {"services": [{}] * 5000})
    assert (answer.status, len(answer.body["error"]["problems"])) == (422, 1000)
