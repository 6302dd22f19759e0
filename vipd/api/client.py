"""A client of the vipd API: HTTP/1.1 over a UNIX socket, of the standard library's `socket` and `json` alone.

The requests are written by hand because `http.client` brings the parser of e-mail headers, and importing that
would take about half as long as all the rest of `vipctl list`. One connection carries one request.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from vipd.bounded_json import read_json
from vipd.limits import ANSWER_BYTES

DEFAULT_SOCKET = "/run/vipd/vipd.sock"

DEFAULT_TIMEOUT = 90.0
"""Seconds. A change answers after its rules are in the kernel, and the daemon waits a minute for that."""

Json = dict[str, Any]
"""A JSON object of the API; docs/api.md says what stands in it."""

_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_LONGEST_LINE = 65536
_MOST_HEADERS = 100
_MOST_DIGITS = 16
_CHUNK_SIZE = re.compile(rf"[0-9A-Fa-f]{{1,{_MOST_DIGITS}}}")
_LENGTH = re.compile(rf"[0-9]{{1,{_MOST_DIGITS}}}")
_NO_BODY = (204, 304)


class ClientError(Exception):
    """No usable answer came."""


class UnreachableError(ClientError):
    """Nobody could be reached at the socket, or the connection broke or fell silent."""

    def __init__(self, socket_path: str, cause: OSError) -> None:
        super().__init__(f"{socket_path}: {cause.strerror or cause}")
        self.socket_path = socket_path
        self.cause = cause


class BadAnswerError(ClientError):
    """What came is not HTTP with a JSON object: somebody else listens at the socket."""


class RefusedError(ClientError):
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
    """`/v1/...` of these segments, each percent-encoded as UTF-8, so that a name may hold any character."""
    return "/v1/" + "/".join(map(_quoted, segments))


def _quoted(segment: str) -> str:
    return "".join(chr(b) if b in _UNRESERVED else f"%{b:02X}" for b in segment.encode())


class Client:
    """Asks the daemon at `socket_path`. `timeout` is how many seconds of silence it bears."""

    def __init__(self, socket_path: str = DEFAULT_SOCKET, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.socket_path = socket_path
        self.timeout = timeout
        self.session = ""
        """`ADDR:PORT` of this host over which the user is logged in: what no change may take."""

    def get(self, path: str) -> Json:
        """The answer to `GET path`; raises as `request` does."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Json | None = None) -> Json:
        """The JSON object answered; `path` is as `url_path` makes it, with a query if one is wanted.

        Raises UnreachableError, BadAnswerError, or RefusedError for every status but 2xx.
        """
        try:
            status, content = self._exchange(_request_bytes(method, path, body, self.session))
        except OSError as err:
            raise UnreachableError(self.socket_path, err) from err
        answer = _json_object(content, status)
        if not 200 <= status < 300:
            error = answer.get("error")
            raise RefusedError(status, error if isinstance(error, dict) else {})
        return answer

    def stream(self, path: str) -> Iterator[Json]:
        """The JSON objects, a line each, that are answered to `GET path` as they come, until the answer ends.

        Raises as `request` does; UnreachableError also when the connection breaks or falls silent.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self.timeout)
                connection.connect(self.socket_path)
                connection.sendall(_request_bytes("GET", path, None), socket.MSG_NOSIGNAL)
                with connection.makefile("rb") as stream:
                    yield from _streamed(stream)
        except OSError as err:
            raise UnreachableError(self.socket_path, err) from err

    def _exchange(self, request: bytes) -> tuple[int, bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self.timeout)
            connection.connect(self.socket_path)
            # A server may refuse a large body by answering and hanging up: the answer is still there to read.
            # MSG_NOSIGNAL, because a process that lets SIGPIPE end it should learn of this as an error.
            with suppress(BrokenPipeError):
                connection.sendall(request, socket.MSG_NOSIGNAL)
            with connection.makefile("rb") as stream:
                return _read_response(stream)


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
        raise RefusedError(status, error if isinstance(error, dict) else {})
    line = b""
    while size := _chunk_size(_read_line(stream)):
        line += _read_exactly(stream, size)
        _bound(len(line))
        _read_line(stream)
        *whole, line = line.split(b"\n")
        yield from (_json_object(each, status) for each in whole)


def _read_response(stream: BinaryIO) -> tuple[int, bytes]:
    status, headers = _read_head(stream)
    return status, _read_body(stream, status, headers)


def _read_head(stream: BinaryIO) -> tuple[int, dict[str, str]]:
    status = 100
    while status < 200:  # interim responses precede the real one
        status = _read_status(stream)
        headers = _read_headers(stream)
    return status, headers


def _read_body(stream: BinaryIO, status: int, headers: Mapping[str, str]) -> bytes:
    if status in _NO_BODY:
        return b""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _read_chunks(stream)
    length = headers.get("content-length")
    if length is None:
        return _bounded(stream.read(ANSWER_BYTES + 1))
    if not _LENGTH.fullmatch(length):
        raise BadAnswerError(f"Content-Length is {length[:60]!r}")
    return _read_exactly(stream, int(length))


def _read_status(stream: BinaryIO) -> int:
    line = _read_line(stream)
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if not (version.startswith("HTTP/1.") and len(code) == 3 and code.isdecimal()):
        raise BadAnswerError(f"not an HTTP status line: {line[:60]!r}")
    return int(code)


def _read_headers(stream: BinaryIO) -> dict[str, str]:
    headers: dict[str, str] = {}
    while line := _read_line(stream):
        if len(headers) >= _MOST_HEADERS:
            raise BadAnswerError(f"more than {_MOST_HEADERS} headers")
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


def _read_chunks(stream: BinaryIO) -> bytes:
    chunks, read = [], 0
    while size := _chunk_size(_read_line(stream)):
        chunks.append(_read_exactly(stream, size))
        _read_line(stream)
        read += size
        _bound(read)
    return b"".join(chunks)


def _chunk_size(line: str) -> int:
    digits = line.partition(";")[0].strip()
    if not _CHUNK_SIZE.fullmatch(digits):
        raise BadAnswerError(f"not a chunk size: {line[:60]!r}")
    return int(digits, 16)


def _read_line(stream: BinaryIO) -> str:
    line = stream.readline(_LONGEST_LINE)
    if not line:
        raise ConnectionResetError("the connection ended before the answer did")
    if not line.endswith(b"\n"):
        raise BadAnswerError(f"a line that has no end: {line[:60]!r}")
    return line.rstrip(b"\r\n").decode("latin-1")


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    _bound(size)
    content = stream.read(size)
    if len(content) != size:
        raise ConnectionResetError(f"the connection ended after {len(content)} of {size} bytes")
    return content


def _bound(size: int) -> None:
    if size > ANSWER_BYTES:
        raise BadAnswerError(f"an answer of more than {ANSWER_BYTES >> 20} MiB")


def _bounded(content: bytes) -> bytes:
    _bound(len(content))
    return content


def _json_object(content: bytes, status: int) -> Json:
    try:
        answer = read_json(content, ANSWER_BYTES)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise BadAnswerError(f"HTTP status {status} without a JSON object")
    return answer
