"""A client of the vipd API: HTTP/1.1 over a UNIX socket, with only `socket` and `json` of the standard
library.

It does not use `http.client`, which imports the parser of e-mail headers: that import would take about half
as long as all the rest of `vipctl list`. One connection carries one request.
"""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from vipd.declaration.bounded_json import read_json
from vipd.model.limits import ANSWER_BYTES as MOST_BYTES
from vipd.model.text import sanitized

DEFAULT_SOCKET = "/run/vipd/vipd.sock"

DEFAULT_TIMEOUT = 90.0
"""Seconds. A change answers after its rules are in the kernel, and the daemon waits a minute for that."""

Json = dict[str, Any]
"""A JSON object of the API; docs/api.md defines its content."""

_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_MAX_LINE_BYTES = 65536
MAX_INTERIM_RESPONSES = 10
MAX_HEADERS = 100
MAX_STREAM_LINE_BYTES = 2**24
"""Limit for one object of a stream."""
RESPONSE_TIMEOUTS = 4
"""An answer may take this many times its `timeout` in all, however steadily it arrives."""
_MAX_NUMBER_DIGITS = 15
_CONNECT_RETRY_SECONDS = 5.0
_NO_BODY = (204, 304)
_HEX = frozenset("0123456789abcdefABCDEF")


class ClientError(Exception):
    """No usable answer arrived."""


class UnreachableError(ClientError):
    """No process listens at the socket, or the connection broke or timed out."""

    def __init__(self, socket_path: str, cause: OSError) -> None:
        super().__init__(f"{socket_path}: {cause.strerror or cause}")
        self.socket_path = socket_path
        self.cause = cause


class BadResponseError(ClientError):
    """The answer is not HTTP with a JSON object: another program listens at the socket."""


class DaemonError(ClientError):
    """The daemon answered with an error. The texts are the daemon's; each but `what` may be empty."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        self.status = status
        self.kind = str(error.get("kind") or "")
        self.what = str(error.get("what") or f"HTTP status {status}")
        self.why = str(error.get("why") or "")
        self.hint = str(error.get("hint") or "")
        self.problems = tuple(str(p) for p in error.get("problems") or ())
        super().__init__(f"{self.what}: {self.why}" if self.why else self.what)


def url_path(*segments: str) -> str:
    """`/v1/...` of these segments, each percent-encoded as UTF-8, so that a name may contain any
    character."""
    return "/v1/" + "/".join(map(_quoted, segments))


def _quoted(segment: str) -> str:
    return "".join(chr(b) if b in _UNRESERVED else f"%{b:02X}" for b in segment.encode())


class Client:
    """Sends requests to the daemon at `socket_path`. `timeout` is the maximum silence in seconds; a whole
    answer may take four times that."""

    def __init__(
        self, socket_path: str = DEFAULT_SOCKET, timeout: float = DEFAULT_TIMEOUT, *, exact: bool = True
    ) -> None:
        """`exact`: texts are unchanged; otherwise each is made one printable line."""
        self.socket_path = socket_path
        self.timeout = timeout
        self.exact = exact
        self.session = ""
        """`ADDR:PORT` of this host over which the user is logged in: no change may claim it."""

    def get(self, path: str) -> Json:
        """The answer to `GET path`; raises as `request` does."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Json | None = None) -> Json:
        """The JSON object in the answer; `path` is built by `url_path`, with an optional query.

        Raises UnreachableError, BadResponseError, or RefusedError for every status but 2xx.
        """
        try:
            status, content = self._exchange(_request_bytes(method, path, body, self.session))
        except OSError as err:
            raise UnreachableError(self.socket_path, err) from err
        answer = self._shown(_json_object(content, status), content)
        if not 200 <= status < 300:
            error = answer.get("error")
            raise DaemonError(status, error if isinstance(error, dict) else {})
        return answer

    def stream(self, path: str) -> Iterator[Json]:
        """The JSON objects, one a line, in the answer to `GET path` as they arrive, until the answer ends.

        Raises as `request` does; UnreachableError also when the connection breaks or times out.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                self._connect(connection)
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(_request_bytes("GET", path, None), socket.MSG_NOSIGNAL)
                incoming = _TimedReader(connection, self.timeout)
                with io.BufferedReader(incoming) as stream:
                    for line in _streamed(stream):
                        yield line if self.exact else sanitized(line)
                        incoming.restart_timeout()
        except OSError as err:
            raise UnreachableError(self.socket_path, err) from err

    def _shown(self, answer: Json, content: bytes) -> Json:
        """The answer in the form for the caller."""
        # ASCII without a backslash is all printable: this covers most answers, also large ones.
        odd = b"\\" in content or not content.isascii()
        return sanitized(answer) if odd and not self.exact else answer

    def _connect(self, connection: socket.socket) -> None:
        """If many others connect, the kernel reports at once that its queue is full. Raises OSError."""
        connection.settimeout(self.timeout)
        until = time.monotonic() + min(self.timeout, _CONNECT_RETRY_SECONDS)
        while True:
            try:
                return connection.connect(self.socket_path)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.02)

    def _exchange(self, request: bytes) -> tuple[int, bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            self._connect(connection)
            # A server may reject a large body by answering and closing: the answer can still be read.
            # MSG_NOSIGNAL, because a process with the default action for SIGPIPE must get an error instead.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(request, socket.MSG_NOSIGNAL)
            with io.BufferedReader(_TimedReader(connection, self.timeout)) as stream:
                return _read_response(stream)


class _TimedReader(io.RawIOBase):
    """Data from a connection, with a time limit for all of it: a byte now and then does not extend it."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        super().__init__()
        self._connection, self._silence = connection, timeout
        self.restart_timeout()

    def restart_timeout(self) -> None:
        """Restart the time limit."""
        self._until = time.monotonic() + RESPONSE_TIMEOUTS * self._silence

    def readable(self) -> bool:
        """Required by `io`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Required by `io`. Raises OSError."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole answer within {RESPONSE_TIMEOUTS * self._silence:.0f} s")
        self._connection.settimeout(min(self._silence, left))
        return self._connection.recv_into(buffer)


def _request_bytes(method: str, path: str, body: Json | None, session: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: vipd", "Accept: application/json", "Connection: close"]
    lines += [f"Vipd-Session: {session}"] if session else []
    content = b""
    if body is not None:
        content = json.dumps(body).encode()
        lines.append("Content-Type: application/json")
    if content or method != "GET":
        lines.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def _streamed(stream: BinaryIO) -> Iterator[Json]:
    status, headers = _read_head(stream)
    if headers.get("transfer-encoding", "").lower() != "chunked" or status != 200:
        content = _read_body(stream, status, headers)
        error = _json_object(content, status).get("error")
        raise DaemonError(status, error if isinstance(error, dict) else {})
    line = b""
    while size := _chunk_size(_read_line(stream)):
        if len(line) + size > MAX_STREAM_LINE_BYTES:
            raise _too_large(MAX_STREAM_LINE_BYTES)
        line += _read_exactly(stream, size)
        _read_line(stream)
        *whole, line = line.split(b"\n")
        yield from (_json_object(each, status) for each in whole)


def _read_response(stream: BinaryIO) -> tuple[int, bytes]:
    status, headers = _read_head(stream)
    return status, _read_body(stream, status, headers)


def _read_head(stream: BinaryIO) -> tuple[int, dict[str, str]]:
    for _ in range(MAX_INTERIM_RESPONSES + 1):  # interim responses precede the real one
        status, headers = _read_status(stream), _read_headers(stream)
        if status >= 200:
            return status, headers
    raise BadResponseError(f"more than {MAX_INTERIM_RESPONSES} interim answers")


def _read_body(stream: BinaryIO, status: int, headers: Mapping[str, str]) -> bytes:
    if status in _NO_BODY:
        return b""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _read_chunks(stream)
    length = headers.get("content-length")
    if length is None:
        content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise _too_large(MOST_BYTES)
        return content
    if not length.isdecimal() or len(length) > _MAX_NUMBER_DIGITS:
        raise BadResponseError(f"Content-Length is {length[:60]!r}")
    return _read_exactly(stream, int(length))


def _read_status(stream: BinaryIO) -> int:
    line = _read_line(stream)
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if not (version.startswith("HTTP/1.") and len(code) == 3 and code.isdecimal()):
        raise BadResponseError(f"not an HTTP status line: {line[:60]!r}")
    return int(code)


def _read_headers(stream: BinaryIO) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS + 1):
        line = _read_line(stream)
        if not line:
            return headers
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    raise BadResponseError(f"more than {MAX_HEADERS} headers")


def _read_chunks(stream: BinaryIO) -> bytes:
    content = bytearray()
    while size := _chunk_size(_read_line(stream)):
        if len(content) + size > MOST_BYTES:
            raise _too_large(MOST_BYTES)
        content += _read_exactly(stream, size)
        _read_line(stream)
    return bytes(content)


def _chunk_size(line: str) -> int:
    digits = line.partition(";")[0].strip()
    if not 0 < len(digits) <= _MAX_NUMBER_DIGITS or not _HEX.issuperset(digits):
        raise BadResponseError(f"not a chunk size: {line[:60]!r}")
    return int(digits, 16)


def _read_line(stream: BinaryIO) -> str:
    line = stream.readline(_MAX_LINE_BYTES)
    if not line:
        raise ConnectionResetError("the connection ended before the answer did")
    if not line.endswith(b"\n"):
        raise BadResponseError(f"a line that has no end: {line[:60]!r}")
    return line.rstrip(b"\r\n").decode("latin-1")


def _too_large(max_bytes: int) -> BadResponseError:
    return BadResponseError(f"it is larger than {max_bytes >> 20} MiB")


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    if size > MOST_BYTES:
        raise _too_large(MOST_BYTES)
    content = stream.read(size)
    if len(content) != size:
        raise ConnectionResetError(f"the connection ended after {len(content)} of {size} bytes")
    return content


def _json_object(content: bytes, status: int) -> Json:
    try:
        answer = read_json(content, MOST_BYTES)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise BadResponseError(f"HTTP status {status} without a JSON object")
    return answer
