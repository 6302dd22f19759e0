"""JSON that others wrote: limits of size, depth and digits, wherever it is read."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vipd.declaration.bounded_json import BeyondLimitsError, read_json
from vipd.model.limits import ETCD_SMALL_VALUE_BYTES, JSON_DEPTH, JSON_DIGITS
from vipd.observe.api_client import BadResponseError, Client
from vipd.sources.etcd.fleet_keys import read_overrides
from vipd.sources.etcd.heartbeat import read_report
from vipd.sources.etcd.replies import read_object

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(values, st.booleans())
def test_whatever_is_within_the_limits_is_read_as_it_is(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read_json(text, 10**6) == json.loads(text)
    assert read_json(text.encode(errors="surrogatepass"), 10**6) == json.loads(text)


def test_depth() -> None:
    for opened, closed in (("[", "]"), ('{"[\\"{": ', "}"), ('[{"x": ', "}]")):
        levels = JSON_DEPTH // len(opened.replace('"[\\"{": ', "").replace('"x": ', ""))
        text = opened * levels + "1" + closed * levels
        assert read_json(text, 10**6)
        with pytest.raises(BeyondLimitsError, match="nested more than"):
            read_json(opened + text + closed, 10**6)
    wide = json.dumps([[], {}, "[[[[\\", '"]', {"{": [[]] * 100}] * 100)
    assert read_json(wide, 10**6) == json.loads(wide)


@pytest.mark.parametrize("number", ["{}", "-{}", "0.{}", "{}e5", "1e{}"])
def test_digits(number: str) -> None:
    assert read_json(number.format("1" * 3), 10**7) is not None
    with pytest.raises(BeyondLimitsError, match="digits"):
        read_json(number.format("1" * 3_000_000), 10**7)
    assert read_json("1" * JSON_DIGITS, 10**7) == int("1" * JSON_DIGITS)


def test_size() -> None:
    assert read_json(b"[   ]", 5) == []
    with pytest.raises(BeyondLimitsError, match="6 bytes, of which 5"):
        read_json(b"[    ]", 5)


HOSTILE = ["[" * 100_000, '{"revision": ' + "[" * 500 + "]" * 500 + "}", '{"revision": ' + "1" * 4000 + "}"]


@pytest.mark.parametrize("text", [*HOSTILE, " " * ETCD_SMALL_VALUE_BYTES + "{}"])
def test_what_others_write_to_etcd_breaks_nobody(text: str) -> None:
    report, fault = read_report(text.encode())
    assert fault.startswith("its report cannot be read: ")
    assert report["revision"] == 0
    orders, faults = read_overrides({"addresses/10.0.0.1": text})
    assert not orders
    assert len(faults) == 1


@pytest.mark.parametrize("text", HOSTILE)
def test_what_claims_to_be_etcd_breaks_nobody(text: str) -> None:
    assert read_object(text) is None


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
def test_what_claims_to_be_the_daemon_does_not_break_vipctl(tmp_path: Path, answer: str) -> None:
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
        with pytest.raises(BadResponseError):
            Client(path, timeout=20).get("/v1/status")
        thread.join()
