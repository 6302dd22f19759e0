"""Answers that are none: each becomes a value or an EtcdError; following goes on when they are good again."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import aiohttp
import pytest

from tests.lab.examples import some
from tests.sources.etcd.following import PREFIX, following, key, value
from tests.sources.etcd.gateway import bodies, broken, gateway
from tests.sources.etcd.members import Cluster, cluster
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.supervisor import Loop, Supervisor
from vipd.sources.etcd import client as client_module
from vipd.sources.etcd import lines, replies, transport, watch
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError, MalformedAnswerError, UnreachableError
from vipd.sources.etcd.heartbeat import HostHeartbeat, HostReport
from vipd.sources.etcd.messages import Delete, KeyRange, KeyValue, ModRevisionEquals, Put

ALL = KeyRange.prefix(b"/t/")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("malformed")) as made:
        yield made


@pytest.fixture
def etcd(one: Cluster) -> Cluster:
    one.clear()
    return one


Ask = Callable[[EtcdClient, int], Awaitable[object]]


async def _watched(client: EtcdClient, _: int) -> object:
    async with client.watch(ALL, 1) as watch:
        return await anext(watch)


QUESTIONS: dict[str, tuple[str, Ask]] = {
    "list": ("/v3/kv/range", lambda c, _: c.list([ALL])),
    "get": ("/v3/kv/range", lambda c, _: c.get(b"/t/a")),
    "probe": ("/v3/kv/txn", lambda c, _: c.changed_since([ALL, KeyRange.prefix(b"/u/")], 1)),
    "put": ("/v3/kv/put", lambda c, _: c.put(b"/t/c", b"")),
    "transaction": ("/v3/kv/txn", lambda c, _: c.txn([ModRevisionEquals(b"/t/d", 0)], [Put(b"/t/d", b"1")])),
    "delete": ("/v3/kv/txn", lambda c, _: c.txn([], [Delete(KeyRange(b"/t/d"))])),
    "lease": ("/v3/lease/grant", lambda c, _: c.grant_lease(60)),
    "renewal": ("/v3/lease/keepalive", lambda c, lease: c.renew_lease(lease)),
    "times": ("/v3/lease/timetolive", lambda c, lease: c.lease_times(lease)),
    "revocation": ("/v3/lease/revoke", lambda c, lease: c.revoke_lease(lease)),
}


async def _recorded(etcd: Cluster, path: str, ask: Ask) -> bytes:
    """What the real one says to a question."""
    said: list[bytes] = []

    def kept(asked: str, line: bytes) -> bytes:
        if asked == path:
            said.append(line)
        return line

    async with gateway(etcd.urls[0]) as there:
        client = EtcdClient(EtcdSettings((there.url,), timeout=30.0), Random(1))
        lease = await client.grant_lease(60)
        there.altered = kept
        await ask(client, lease)
        await client.close()
    return b"".join(said)


async def _answered(client: EtcdClient, ask: Ask, name: str) -> EtcdError | None:
    """The error that a question comes to. Fails for any other than EtcdError, or one that says too little."""
    error: Exception | None = None
    try:
        await ask(client, 7)
    except Exception as raised:
        error = raised
    if error is None:
        return None
    assert isinstance(error, EtcdError), f"{name}: {error!r}"
    if isinstance(error, UnreachableError | MalformedAnswerError):
        assert client.connection.endpoint in str(error), (name, error)
        assert str(error).partition(client.connection.endpoint)[2].strip(": "), name
    assert len(str(error)) < 1000, name
    assert str(error).isprintable(), (name, error)
    return error


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_broken_answer_is_a_value_or_says_what_is_wrong(etcd: Cluster, question: str) -> None:
    path, ask = QUESTIONS[question]
    etcd.put_all({"/t/a": "1", "/t/b": "2"})

    async def scene() -> None:
        good = await _recorded(etcd, path, ask)
        async with gateway() as there:
            client = EtcdClient(EtcdSettings((there.url,), timeout=30.0), Random(1))
            there.says["/version"] = b'{"etcdserver": "3.4.23"}'
            known, refused = list(bodies(good)), 0
            tried = some(known, question)
            for name, body in tried:
                there.says[path] = body
                refused += await _answered(client, ask, name) is not None
            assert refused > (10 if len(tried) == len(known) else 1)
            there.says[path] = good
            await ask(client, 7)
            await client.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe", b'{"code": {}}', b'{"code": "x", "message": ["\\u001b"]}']
)
@pytest.mark.parametrize("status", [400, 500, 302, 204])
def test_a_broken_refusal_is_an_error_too(status: int, body: bytes) -> None:
    async def scene() -> None:
        async with gateway() as there:
            client = EtcdClient(EtcdSettings((there.url,), timeout=30.0), Random(1))
            for path, ask in [*QUESTIONS.values(), ("/v3/watch", _watched)]:
                there.says = {path: body, "/version": b"\xff"}
                there.status = {path: status}
                assert await _answered(client, ask, path) is not None
            await client.close()

    asyncio.run(scene())


def test_every_broken_message_of_a_watch_is_a_value_or_says_what_is_wrong(etcd: Cluster) -> None:
    etcd.put("/t/a", "1")
    etcd.delete("/t/a")

    async def scene() -> None:
        session = aiohttp.ClientSession()
        request = {"create_request": {"key": _b("/t/"), "range_end": _b("/t0"), "start_revision": "1"}}
        async with session.post(f"{etcd.urls[0]}/v3/watch", json=request) as stream:
            created, events = await stream.content.readline(), await stream.content.readline()
        await session.close()
        async with gateway() as there:
            client = EtcdClient(EtcdSettings((there.url,), timeout=30.0), Random(1))
            for name, body in some(list(bodies(created)), "created"):
                there.says["/v3/watch"] = body + b"\n" + events
                await _answered(client, _watched, f"created: {name}")
            for name, body in some(list(bodies(events)), "events"):
                there.says["/v3/watch"] = created + body + b"\n"
                await _answered(client, _watched, f"events: {name}")
            there.says["/v3/watch"] = created + events
            await _watched(client, 0)
            await client.close()

    asyncio.run(scene())


def test_a_broken_log_in_is_an_error_and_no_permission_to_go_without(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")

    async def scene() -> None:
        async with gateway() as there:
            settings = EtcdSettings((there.url,), user="vipd", password_file=password, timeout=30.0)
            good = {"header": {"cluster_id": "1", "revision": "1"}, "token": "abc.1"}
            for name, answer in some(list(broken(good)), "log in"):
                client = EtcdClient(settings, Random(1))
                there.says["/v3/auth/authenticate"] = json.dumps(answer).encode()
                there.says["/v3/kv/range"] = json.dumps({"header": good["header"]}).encode()
                error = await _answered(client, lambda c, _: c.get(b"/t/a"), name)
                assert error is not None or there.authorization.get("/v3/kv/range"), name
                await client.close()

    asyncio.run(scene())


def test_what_is_too_large_is_not_read(etcd: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_BYTES", 100_000)
    etcd.put_all({f"/t/{n:03}": "x" * 10_000 for n in range(30)})

    async def scene() -> None:
        async with gateway() as there:
            client = EtcdClient(EtcdSettings((there.url,), timeout=30.0), Random(1))
            there.says = {"/v3/kv/range": b" " * 200_000, "/v3/watch": b"x" * 200_000}
            with pytest.raises(UnreachableError, match="larger than"):
                await client.get(b"/t/a")
            with pytest.raises(EtcdError, match="larger than"):
                await _watched(client, 0)
            await client.close()
        client = EtcdClient(EtcdSettings(etcd.urls, timeout=30.0), Random(1))
        assert len((await client.list([ALL])).kvs) == 30, "in smaller pages"
        await client.close()

    asyncio.run(scene())


def test_pages_that_do_not_end_are_not_followed_for_ever() -> None:
    page = {
        "header": {"cluster_id": "1", "revision": "9"},
        "kvs": [{"key": _b("/t/a"), "mod_revision": "2"}],
        "more": True,
        "count": "2",
    }

    async def scene() -> None:
        async with gateway() as there:
            client = EtcdClient(EtcdSettings((there.url,), timeout=30.0), Random(1))
            there.says["/v3/kv/range"] = json.dumps(page).encode()
            with pytest.raises(UnreachableError, match="was not asked for"):
                await client.list([ALL])
            await client.close()

    asyncio.run(scene())


def test_following_goes_on_when_answers_are_good_again(
    etcd: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.put_all({key("a"): value(1), key("b"): value(2)})

    async def scene() -> None:
        async with gateway(etcd.urls[0]) as there, following((there.url,), tmp_path) as follower:
            await follower.until(lambda: follower.names() >= {"a", "b"}, "the first list")
            for number, (path, ways) in enumerate(WAYS):
                hits = 0

                def altered(asked: str, line: bytes, path: str = path, way: Way = ways) -> bytes:
                    nonlocal hits
                    if asked != path:
                        return line
                    hits += 1
                    return way(line)

                there.altered = altered
                if path == "/v3/watch":
                    etcd.put(key("a"), value(1, f"10.244.1.{number + 1}"))
                if path == "/v3/kv/range":
                    follower.source._follower._positions.clear()
                    await follower.client.connection.close()
                await follower.until(lambda: hits, f"{path} {number}")  # noqa: B023
                there.altered = lambda asked, line: line
                etcd.put(key("b"), value(2, f"10.244.2.{number + 1}"))
                wanted = f"10.244.2.{number + 1}"
                await follower.until(lambda: follower.backend("b") == wanted, f"{path} {number}")  # noqa: B023
                assert follower.names() >= {"a", "b"}
            await follower.until(lambda: follower.source.connected, "followed again")
            assert follower.source.faults() == ()

    with caplog.at_level(logging.INFO):
        asyncio.run(scene())
    assert "fault in vipd" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info and record.name.startswith("vipd")]


Way = Callable[[bytes], bytes]


def _nulls(line: bytes) -> bytes:
    return json.dumps(_nulled(json.loads(line))).encode() + b"\n"


def _nulled(value: object) -> object:
    if isinstance(value, dict):
        return {name: _nulled(inner) for name, inner in value.items()}
    return [_nulled(inner) for inner in value] if isinstance(value, list) else None


def _texts(line: bytes) -> bytes:
    return line.replace(b'"1', b'"-x').replace(b'"L3', b'"/w')


WAYS: list[tuple[str, Way]] = [
    (path, way)
    for path in ("/v3/kv/txn", "/v3/watch", "/v3/kv/range")
    for way in (
        lambda line: b'["ID"]\n',
        lambda line: b"\xff\xfe\n",
        lambda line: b"{}\n",
        lambda line: b"[" * 100_000 + b"\n",
        lambda line: line[: len(line) // 2] + b"\n",
        _nulls,
        _texts,
    )
]


@pytest.mark.parametrize("body", [b'["ID"]', b'{"ID": null}', b"\xff", b'{"ID": "x"}', b"[" * 100_000])
def test_the_report_of_a_host_goes_on_after_a_broken_answer(etcd: Cluster, body: bytes) -> None:
    async def scene() -> None:
        async with gateway(etcd.urls[0]) as there:
            there.says["/v3/lease/grant"] = body
            client = EtcdClient(EtcdSettings((there.url,), timeout=30.0), Random(1))
            report = HostReport("n1", 7, 0, "0.1.0")
            beacon = HostHeartbeat(
                client, PREFIX, lambda: report, lambda: datetime(2030, 1, 2, tzinfo=UTC), 6, 0.05
            )
            loop = Loop(beacon.run, beacon.loop_state)
            task = asyncio.create_task(Supervisor((EtcdError,)).run("reporting", loop))
            async with asyncio.timeout(60):
                while not beacon.fault:  # noqa: ASYNC110 (there is no event)
                    await asyncio.sleep(0.01)
                assert there.url in beacon.fault
                there.says.clear()
                while await client.get(f"{PREFIX}hosts/n1".encode()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()

    asyncio.run(scene())


def test_a_malformed_key_or_value_is_a_problem_of_that_key_alone(etcd: Cluster, tmp_path: Path) -> None:
    etcd.put(key("good"), value(1))
    etcd.post("/v3/kv/put", {"key": _raw(key("").encode() + b"\xff"), "value": _b(value(2))})
    etcd.post("/v3/kv/put", {"key": _b(key("\\xff")), "value": _b(value(3))})
    etcd.post("/v3/kv/put", {"key": _b(key("new\nline\x1b")), "value": _b(value(4))})
    etcd.post("/v3/kv/put", {"key": _b(key("bytes")), "value": _raw(b"address: \xff\xfe")})
    etcd.put(key("deep"), "[" * 50_000)
    etcd.put(key("long"), "# " + "x" * 1_200_000 + "\n" + value(5))
    etcd.post("/v3/kv/put", {"key": _raw(f"{PREFIX}backends/good/".encode() + b"\xff"), "value": ""})
    etcd.put(f"{PREFIX}backends/good/10.244.0.9:80", "[" * 50_000)

    async def scene() -> None:
        async with following(etcd.urls, tmp_path) as there:
            await there.until(lambda: there.names() == {"good"}, "the good one alone")
            await there.until(lambda: there.source.connected, "followed")
            state = there.source.state()
            assert len(state.rejected) == 6
            assert len(set(state.rejected)) == 6
            assert all(map(str.isprintable, (*state.rejected, *there.problems)))
            contact = state.applied_revision
            etcd.put(key("other"), value(9))
            await there.until(lambda: "other" in there.names(), "the next change")
            assert there.source.applied_revision > contact
            await asyncio.sleep(1.0)  # several probes: they find nothing that the watch had not told
            assert there.source.faults() == ()

    asyncio.run(scene())


def _b(text: str) -> str:
    return _raw(text.encode())


def _raw(data: bytes) -> str:
    return b64encode(data).decode()


def test_large_answers_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bool] = []

    def noted(text: str) -> object:
        read.append(threading.current_thread() is threading.main_thread())
        return replies.read_object(text)

    monkeypatch.setattr(transport, "read_object", noted)
    monkeypatch.setattr(watch, "read_object", noted)
    kvs = [{"key": _b(f"/t/{n:04}"), "value": _b("x" * 1000), "mod_revision": "2"} for n in range(500)]
    header = {"cluster_id": "1", "revision": "9"}
    events = {"result": {"header": header, "created": True, "events": [{"kv": kv} for kv in kvs]}}

    async def scene() -> None:
        async with gateway() as there:
            client = EtcdClient(EtcdSettings((there.url,), timeout=30.0), Random(1))
            there.says["/v3/kv/range"] = json.dumps({"header": header, "kvs": kvs, "count": "500"}).encode()
            there.says["/v3/watch"] = json.dumps(events).encode() + b"\n"
            assert len((await client.range(ALL)).kvs) == 500
            async with client.watch(ALL, 1):
                pass
            await client.close()

    asyncio.run(scene())
    assert read == [False, False]


@pytest.mark.parametrize(("size", "keys"), [(0, 500), (300, 500), (2**16, 16), (2**20, 1), (2**21, 1)])
def test_a_page_has_as_many_keys_as_its_values_allow(size: int, keys: int) -> None:
    found = [KeyValue(b"/t/%d" % n, b"x" * size, 2) for n in range(100)]
    assert client_module._page_after(found) == keys
