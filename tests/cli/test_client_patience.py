"""How long, and how much, vipctl's connection to the daemon takes of one that never ends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_client import CHUNKED, HEAD, endless, served
from vipd.observe import api_client
from vipd.observe.api_client import BadResponseError, Client, UnreachableError


@contextmanager
def trickling(path: Path, begin: bytes, more: bytes = b"x") -> Iterator[None]:
    """Each part comes in time, and the answer never ends."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(begin)
        while True:
            connection.sendall(more)
            time.sleep(0.02)

    with served(path, serve):
        yield


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 ", HEAD + b"A: ", HEAD + b"\r\n{", CHUNKED + b"ffff\r\n"])
def test_bytes_that_trickle_in_are_no_answer(tmp_path: Path, begin: bytes) -> None:
    with trickling(tmp_path / "s", begin), pytest.raises(UnreachableError) as caught:
        Client(str(tmp_path / "s"), timeout=0.2).get("/v1/status")
    assert isinstance(caught.value.cause, TimeoutError)


@pytest.mark.parametrize(
    ("begin", "more"),
    [(HEAD + b"\r\n", b"x" * 60000), (CHUNKED, b"ea60\r\n" + b"x" * 60000 + b"\r\n")],
    ids=["no length", "chunks"],
)
def test_a_body_without_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes, more: bytes
) -> None:
    monkeypatch.setattr(api_client, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(api_client, "MAX_STREAM_LINE_BYTES", 1 << 20)
    with served(tmp_path / "s", endless(begin, more)), pytest.raises(BadResponseError):
        Client(str(tmp_path / "s")).get("/v1/status")
    (tmp_path / "s").unlink()
    if begin == CHUNKED:
        with (
            served(tmp_path / "s", endless(begin, more)),
            pytest.raises(BadResponseError, match="larger than 1 MiB"),
        ):
            list(Client(str(tmp_path / "s")).stream("/v1/events"))


def test_a_stream_lasts_as_long_as_its_objects_come_in_time(tmp_path: Path) -> None:
    with trickling(tmp_path / "s", CHUNKED, b"3\r\n{}\n\r\n"):
        lines = Client(str(tmp_path / "s"), timeout=0.5).stream("/v1/events")
        assert [next(lines) for _ in range(100)] == [{}] * 100
        lines.close()  # type: ignore[attr-defined]  # it is a generator
