from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.fake_daemon import FakeDaemon
from vipd.api.client import BadAnswerError, Client, RefusedError, UnreachableError, url_path


@contextmanager
def answering(path: Path, raw: bytes, hold: bool = False) -> Iterator[None]:
    """One connection is answered with these very bytes; `hold` keeps it open after them."""
    done = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            with contextlib.suppress(BrokenPipeError):  # who has read enough goes
                connection.sendall(raw)
            if hold:
                done.wait(120)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("chunked", [False, True])
def test_large_documents_come_whole(daemon: FakeDaemon, chunked: bool) -> None:
    daemon.chunked = chunked
    document = {"services": [{"name": f"service-{i}"} for i in range(5000)]}
    daemon.answer("GET /v1/services", document)
    assert Client(str(daemon.socket)).get("/v1/services")["services"] == document["services"]


def test_a_body_arrives_as_json(daemon: FakeDaemon) -> None:
    daemon.answer("POST /v1/services", {"changed": True})
    Client(str(daemon.socket)).request("POST", "/v1/services?dry_run=1", {"service": {"name": "dns-ü"}})
    assert daemon.last.body == {"service": {"name": "dns-ü"}}
    assert daemon.last.query == "dry_run=1"


def test_a_target_is_one_segment_whatever_it_holds(daemon: FakeDaemon) -> None:
    path = url_path("services", "[fd00::10]:53/udp")
    assert path == "/v1/services/%5Bfd00%3A%3A10%5D%3A53%2Fudp"
    daemon.answer("GET /v1/services/ü/?#%", {"service": {}})
    Client(str(daemon.socket)).get(url_path("services", "ü/?#%"))
    assert daemon.last.path == "/v1/services/%C3%BC%2F%3F%23%25"


def test_an_error_keeps_all_that_the_daemon_says(daemon: FakeDaemon) -> None:
    daemon.refuse("GET /v1/status", 422, "invalid", "bad file", why="w", hint="h", problems=["a:1: x"])
    with pytest.raises(RefusedError, match="bad file: w") as caught:
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
    with answering(tmp_path / "s", raw), pytest.raises(BadAnswerError):
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
