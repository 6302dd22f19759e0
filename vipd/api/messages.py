"""Requests and answers of the API as JSON: formats in docs/api.md."""

from __future__ import annotations

import json

from aiohttp import web

from vipd.declaration.notation import NotationError, parse_frontend
from vipd.operations import RefusedError

Json = dict[str, object]

API_VERSION = "vipd/v1"
SESSION_HEADER = "Vipd-Session"
_MOST_SHOWN = 200


async def body_of(request: web.Request) -> Json:
    """The JSON object of a request; empty if it has no body. Raises RefusedError."""
    # As bytes: the sender's word on their encoding may name anything, or nothing.
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        why = " ".join(str(error).split())
        raise RefusedError("malformed", "the request cannot be read", why) from None
    try:
        text = raw.decode("utf-8-sig")  # json.loads alone lets halves of surrogate pairs through
        body = json.loads(text or "{}")
        if "\\u" in text:
            json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise RefusedError("malformed", "the request is not JSON", str(error)[:_MOST_SHOWN]) from None
    if not isinstance(body, dict):
        raise RefusedError("malformed", "the request must be a JSON object")
    return body


def flag_of(request: web.Request, name: str) -> bool:
    """A query parameter that is 0 or 1. Raises RefusedError."""
    value = request.query.get(name, "0")
    if value not in ("0", "1"):
        raise RefusedError("malformed", f"{name}={value}", "", f"{name}=1, or leave it out")
    return value == "1"


def session_of(request: web.Request) -> tuple[str, int] | None:
    """The address and TCP port of this host over which whoever asks is logged in; None when that is not said.

    Raises RefusedError.
    """
    said = request.headers.get(SESSION_HEADER)
    try:
        return parse_frontend(said)[:2] if said else None
    except NotationError as error:
        hint = f"{SESSION_HEADER}: 192.0.2.1:22, or leave it out"
        raise RefusedError("malformed", f"{SESSION_HEADER}: {said}", str(error), hint) from None


def answer(value: Json, status: int = 200) -> web.Response:
    """A JSON answer that says which version of the API it is."""
    return web.json_response({"apiVersion": API_VERSION, **value}, status=status)


def encoded_answer(members: bytes) -> web.Response:
    """As `answer`, of members that are encoded already: `"name": value, ...`."""
    head = f'{{"apiVersion": {json.dumps(API_VERSION)}, '.encode()
    return web.Response(body=b"%b%b}" % (head, members), content_type="application/json", charset="utf-8")
