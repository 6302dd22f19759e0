"""Configuration of vipd's aiohttp servers, and the sending of long answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import http_exceptions, web, web_response

CHUNK_BYTES = 64 * 1024
"""A longer body is sent in pieces of this size: little unread data is kept twice."""
TURN_BYTES = 4 * CHUNK_BYTES
"""Sent in one turn."""

log = logging.getLogger("vipd.http")

# For every answer, including aiohttp's own ones: versions are not disclosed.
vars(web_response)["SERVER_SOFTWARE"] = "vipd"


class _ClientsFaults(logging.Filter):
    """Drops records that a client alone has caused: otherwise any client could fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, http_exceptions.HttpProcessingError)


log.addFilter(_ClientsFaults())

SERVER_OPTIONS: dict[str, Any] = {"access_log": None, "logger": log, "auto_decompress": False}
"""For aiohttp's servers. Bodies are not decompressed: a few bytes could become any number."""


def long_body(response: web.StreamResponse) -> bytes | None:
    """The body of an answer that must be sent in pieces; None: it need not."""
    body = response.body if isinstance(response, web.Response) and not response.prepared else None
    return body if isinstance(body, bytes) and len(body) > CHUNK_BYTES else None


async def send_in_chunks(
    request: web.BaseRequest,
    response: web.StreamResponse,
    body: bytes,
    next_turn: Callable[[], Awaitable[None]],
) -> web.StreamResponse:
    """Send an answer, each piece of its body after the previous one was read, and when it is the client's
    turn. Raises ConnectionError."""
    sent = web.StreamResponse(status=response.status, reason=response.reason, headers=response.headers)
    sent.content_length = len(body)
    if response.keep_alive is False:
        sent.force_close()
    await sent.prepare(request)
    if request.method != "HEAD":
        for start in range(0, len(body), CHUNK_BYTES):
            if start % TURN_BYTES == 0:
                await next_turn()
            await sent.write(body[start : start + CHUNK_BYTES])
    await sent.write_eof()
    return sent
