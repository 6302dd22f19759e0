"""The etcd of simulated time answers as the real one does, request by request, as far as vipd can see."""

from __future__ import annotations

import asyncio
import json
import secrets
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.simulated_etcd import SimulatedEtcd
from tests.sources.etcd.members import cluster, install

Json = dict[str, Any]
Post = Callable[[str, Json], tuple[int, Json]]


def test_it_answers_as_the_real_one(tmp_path: Path) -> None:
    install()
    prefix = f"/same/{secrets.token_hex(4)}/"
    with cluster(tmp_path) as etcd:
        real = conversation(prefix, lambda path, body: _asked(f"{etcd.urls[0]}{path}", body))
    simulated = SimulatedEtcd()
    loop = asyncio.new_event_loop()

    def post(path: str, body: Json) -> tuple[int, Json]:
        async def answer() -> tuple[int, Json]:
            response = await simulated.post(f"http://etcd:2379{path}", json.dumps(body).encode())
            return response.status, json.loads((await response.content.readany()).splitlines()[0])

        return loop.run_until_complete(answer())

    try:
        assert conversation(prefix, post) == real
    finally:
        loop.close()


def conversation(prefix: str, post: Post) -> list[object]:
    """What is seen of one etcd; revisions count from the first change, leases have no numbers."""
    seen: list[object] = []
    _, answer = post("/v3/kv/put", {"key": _b64(f"{prefix}a"), "value": _b64("1")})
    first = int(answer["header"]["revision"])

    def summary(answer: Json) -> object:
        """An answer without what two etcds differ in."""
        kvs = [
            {
                name: int(value) - first
                if name.endswith("revision")
                else bool(value)
                if name == "lease"
                else value
                for name, value in kv.items()
                if name != "version"
            }
            for kv in answer.get("kvs", ())
        ]
        rest = {
            name: value
            for name, value in answer.items()
            if name in ("more", "count", "succeeded", "TTL", "code")
        }
        return kvs, rest

    def ask(path: str, **body: object) -> Json:
        status, answer = post(path, body)
        seen.append((path, status, summary(answer.get("result", answer))))
        revision = answer.get("result", answer).get("header", {}).get("revision")
        seen.append(revision and int(revision) - first)
        return answer

    keys = {"key": _b64(prefix), "range_end": _b64(prefix[:-1] + chr(ord("/") + 1))}
    lease = ask("/v3/lease/grant", TTL="30")["ID"]
    ask("/v3/lease/keepalive", ID=lease)
    ask("/v3/kv/put", key=_b64(f"{prefix}b"), value=_b64("2"), lease=lease)
    ask("/v3/kv/put", key=_b64(f"{prefix}a"), value=_b64("3"))
    ask("/v3/kv/range", **keys)
    ask("/v3/kv/range", **keys, limit="1")
    ask("/v3/kv/range", **keys, keys_only=True)
    ask("/v3/kv/range", **keys, min_mod_revision=str(first + 2))
    ask("/v3/kv/range", **keys, sort_order="DESCEND", sort_target="MOD")
    ask("/v3/kv/range", key=_b64(f"{prefix}b"))
    ask("/v3/kv/range", key=_b64(f"{prefix}none"))
    for expected in (first + 2, first + 9):
        condition = {"key": _b64(f"{prefix}a"), "target": "MOD", "mod_revision": str(expected)}
        put = {"request_put": {"key": _b64(f"{prefix}c"), "value": _b64("4")}}
        ask("/v3/kv/txn", compare=[condition], success=[put, {"request_range": keys}])
    ask("/v3/kv/txn", success=[{"request_delete_range": {"key": _b64(f"{prefix}c")}}])
    ask("/v3/lease/revoke", ID=lease)
    ask("/v3/kv/range", **keys)
    ask("/v3/lease/keepalive", ID=lease)
    ask("/v3/lease/revoke", ID=lease)
    ask("/v3/kv/put", key=_b64(f"{prefix}b"), value=_b64("2"), lease=lease)
    return seen


def _asked(url: str, body: Json) -> tuple[int, Json]:
    request = urllib.request.Request(url, json.dumps(body).encode())  # noqa: S310 (the test's own etcd)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310 (the same)
            return response.status, json.loads(response.readline())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def _b64(text: str) -> str:
    return b64encode(text.encode()).decode()


def test_a_watch_tells_what_was_missed_and_what_comes(tmp_path: Path) -> None:
    install()
    prefix = f"/same/{secrets.token_hex(4)}/"
    with cluster(tmp_path) as etcd:
        real = asyncio.run(_watched(prefix, etcd.urls[0]))
    assert asyncio.run(_watched(prefix, "")) == real


async def _watched(prefix: str, url: str) -> list[object]:
    """The events of a watch that begins one revision ago; without a URL those of the simulated one."""
    from aiohttp import ClientSession

    simulated = SimulatedEtcd()
    async with ClientSession() as session:
        post = session.post if url else simulated.post

        async def put(key: str, value: str) -> int:
            body = json.dumps({"key": _b64(f"{prefix}{key}"), "value": _b64(value)}).encode()
            async with post(f"{url or 'http://etcd:2379'}/v3/kv/put", data=body) as response:
                return int(json.loads(await response.content.readany())["header"]["revision"])

        first = await put("a", "1")
        await put("b", "2")
        create = {"key": _b64(prefix), "range_end": _b64(prefix[:-1] + "0"), "start_revision": str(first + 1)}
        body = json.dumps({"create_request": create}).encode()
        events: list[object] = []
        async with post(f"{url or 'http://etcd:2379'}/v3/watch", data=body) as response:
            await put("a", "3")
            while len(events) < 2:
                for line in (await response.content.readany()).splitlines():
                    for event in json.loads(line)["result"].get("events", ()):
                        kv = event["kv"]
                        events.append(
                            (event.get("type", "PUT"), b64decode(kv["key"]), int(kv["mod_revision"]) - first)
                        )
        return events
