"""Endpoints that are no etcd for us, that say nonsense or never end: each is named, in bounded time."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import yaml

from tests.lab.held_ports import held_ports
from tests.lab.waiting import wait_until
from tests.sources.etcd.following import Follower, follow, key, value
from tests.sources.etcd.gateway import gateway
from tests.sources.etcd.members import Cluster, cluster
from tests.sources.etcd.register import BACKEND, Registering, registering

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
GRPC_SETTINGS = bytes.fromhex("000006040000000000000500004000")
"""The first frame of a gRPC server, and then it hangs up."""
KEY = f"/vipd/v1/backends/web/{BACKEND}"


def http(status: str, body: str | bytes, *headers: str) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    lines = (f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(data)}", "Connection: close", "", "")
    return "\r\n".join(lines).encode() + data


@contextmanager
def server(serve: Callable[[socket.socket, bytes], None]) -> Iterator[str]:
    """A server whose answers to requests are what `serve` sends; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def one(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError, ValueError):
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(65536) or _ended()
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                body = head.partition(b"\r\n\r\n")[2]
                while length and len(body) < int(length[1]):  # what is not read would end in a reset
                    body += client.recv(65536) or _ended()
                serve(client, head)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    threading.Thread(target=one, args=(client,), daemon=True).start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _ended() -> bytes:
    raise ValueError("the client has gone")


def always(answer: bytes) -> Callable[[socket.socket, bytes], None]:
    """It answers every request so."""
    return lambda client, _: client.sendall(answer)


def saying(body: bytes) -> Callable[[socket.socket, bytes], None]:
    """It answers every request so, with success."""
    return always(http("200 OK", body))


def endless(begin: bytes, more: bytes) -> Callable[[socket.socket, bytes], None]:
    """Goes on with its answer until it is hung up on."""

    def serve(client: socket.socket, _: bytes) -> None:
        client.sendall(begin)
        while True:
            client.sendall(more * (1 + 60_000 // len(more)))

    return serve


NO_ETCD = {
    "no etcd": (
        http("404 Not Found", "nothing here"),
        "is no JSON gateway of etcd 3.4 or later (answers HTTP 404: nothing here)",
    ),
    "elsewhere": (http("307 Moved", "", "Location: /elsewhere"), "answers HTTP 307"),  # with the token
    "gRPC alone": (GRPC_SETTINGS, "--listen-client-http-urls"),
}
NONSENSE = (
    *(b"", b"null", b'["ID"]', b"7", b"{", b"\xff\xfe\x00", b'{"header": "\xff"}', b"[" * 100_000, b"{}"),
    *(
        b'{"result":' * 100_000,
        b"<html>it works</html>",
        b'{"error": null}',
        b'{"error": ["x"], "code": "x"}',
    ),
    *(b'{"ID": null}', b'{"ID": "x"}', b'{"ID": -1}', b'{"ID": {"a": [{}]}}', b'{"ID": "7", "TTL": "x"}'),
)
ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers": (OK, b"A: b\r\n"),
    "extensions": (CHUNKED + b"1;", b"a=b;"),
    "tiny chunks": (CHUNKED, b"1\r\nx\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "a body": (CHUNKED, b"%x\r\n" % 60_000 + b"x" * 60_000 + b"\r\n"),
}


@contextmanager
def asking(directory: Path, urls: Sequence[str], timeout: str = "500ms") -> Iterator[Registering]:
    """A `vipctl register` that asks these endpoints one after the other."""
    config = directory / "vipd.yaml"
    config.write_text(yaml.safe_dump({"etcd": {"endpoints": list(urls), "timeout": timeout}}))
    (directory / "log").mkdir()
    with registering(directory / "log", "--config", str(config)) as process:
        yield process


def test_a_server_that_is_no_etcd_for_us_is_named(tmp_path: Path) -> None:
    gateway_off = "often 2379; start etcd with --enable-grpc-gateway"
    with (
        ExitStack() as stack,
        cluster(tmp_path / "off", 1, ["--enable-grpc-gateway=false"]) as off,
        socket.create_server(("127.0.0.1", 0)) as silent,
        held_ports(1) as (closed,),
    ):
        words = {
            off.urls[0]: gateway_off,
            off.members[0].peer: gateway_off,
            f"http://127.0.0.1:{closed}": "cannot connect: Connection refused",
            f"http://127.0.0.1:{silent.getsockname()[1]}": "no answer within 5 s",
            **{stack.enter_context(server(always(answer))): fault for answer, fault in NO_ETCD.values()},
        }
        with asking(tmp_path, list(words), "5s") as process:
            process.until_said("\n")
            said = process.said
    reasons = {url: said.partition(url)[2].partition("; http://")[0] for url in words}
    assert {url: reasons[url] for url, fault in words.items() if fault not in reasons[url]} == {}


def test_answers_that_are_nonsense_or_have_no_end_are_faults_of_their_endpoints(tmp_path: Path) -> None:
    """In bounded time and memory."""
    with ExitStack() as stack:
        serving = [*map(saying, NONSENSE), *(endless(*parts) for parts in ENDLESS.values())]
        urls = [stack.enter_context(server(serve)) for serve in serving]
        with asking(tmp_path, urls) as process:
            process.until_said("\n")
            said, memory = process.said, process.peak_memory()
    assert [url for url in urls if not re.search(rf"{url}:? [^;]{{5}}", said)] == []
    assert sorted(urls, key=said.index) != urls, "every host asks them in an order of its own"
    assert "Traceback" not in said
    assert "internal error" not in said
    assert memory < 300 * 2**20


def test_what_goes_wrong_with_an_answer_is_over_with_the_next_good_one(etcd: Cluster, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with gateway(etcd.urls[0]) as there:
        there.says["/v3/lease/grant"] = b'{"ID": null}'
        with registering(tmp_path / "log", "--endpoint", there.url) as process:
            process.until_said(there.url)
            there.says.clear()
            process.until_said(": registered")


def test_a_registration_that_is_refused_keeps_no_lease(etcd: Cluster, tmp_path: Path) -> None:
    def leases() -> set[str]:
        return {
            str(lease) for lease in cast("list[object]", etcd.post("/v3/lease/leases", {}).get("leases", []))
        }

    (tmp_path / "log").mkdir()
    before = leases()
    with gateway(etcd.urls[0]) as there:
        there.says["/v3/kv/put"] = b'{"error": "etcdserver: permission denied", "code": 7}'
        there.status["/v3/kv/put"] = 403
        with registering(tmp_path / "log", "--endpoint", there.url) as process:
            process.until_said("etcd denies write")
            wait_until(lambda: leases() <= before, "a lease is left")


def test_a_host_follows_on_when_answers_are_good_again(etcd: Cluster) -> None:
    """Of reads, writes and the watch: no text, other text, other types, half of it."""
    etcd.put_all({key("a"): value(1), key("b"): value(2)})
    ways: tuple[Callable[[bytes], bytes], ...] = (
        lambda line: b'["ID"]\n',
        lambda line: b"\xff\xfe\n",
        lambda line: b"[" * 100_000 + b"\n",
        lambda line: line[: len(line) // 2] + b"\n",
        lambda line: json.dumps(_nulled(json.loads(line))).encode() + b"\n",
        lambda line: line.replace(b'"1', b'"-x').replace(b'"L3', b'"/w'),
    )

    async def story(host: Follower) -> None:
        await host.until(lambda: host.names() == {"a", "b"}, "the first list")
        for number, way in enumerate(ways, 1):
            altered = False

            def alter(_: str, line: bytes, way: Callable[[bytes], bytes] = way) -> bytes:
                nonlocal altered
                altered = True
                return way(line)

            there.altered = alter
            etcd.put(key("a"), value(1, f"10.244.1.{number}"))
            await host.until(lambda: altered, "an altered answer")  # noqa: B023
            there.altered = lambda _, line: line
            etcd.put(key("b"), value(2, f"10.244.2.{number}"))
            await host.until(lambda: host.backend("b") == f"10.244.2.{number}", "followed again")  # noqa: B023
            assert host.names() == {"a", "b"}
        assert not any("Traceback" in str(record.exc_info) for record in host.vipd.journal)
        assert not any("fault in vipd" in record.getMessage() for record in host.vipd.journal)

    with gateway(etcd.urls[0]) as there:
        follow((there.url,), story)


def _nulled(found: object) -> object:
    if isinstance(found, dict):
        return {name: _nulled(inner) for name, inner in found.items()}
    return [_nulled(inner) for inner in found] if isinstance(found, list) else None
