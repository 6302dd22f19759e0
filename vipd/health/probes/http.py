"""Sends an HTTP request, and checks status and body of the answer.

Each request has its own connection. The standard library parses the answer; only the required part of it is
read. aiohttp's client takes twice the processor time for that (measured: 240 and 120 µs).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import cast

from vipd.declaration.body_pattern import PatternError, body_pattern
from vipd.health.probes.base import ProbeContext
from vipd.health.probes.chunked import ChunkedBody
from vipd.health.probes.tcp import tcp_socket
from vipd.health.probes.tls import ca_name, tls_context, tls_trouble
from vipd.health.result import ProbeResult, ReportedWeight, one_line, parse_weight
from vipd.host.file_calls import file_calls
from vipd.model.check import WEIGHT_HEADER, HttpProbe
from vipd.model.check_target import CheckTarget
from vipd.model.service import socket_text

MOST_BODY = 64 * 1024
MOST_HEAD = 64 * 1024

_MOST_INTERIM = 10
_PIECE = 8 * 1024
_WORK_AT_ONCE = 300_000
"""By `BodyPattern.work`: about 20 ms of the event loop. Above it a thread matches, without Python's lock."""

_MOST_LINES = 102
"""Lines of a head: the standard library accepts a status, a hundred fields, and the end."""

_ENDS_OF_HEAD = (b"\r\n", b"\n")
"""An empty line. A recipient may take LF alone for the end of a line (RFC 9112, 2.2)."""


async def probe_http(asking: ProbeContext) -> ProbeResult:
    """Probe a target that has an HttpProbe. Raises OSError for a network error."""
    target, probe = asking.target, cast("HttpProbe", asking.target.probe)
    loop = asyncio.get_running_loop()
    try:
        context = await _context(asking, probe) if probe.tls else None
    except OSError as error:
        return ProbeResult.not_probed(f"{ca_name(probe)}: {error.strerror or error}")
    began = loop.time()
    with tcp_socket(target.address) as connection:
        asking.doing = "while connecting"
        await loop.sock_connect(connection, (target.address, target.port))
        try:
            async with contextlib.AsyncExitStack() as stack:
                reader, writer = await _streams(connection, context, asking)
                stack.callback(writer.transport.abort)
                asking.doing = "while waiting for the answer"
                writer.write(request(target, probe))
                answer = await read_answer(reader, probe)
        except ssl.SSLError as error:
            return ProbeResult.failure(tls_trouble(error), loop.time() - began)
        except (http.client.HTTPException, asyncio.LimitOverrunError, ValueError) as error:
            return ProbeResult.failure(f"no HTTP: {_error_text(error)}", loop.time() - began)
    return await _judged(asking, answer, began)


async def _context(asking: ProbeContext, probe: HttpProbe) -> ssl.SSLContext:
    """The TLS context of the probe; its file is read in a thread. Raises OSError."""
    asking.timeout_result = ProbeResult.not_probed(f"{ca_name(probe)}: it takes too long to be read")
    context = await file_calls.run((probe.ca, probe.verify), lambda: tls_context(probe))
    asking.timeout_result = None
    return context


def request(target: CheckTarget, probe: HttpProbe) -> bytes:
    """The bytes of the request."""
    host = probe.host or socket_text(target.address, target.port)
    head = f"{probe.method} {probe.path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: vipd-health\r\n"
    length = "" if probe.method in ("GET", "HEAD") else "Content-Length: 0\r\n"
    return f"{head}Accept: */*\r\n{length}Connection: close\r\n\r\n".encode()


async def _streams(
    connection: socket.socket, context: ssl.SSLContext | None, asking: ProbeContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if context is None:
        return await asyncio.open_connection(sock=connection, limit=MOST_HEAD)
    asking.doing = "while setting up TLS"
    probe = cast("HttpProbe", asking.target.probe)
    name = probe.server_name or _without_port(probe.host) or asking.target.address
    patience = asking.target.timing.timeout + 1.0  # ours fires first: it accounts for stalls of the loop
    return await asyncio.open_connection(
        sock=connection, limit=MOST_HEAD, ssl=context, server_hostname=name, ssl_handshake_timeout=patience
    )


def _without_port(host: str) -> str:
    """The name or address of a Host header."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


async def read_answer(
    reader: asyncio.StreamReader, probe: HttpProbe
) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer's head, and the required part of its body.

    Raises HTTPException, LimitOverrunError or ValueError for anything but HTTP.
    """
    for _ in range(_MOST_INTERIM + 1):
        response = _parsed(await _head(reader), probe.method)
        if not 100 <= response.status < 200:
            break
    else:
        raise http.client.HTTPException(f"more than {_MOST_INTERIM} interim answers")
    if not probe.body:
        return response, b""
    return await _with_body(reader, response)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """All lines to the first empty one. Raises HTTPException, LimitOverrunError."""
    head = bytearray()
    for _ in range(_MOST_LINES):
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            came = bytes(head[:40] + error.partial[:40])[:40]
            raise http.client.HTTPException(
                f"connection closed after {repr(came) if came else 'nothing'}"
            ) from None
        head += line
        if len(head) > MOST_HEAD:
            raise asyncio.LimitOverrunError("", MOST_HEAD)
        if line in _ENDS_OF_HEAD:
            return bytes(head)
    raise http.client.HTTPException(f"the answer's head has more than {_MOST_LINES - 2} fields")


async def _with_body(
    reader: asyncio.StreamReader, response: http.client.HTTPResponse
) -> tuple[http.client.HTTPResponse, bytes]:
    if not response.chunked:
        length = MOST_BODY if response.length is None else min(response.length, MOST_BODY)
        return response, await _read(reader, length)
    chunks = ChunkedBody(MOST_BODY)
    while not chunks.done and (more := await reader.read(_PIECE)):
        chunks.feed(more)
        await asyncio.sleep(0)  # reading does not wait while there is something to read
    return response, chunks.body


async def _read(reader: asyncio.StreamReader, length: int) -> bytes:
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        return error.partial


def _parsed(data: bytes, method: str) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(cast("socket.socket", _Received(data)), method=method)
    # After an interim answer the library would continue with the next one.
    if not data.startswith(b"HTTP/"):
        raise http.client.HTTPException(f"the answer begins with {data[:20]!r}")
    if re.match(rb"HTTP/1\.[01] 100", data):
        response.status = 100
    else:
        response.begin()
    return response


class _Received:
    """Received bytes, in place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        """All of it."""
        return io.BytesIO(self._data)


async def _judged(
    asking: ProbeContext, answer: tuple[http.client.HTTPResponse, bytes], began: float
) -> ProbeResult:
    """The result for an answer; its body is matched last."""
    response, body = answer
    probe, loop = cast("HttpProbe", asking.target.probe), asyncio.get_running_loop()
    seconds = loop.time() - began
    if not any(low <= response.status <= high for low, high in probe.status):
        return ProbeResult.failure(f"status {response.status}", seconds)
    try:
        if probe.body and not await _matches(asking, probe.body, body):
            return ProbeResult.failure(f"status {response.status}, but the body does not match", seconds)
    except PatternError as error:
        return ProbeResult.not_probed(f"{error.what}; hint: {error.hint}")
    weight, note = _said_weight(response)
    return ProbeResult.success(seconds, weight, note)


async def _matches(asking: ProbeContext, pattern: str, body: bytes) -> bool:
    """Whether the pattern matches the body. Raises PatternError."""
    # The replacement of bytes that are no UTF-8 takes three times their space.
    wanted, text = body_pattern(pattern), body.decode(errors="replace").encode()[:MOST_BODY]
    if wanted.match_cost(len(text)) <= _WORK_AT_ONCE:
        return wanted.matches(text)
    # A match that is too slow for vipd is no fault of the backend.
    asking.timeout_result = ProbeResult.not_probed(
        "its body takes too long to match; hint: a shorter or plainer pattern"
    )
    return await asyncio.get_running_loop().run_in_executor(_matcher(), wanted.matches, text)


@cache
def _matcher() -> ThreadPoolExecutor:
    """Runs slow matches, one at a time."""
    return ThreadPoolExecutor(1, "vipd body pattern")


def _said_weight(response: http.client.HTTPResponse) -> tuple[ReportedWeight | None, str]:
    text = response.getheader(WEIGHT_HEADER)
    if text is None:
        return None, ""
    weight = parse_weight(text)
    return weight, "" if weight else f"{WEIGHT_HEADER} {one_line(text)[:20]!r} is no weight"


def _error_text(error: Exception) -> str:
    if isinstance(error, asyncio.LimitOverrunError):
        return f"the answer's head is longer than {MOST_HEAD // 1024} KiB"
    return f"{type(error).__name__}: {error}" if type(error) is not http.client.HTTPException else str(error)
