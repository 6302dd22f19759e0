from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.fake_daemon import FakeDaemon
from vipd.observe import api_client as client
from vipd.observe.api_client import BadResponseError, Client, DaemonError, UnreachableError, url_path


@contextmanager
def served(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """One connection is given to `serve`, in a thread, once a request has come."""

    def take() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(120)
            connection.recv(65536)
            serve(connection)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield
        finally:
            thread.join(120)
            assert not thread.is_alive()


@contextmanager
def answering(path: Path, raw: bytes, hold: bool = False) -> Iterator[None]:
    """One connection is answered with these very bytes; `hold` keeps it open after them."""
    done = threading.Event()

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(BrokenPipeError):  # who has read enough goes
            connection.sendall(raw)
        if hold:
            done.wait(120)

    with served(path, serve):
        try:
            yield
        finally:
            done.set()


@pytest.mark.parametrize("chunked", [False, True])
def test_large_documents_come_whole(daemon: FakeDaemon, chunked: bool) -> None:
    daemon.chunked = chunked
    document = {"services": [{"name": f"service-{i}"} for i in range(5000)]}
    daemon.answer_unlike_the_api("GET /v1/services", document)
    assert Client(str(daemon.socket)).get("/v1/services")["services"] == document["services"]


def test_a_body_arrives_as_json(daemon: FakeDaemon) -> None:
    daemon.answer_unlike_the_api("POST /v1/services", {"changed": True})
    Client(str(daemon.socket)).request("POST", "/v1/services?dry_run=1", {"service": {"name": "dns-ü"}})
    assert daemon.last.body == {"service": {"name": "dns-ü"}}
    assert daemon.last.query == "dry_run=1"


def test_a_target_is_one_segment_whatever_it_holds(daemon: FakeDaemon) -> None:
    path = url_path("services", "[fd00::10]:53/udp")
    assert path == "/v1/services/%5Bfd00%3A%3A10%5D%3A53%2Fudp"
    daemon.answer_unlike_the_api("GET /v1/services/ü/?#%", {"service": {}})
    Client(str(daemon.socket)).get(url_path("services", "ü/?#%"))
    assert daemon.last.path == "/v1/services/%C3%BC%2F%3F%23%25"


def test_an_error_keeps_all_that_the_daemon_says(daemon: FakeDaemon) -> None:
    daemon.refuse("GET /v1/status", 422, "invalid", "bad file", why="w", hint="h", problems=["a:1: x"])
    with pytest.raises(DaemonError, match="bad file: w") as caught:
        Client(str(daemon.socket)).get("/v1/status")
    err = caught.value
    assert (err.status, err.kind, err.hint, err.problems) == (422, "invalid", "h", ("a:1: x",))


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>",
        b"HTTP/1.1 200 " + b"x" * 70000,
    ],
)
def test_what_is_no_json_over_http_is_a_bad_answer(tmp_path: Path, raw: bytes) -> None:
    with answering(tmp_path / "s", raw), pytest.raises(BadResponseError):
        Client(str(tmp_path / "s")).get("/v1/status")


@pytest.mark.parametrize(
    "raw",
    [b"", b"HTTP/1.1 200 OK\r\n", b'HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"a"'],
)
def test_a_daemon_that_goes_away_was_unreachable(tmp_path: Path, raw: bytes) -> None:
    with answering(tmp_path / "s", raw), pytest.raises(UnreachableError, match="connection ended"):
        Client(str(tmp_path / "s")).get("/v1/status")


def test_an_answer_without_a_length_ends_with_the_connection(tmp_path: Path) -> None:
    raw = b'HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.0 200 OK\r\n\r\n{"a": 1}'
    with answering(tmp_path / "s", raw):
        assert Client(str(tmp_path / "s")).get("/v1/status") == {"a": 1}


def test_silence_ends_in_a_timeout(tmp_path: Path) -> None:
    with (
        answering(tmp_path / "s", b"HTTP/1.1 200 OK\r\n", hold=True),
        pytest.raises(UnreachableError) as caught,
    ):
        Client(str(tmp_path / "s"), timeout=0.05).get("/v1/status")
    assert isinstance(caught.value.cause, TimeoutError)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="No such file"):
        Client(str(tmp_path / "s")).get("/v1/status")


@contextmanager
def endless(path: Path, begin: bytes, more: bytes, pause: float = 0.0) -> Iterator[None]:
    """One connection is answered with `begin`, and then with `more` again and again until the client goes."""

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(begin)
            while True:
                connection.sendall(more)
                time.sleep(pause)

    with served(path, serve):
        yield


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "interim answers of another kind": (b"", b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"),
    "headers": (HEAD, b"A: b\r\n"),
    "a header": (HEAD + b"A: ", b"b" * 1000),
    "a body without a length": (HEAD + b"\r\n", b"x" * 60000),
    "a body of chunks": (CHUNKED, b"ea60\r\n" + b"x" * 60000 + b"\r\n"),
    "a chunk's extension": (CHUNKED + b"1;", b"x" * 1000),
}


@pytest.mark.parametrize(("begin", "more"), ENDLESS.values(), ids=list(ENDLESS))
def test_an_answer_without_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes, more: bytes
) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    with endless(tmp_path / "s", begin, more), pytest.raises(BadResponseError):
        Client(str(tmp_path / "s")).get("/v1/status")


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 ", HEAD + b"A: ", HEAD + b"\r\n{", CHUNKED + b"ffff\r\n"])
def test_bytes_that_trickle_in_are_no_answer(tmp_path: Path, begin: bytes) -> None:
    """Each one comes in time, and the answer never does."""
    with endless(tmp_path / "s", begin, b"x", 0.02), pytest.raises(UnreachableError) as caught:
        Client(str(tmp_path / "s"), timeout=0.2).get("/v1/status")
    assert isinstance(caught.value.cause, TimeoutError)


def test_an_object_of_a_stream_without_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_STREAM_LINE_BYTES", 1 << 20)
    more = b"ea60\r\n" + b"x" * 60000 + b"\r\n"
    with endless(tmp_path / "s", CHUNKED, more), pytest.raises(BadResponseError, match="larger than 1 MiB"):
        list(Client(str(tmp_path / "s")).stream("/v1/events"))


def test_a_stream_lasts_as_long_as_its_objects_come_in_time(tmp_path: Path) -> None:
    with endless(tmp_path / "s", CHUNKED, b"3\r\n{}\n\r\n", 0.02):
        lines = Client(str(tmp_path / "s"), timeout=0.5).stream("/v1/events")
        assert [next(lines) for _ in range(150)] == [{}] * 150
        lines.close()  # type: ignore[attr-defined]  # it is a generator


@pytest.mark.parametrize("size", [b"-5", b"0x5", b"1_0", b"9" * 5000, b"f" * 15, b""])
def test_what_is_no_size_of_a_chunk(tmp_path: Path, size: bytes) -> None:
    raw = CHUNKED + size + b"\r\n{}   \r\n0\r\n\r\n"
    with answering(tmp_path / "s", raw), pytest.raises(BadResponseError):
        Client(str(tmp_path / "s")).get("/v1/status")


@pytest.mark.parametrize("length", [b"9" * 5000, b"9" * 20, b"99999999999999"])
def test_a_length_that_nothing_has(tmp_path: Path, length: bytes) -> None:
    with (
        answering(tmp_path / "s", HEAD + b"Content-Length: " + length + b"\r\n\r\n{}"),
        pytest.raises(BadResponseError),
    ):
        Client(str(tmp_path / "s")).get("/v1/status")


def test_an_answer_that_is_too_deep_is_a_bad_one(tmp_path: Path) -> None:
    body = b"[" * 100_000
    raw = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with answering(tmp_path / "s", raw), pytest.raises(BadResponseError):
        Client(str(tmp_path / "s")).get("/v1/status")
