"""Reads the JSON of request bodies within limits; large ones in a thread."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Callable, Collection
from typing import TypeVar

from aiohttp import web

from vipd.declaration.bounded_json import Json, read_json
from vipd.declaration.operations import RefusedError
from vipd.declaration.syntax import quoted
from vipd.declaration.values import did_you_mean
from vipd.host.gc_control import gc_paused

T = TypeVar("T")

MAX_BODY_BYTES = 48 * 2**20
"""For a request that declares services. 100,000 services with five backends each take 17 MiB (180 bytes
each), with named ports and a check each 42 MiB (440 bytes each)."""
SMALL_BODY_BYTES = 2**20
"""For any other request."""
MAX_VALUES = 5_000_000
"""Values in a body, as many as it has commas and opening brackets: each may take a hundred bytes of memory.
100,000 services with five backends, named ports and a check each have 3,200,000."""
INLINE_MAX_BYTES = 2**14
"""Bytes above which a body is read in a thread."""
BODY_SECONDS = 60.0
"""How long a large body may take to arrive."""

_MAX_SHOWN = 200


def is_large(request: web.Request) -> bool:
    """Whether a body may be larger than that of any request that declares no services."""
    length = request.content_length
    return length is None or length > SMALL_BODY_BYTES


async def read_large(request: web.Request) -> bytes:
    """The bytes of a body with services. Raises RefusedError."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await read_raw(request, MAX_BODY_BYTES)
    except TimeoutError:
        why = f"a large body may take {BODY_SECONDS:.0f} s to come"
        raise RefusedError("malformed", "the request did not come in time", why) from None


async def body_of(request: web.Request) -> Json:
    """The JSON object of a small request; empty if it has no body. Raises RefusedError."""
    return await parse_body(lambda body: body, await read_raw(request, SMALL_BODY_BYTES))


def refuse_unknown_members(body: Json, known: Collection[str], parameters: Collection[str] = ()) -> None:
    """Raises RefusedError if the body of a request has other members than it may have. `parameters`: those of
    its query, which are sometimes written into the body."""
    for name in body:
        if name in known:
            continue
        if name in parameters:
            hint = f"{name} belongs into the query: ?{name}="
        else:
            hint = did_you_mean(name, known) if known else "this request has no body"
        raise RefusedError("malformed", f"unknown member {quoted(name)}", "", hint)


async def read_raw(request: web.Request, max_bytes: int) -> bytes:
    """The bytes of a body: the charset that the sender declares may be invalid, or missing. Raises
    RefusedError, as soon as it is larger than `max_bytes`."""
    raw, length = bytearray(), request.content_length
    try:
        if length is not None and length > max_bytes:
            raise too_large(max_bytes)
        async for piece in request.content.iter_any():
            raw += piece
            if len(raw) > max_bytes:
                raise too_large(max_bytes)
    except web.RequestPayloadError as error:
        why = " ".join(str(error).split())
        raise RefusedError("malformed", "the request cannot be read", why) from None
    return bytes(raw)


def too_large(max_bytes: int) -> RefusedError:
    """A body of more than `max_bytes` bytes is not read."""
    why = f"it may have {max_bytes >> 20} MiB"
    return RefusedError("too-large", "the request is too large", why, "declare fewer services at once")


async def parse_body(parse: Callable[[Json], T], raw: bytes) -> T:
    """The result of `parse` on the JSON object of a body, in a thread if the body is large. Raises
    RefusedError."""
    if len(raw) <= INLINE_MAX_BYTES:
        return parse(_object(raw))
    with gc_paused(temporary=True):
        return await asyncio.to_thread(lambda: parse(_object(raw)))


def _object(raw: bytes) -> Json:
    """The JSON object of a body; an empty body is an empty one."""
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        why = f"it may have {MAX_VALUES} values"
        raise RefusedError("too-large", "the request is too large", why, "declare fewer services at once")
    try:
        # As UTF-8: given bytes, json.loads accepts other encodings, too, and halves of surrogate pairs.
        body = read_json(raw.removeprefix(codecs.BOM_UTF8).decode() or "{}", MAX_BODY_BYTES)
        if b"\\u" in raw:
            json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except ValueError as error:
        raise RefusedError("malformed", "the request is not JSON", str(error)[:_MAX_SHOWN]) from None
    if not isinstance(body, dict):
        raise RefusedError("malformed", "the request must be a JSON object")
    return body
