"""What vipctl makes of bytes that are no answer of vipd, of answers in pieces, and of those without end."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import Vipctl
from tests.cli.fake_daemon import FakeDaemon

UNREACHABLE = 4


@contextmanager
def served(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """One connection is given to `serve`, in a thread, once a request has come."""

    def take() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(120)
            connection.recv(65536)
            with contextlib.suppress(OSError):  # who has read enough goes
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


@pytest.mark.parametrize("chunked", [False, True])
def test_large_documents_come_whole(vipctl: Vipctl, daemon: FakeDaemon, chunked: bool) -> None:
    daemon.chunked = chunked
    services = [{"name": f"service-{i}-ü"} for i in range(5000)]
    daemon.answer("GET /v1/export", {"services": services})
    assert json.loads(vipctl("export", "-o", "json").out)["services"] == services


def test_a_target_is_one_segment_whatever_it_holds(vipctl: Vipctl, daemon: FakeDaemon) -> None:
    for target, path in {
        "[fd00::10]:53/udp": "%5Bfd00%3A%3A10%5D%3A53%2Fudp",
        "ü/?#%": "%C3%BC%2F%3F%23%25",
        "kube-system/kube-dns/10.244.0.5:53": "kube-system%2Fkube-dns/backends/10.244.0.5%3A53",
        "[fd00::10]:53/udp/[fd00::5]:53": "%5Bfd00%3A%3A10%5D%3A53%2Fudp/backends/%5Bfd00%3A%3A5%5D%3A53",
        "[fd00::10]:53/udp/fd00::0005": "%5Bfd00%3A%3A10%5D%3A53%2Fudp/backends/fd00%3A%3A5",
    }.items():
        words = ("set", target, "--weight", "5") if "backends" in path else ("describe", target)
        vipctl(*words)
        assert f"/v1/services/{path}" in [request.path for request in daemon.requests], target


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
NO_ANSWERS = {
    b"SSH-2.0-OpenSSH_9.2\r\n\r\n": "no answer of vipd",
    HEAD + b"Content-Length: 2\r\n\r\n[]": "no answer of vipd",
    HEAD + b"Content-Length: 5\r\n\r\nhello": "no answer of vipd",
    HEAD + b"Content-Length: many\r\n\r\n{}": "no answer of vipd",
    HEAD + b"Content-Length: 4\r\n\r\nnull": "no answer of vipd",
    CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n": "no answer of vipd",
    b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>": "no answer of vipd",
    b"HTTP/1.1 200 " + b"x" * 70000: "no answer of vipd",
    **{
        CHUNKED + size + b"\r\n{}   \r\n0\r\n\r\n": "no answer of vipd"
        for size in (b"-5", b"0x5", b"1_0", b"")
    },
    b"": "connection ended",
    HEAD: "connection ended",
    HEAD + b'Content-Length: 50\r\n\r\n{"a"': "connection ended",
}
"""Longer and deeper ones are in tests/limits/test_others_json.py."""


@pytest.mark.parametrize("raw", NO_ANSWERS, ids=lambda raw: repr(raw[:40]))
def test_what_is_no_answer_of_vipd_is_told(vipctl: Vipctl, tmp_path: Path, raw: bytes) -> None:
    with served(tmp_path / "vipd.sock", lambda connection: connection.sendall(raw)):
        ended = vipctl("status")
    assert (ended.code, ended.out) == (UNREACHABLE, "")
    assert NO_ANSWERS[raw] in ended.err


def test_an_answer_without_a_length_ends_with_the_connection(vipctl: Vipctl, tmp_path: Path) -> None:
    answer = b'{"apiVersion": "vipd/v1", "services": []}'
    raw = b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.0 200 OK\r\n\r\n" + answer
    with served(tmp_path / "vipd.sock", lambda connection: connection.sendall(raw)):
        assert json.loads(vipctl("export", "-o", "json").out) == json.loads(answer)


def endless(begin: bytes, more: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(more)

    return serve


ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "interim answers of another kind": (b"", b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"),
    "headers": (HEAD, b"A: b\r\n"),
    "a header": (HEAD + b"A: ", b"b" * 1000),
    "a chunk's extension": (CHUNKED + b"1;", b"x" * 1000),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_answer_without_end_is_given_up(vipctl: Vipctl, tmp_path: Path, kind: str) -> None:
    with served(tmp_path / "vipd.sock", endless(*ENDLESS[kind])):
        ended = vipctl("status")
    assert (ended.code, ended.out) == (UNREACHABLE, "")
