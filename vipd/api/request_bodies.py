"""Reads the JSON of request bodies in limited memory and time, without blocking the event loop.

`json.loads` blocks all of Python until the whole text is read, and makes thirty bytes and more of one.
So a body is first cut into parts at its brackets, with a limit on the cost of a part; each part is read
alone. A large body is read in a thread, where no single call takes longer than some 20 ms.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from aiohttp import web

from vipd.declaration.fields import did_you_mean
from vipd.declaration.operations import RefusedError
from vipd.declaration.syntax import quoted
from vipd.host.gc_control import gc_paused

Json = dict[str, object]
T = TypeVar("T")

MAX_BODY_BYTES = 48 * 2**20
"""For a request that declares services. 100,000 services with five backends each take 17 MiB (180 bytes
each), with named ports and a check each 42 MiB (440 bytes each)."""
SMALL_BODY_BYTES = 2**20
"""For any other request."""
MAX_DEPTH = 32
MAX_NUMBER_LENGTH = 64
"""Characters of a number."""
MAX_STRING_BYTES = 2**16
"""Bytes of a text."""
MAX_SERVICE_BYTES = 2**20
MAX_VALUES = 200_000
"""Values in one service, or besides the services: as many as there are commas."""
MAX_SERVICES = 200_000
CHUNK_BYTES = 2**15
"""Bytes of services that are read at once."""
INLINE_MAX_BYTES = 2**14
"""Bytes above which a body is read in a thread."""
BODY_SECONDS = 60.0
"""How long a large body may take to arrive."""

_MAX_SHOWN = 200
_OPENING, _CLOSING = (b"[", b"{"), (b"]", b"}")

_TOKEN = re.compile(rb'[^"\[\]{}]{0,65536}+("[^"\\]{0,1024}+"|["\[\]{}])?')
"""The tokens at which a JSON text may be cut: a bracket or a string, and the text before it. A quotation mark
alone begins a string for `_TEXT`. No match takes long, whatever the text."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_LONG_NUMBER = re.compile(rb"[-+.0-9a-zA-Z]{%d}" % (MAX_NUMBER_LENGTH + 1))


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
    return await parse_body(_whole, await read_raw(request, SMALL_BODY_BYTES))


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
    """A body, or a part of one, of more than `max_bytes` bytes is not read."""
    why = f"it may have {max_bytes >> 20} MiB"
    return RefusedError("too-large", "the request is too large", why, "declare fewer services at once")


async def parse_body(parse: Callable[[Json, Iterator[object] | None], T], raw: bytes) -> T:
    """The result of `parse` on a body with a list `services`. Raises RefusedError.

    `parse` is called, in a thread if the body is large, with all other members and an iterator that reads the
    services on demand; None: there is no such list.
    """
    if len(raw) <= INLINE_MAX_BYTES:
        return _parse_body(parse, raw)
    with gc_paused(temporary=True):
        return await asyncio.to_thread(_parse_body, parse, raw)


def _parse_body(parse: Callable[[Json, Iterator[object] | None], T], raw: bytes) -> T:
    """Scan a whole body, then read it."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    rest, cuts = _split_services(raw)
    members = _read(rest or b"{}")
    if not isinstance(members, dict):
        raise RefusedError("malformed", "the request must be a JSON object")
    if len(cuts) <= 1:
        return parse(members, None)
    if members.pop("services", None):
        raise malformed("it has two lists of services")
    return parse(members, _services(raw, cuts))


def _whole(members: Json, services: Iterator[object] | None) -> Json:
    return members if services is None else {**members, "services": list(services)}


def _split_services(raw: bytes) -> tuple[bytes, list[int]]:
    """A body without the content of its list `services`, and the positions at which to cut that: neighbours
    are the begin and end of a part. Raises RefusedError for a body that must not be read at all."""
    cuts, depth, key, within, count = list[int](), 0, b"", False, 0
    for token, end in _tokens(raw):
        if end - (cuts[-1] if cuts else 0) > MAX_SERVICE_BYTES + CHUNK_BYTES:
            raise _service_too_large()
        if token in _OPENING:
            depth += 1
            count += within and depth == 3
            if depth > MAX_DEPTH or count > MAX_SERVICES:
                raise _too_deep() if depth > MAX_DEPTH else _too_many()
            if depth == 2 and token == b"[" and key == b'"services"' and not cuts:
                cuts, within = [end], True
        elif token in _CLOSING:
            depth -= 1
            if within and (depth < 2 or (depth == 2 and end - cuts[-1] >= CHUNK_BYTES)):
                within = depth == 2
                cuts.append(end if within else end - 1)
        else:
            key = token
    return (raw[: cuts[0]] + raw[cuts[-1] :] if len(cuts) > 1 else raw), cuts


def _tokens(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """The brackets and texts of a JSON text, each with where it ends. Raises RefusedError."""
    at = 0
    while at < len(raw):
        found = _TOKEN.match(raw, at)
        assert found is not None  # noqa: S101 (it matches nothing, too)
        token, end = found[1] or b"", found.end()
        if end - len(token) - at > MAX_NUMBER_LENGTH and _LONG_NUMBER.search(raw, at, end - len(token)):
            raise malformed(f"a number may have {MAX_NUMBER_LENGTH} characters")
        if token == b'"':
            whole = _TEXT.match(raw, end - 1, end + MAX_STRING_BYTES)
            if whole is None:
                raise malformed(f"a text has no end, or is larger than {MAX_STRING_BYTES >> 10} KiB")
            token, end = whole[0], whole.end()
        if token:
            yield token, end
        at = end


def _services(raw: bytes, cuts: Sequence[int]) -> Iterator[object]:
    """The items of the list that was cut. Raises RefusedError."""
    count = 0
    for begin, end in pairwise(cuts):
        part = raw[begin:end].strip()
        if count:
            after = part[1:].lstrip() if part[:1] == b"," else b""
            if part and not after:
                raise malformed("there is no comma, or nothing after one, between two services")
            part = after
        found = _read(b"[" + part + b"]")
        count += len(found)
        if count > MAX_SERVICES:
            raise _too_many()
        yield from found


def _read(text: bytes) -> Any:
    """Parses a part, which is fast as it is small. Raises RefusedError."""
    if len(text) > MAX_SERVICE_BYTES + CHUNK_BYTES or text.count(b",") > MAX_VALUES:
        raise _service_too_large()
    try:
        # As UTF-8: given bytes, json.loads accepts other encodings, too, and halves of surrogate pairs.
        found = json.loads(text.decode())
        if b"\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise malformed(str(error)[:_MAX_SHOWN]) from None
    return found


def malformed(why: str) -> RefusedError:
    """The error for a body that is no JSON, or that may not be read."""
    return RefusedError("malformed", "the request is not JSON", why)


def _too_deep() -> RefusedError:
    return malformed(f"it is nested more than {MAX_DEPTH} levels deep")


def _too_many() -> RefusedError:
    return RefusedError("too-large", f"the request has more than {MAX_SERVICES} services")


def _service_too_large() -> RefusedError:
    why = f"a service may have {MAX_SERVICE_BYTES >> 20} MiB and {MAX_VALUES} values"
    return RefusedError("too-large", "the request is too large", why)
