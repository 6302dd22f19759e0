"""JSON that others wrote: limits of depth and digits, wherever it is read."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from tests.lab.inside import Vipd, running, vipctl
from vipd.model.limits import JSON_DEPTH, JSON_DIGITS

HOSTILE = ["[" * 100_000, '{"revision": ' + "[" * 500 + "]" * 500 + "}", '{"revision": ' + "1" * 4000 + "}"]


def test_a_request_within_the_limits_is_read_and_one_beyond_is_malformed() -> None:
    """What is read is no service, whatever its depth: that is another kind of refusal."""
    digits = "1" * 500_000
    values = {"1" * JSON_DIGITS: "invalid", "-1.5e3": "invalid"}
    for opened, closed, levels in (("[", "]", 1), ('{"[\\"{": ', "}", 1), ('[{"x": ', "}]", 2)):
        inside = JSON_DEPTH // levels
        values[opened * (inside - 2) + "1" + closed * (inside - 2)] = "invalid"
        values[opened * (inside + 1) + "1" + closed * (inside + 1)] = "malformed"
    values |= {number.format(digits): "malformed" for number in ("{}", "-{}", "0.{}", "{}e5", "1e{}")}
    values[json.dumps([[], {}, "[[[[\\", '"]', {"{": [[]] * 100}] * 100)] = "invalid"

    async def story(vipd: Vipd) -> None:
        kinds = {}
        for value in values:
            body = f'{{"service": {value}}}'.encode()
            kinds[value] = (await vipd.ask("POST", "/v1/services", data=body)).kind
        assert {value[:60]: kind for value, kind in kinds.items() if kind != values[value]} == {}

    running(story)


@pytest.mark.parametrize(
    "answer",
    [
        *(f"Content-Length: {len(text)}\r\n\r\n{text}" for text in HOSTILE),
        "Content-Length: " + "9" * 5000 + "\r\n\r\n{}",
        "Content-Length: 9999999999999\r\n\r\n{}",
        "Transfer-Encoding: chunked\r\n\r\n" + "f" * 5000 + "\r\n",
        "Transfer-Encoding: chunked\r\n\r\nfffffffffff\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        "".join(f"X-{i}: 1\r\n" for i in range(5000)) + "\r\n{}",
    ],
)
def test_what_claims_to_be_the_daemon_does_not_break_vipctl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(f"HTTP/1.1 200 OK\r\n{answer}".encode())

        thread = threading.Thread(target=serve)
        thread.start()
        assert vipctl(["--socket", path, "status"]) == 4
        refused = capsys.readouterr()
        thread.join()
    assert refused.out == ""
    assert refused.err.startswith("vipctl: ")
    assert "Traceback" not in refused.err
