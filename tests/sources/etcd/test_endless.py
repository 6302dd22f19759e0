"""An endpoint whose answer has no end: the call ends in time, in bounded memory, beside all other work."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import resource
from random import Random

import pytest

from tests.health.servers import tcp_server
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError, TooLargeError
from vipd.sources.etcd.fields import MAX_BYTES
from vipd.sources.etcd.lines import Lines
from vipd.sources.etcd.messages import KeyRange
from vipd.sources.etcd.watch import Watch

PATIENCE_SECONDS = 60.0
TIMEOUT = 0.5
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CREATED = b'{"result":{"header":{"revision":"1"},"created":true}}\n'
PROGRESS = b'{"result":{"header":{"revision":"2"}}}\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "interim answers of another kind": (b"", b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"),
    "headers": (OK, b"A: b\r\n"),
    "extensions": (CHUNKED + b"1;", b"a=b;"),
    "tiny chunks": (CHUNKED, b"1\r\nx\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "a body": (CHUNKED, chunk(b"x" * 60000)),
    "empty lines": (CHUNKED, chunk(b"\n" * 60000)),
}


class Endpoint:
    """Goes on with its answer until it is hung up on."""

    def __init__(self, begin: bytes, more: bytes, pause: float = 0.0) -> None:
        self._begin, self._more, self._pause = begin, more, pause
        self.turns = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection; `turns` counts how often the event loop came by."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self._begin)
            while True:
                writer.write(self._more if self._pause else self._more * (1 + 60000 // len(self._more)))
                await writer.drain()
                self.turns += 1
                await asyncio.sleep(self._pause)


async def asked(endpoint: Endpoint, watch: bool) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        async with tcp_server(endpoint.serve) as port:
            settings = EtcdSettings(endpoints=(f"http://127.0.0.1:{port}",), timeout=TIMEOUT)
            client = EtcdClient(settings, Random(1))
            try:
                if not watch:
                    await client.get(b"a")
                async with client.watch(KeyRange(b"a", b"b"), 1) as changes:
                    async for _ in changes:
                        pass
            finally:
                await client.close()


@pytest.mark.parametrize("watch", [False, True], ids=["read", "watch"])
@pytest.mark.parametrize(("begin", "more"), ENDLESS.values(), ids=list(ENDLESS))
def test_an_answer_without_end_is_an_error_in_time(begin: bytes, more: bytes, watch: bool) -> None:
    endpoint, before = Endpoint(begin, more), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(EtcdError):
        asyncio.run(asked(endpoint, watch))
    assert endpoint.turns > 0
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 8 * MAX_BYTES


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 ", OK + b"A: ", CHUNKED + b"ffff\r\n"])
def test_a_byte_now_and_then_is_no_answer(begin: bytes) -> None:
    with pytest.raises(EtcdError, match=r"no answer within 0\.5 s"):
        asyncio.run(asked(Endpoint(begin, b"x", 0.02), watch=False))


class Body:
    """A body of which there is always more at once."""

    async def readany(self) -> bytes:
        """Never waits."""
        return PROGRESS * 1000


def test_a_stream_that_always_has_more_leaves_the_loop_its_turns() -> None:
    async def run() -> int:
        given, ticks = 0, 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async def translate(error: BaseException) -> Exception:
            raise error

        ticking = asyncio.create_task(tick())
        async for _ in Lines(Body(), translate):  # type: ignore[arg-type]  # all that it uses of one
            given += 1
            if given == 10_000:
                break
        ticking.cancel()
        return ticks

    assert asyncio.run(run()) > 50


def test_of_a_key_that_is_always_written_only_what_has_arrived_last_is_a_batch() -> None:
    def message(revision: int) -> bytes:
        header = {"cluster_id": "1", "member_id": "1", "revision": str(revision), "raft_term": "1"}
        key = base64.b64encode(b"/vipd/v1/services/a").decode()
        kv = {"key": key, "value": "", "mod_revision": str(revision), "create_revision": "1", "version": "1"}
        return json.dumps({"result": {"header": header, "events": [{"kv": kv}]}}).encode() + b"\n"

    class Busy(Body):
        pieces = iter([b"".join(map(message, range(2, 102))), message(102)])

        async def readany(self) -> bytes:
            return next(self.pieces)

    async def translate(error: BaseException) -> Exception:
        raise error

    async def run() -> list[tuple[int, int]]:
        lines = Lines(Busy(), translate)  # type: ignore[arg-type]  # all that it uses of one
        watch = Watch("http://127.0.0.1:2379", KeyRange.prefix(b"/vipd/v1/"), lines)
        batches = [await anext(watch) for _ in range(2)]
        return [(len(batch.events), batch.header.revision) for batch in batches]

    assert asyncio.run(run()) == [(100, 101), (1, 102)]


def test_a_line_without_end_is_too_large() -> None:
    class Endless(Body):
        async def readany(self) -> bytes:
            return b"x" * 2**20

    async def translate(error: BaseException) -> Exception:
        raise error

    async def run() -> None:
        async for _ in Lines(Endless(), translate):  # type: ignore[arg-type]  # all that it uses of one
            pass

    with pytest.raises(TooLargeError):
        asyncio.run(run())
