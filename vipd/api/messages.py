"""Requests and answers of the API as JSON: formats in docs/api.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from aiohttp import web

from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import RefusedError
from vipd.declaration.syntax import InvalidTextError, parse_frontend
from vipd.host.batches import in_batches
from vipd.sources.confirmation import MAX_SECONDS

T = TypeVar("T")

API_VERSION = "vipd/v1"
SESSION_HEADER = "Vipd-Session"
_MAX_DIGITS = 9


def flag_of(request: web.Request, name: str) -> bool:
    """A query parameter that is 0 or 1. Raises RefusedError."""
    value = request.query.get(name, "0")
    if value not in ("0", "1"):
        raise RefusedError("malformed", f"{name}={value}", "", f"{name}=1, or leave it out")
    return value == "1"


def confirm_seconds_of(request: web.Request) -> int | None:
    """The query parameter `confirm`: seconds; None if the request has none. Raises RefusedError."""
    value = request.query.get("confirm")
    if value is None:
        return None
    seconds = int(value) if value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS else 0
    if not 1 <= seconds <= MAX_SECONDS:
        raise RefusedError(
            "malformed", f"confirm={value[:40]}", "", f"confirm is seconds, from 1 to {MAX_SECONDS}"
        )
    return seconds


def session_of(request: web.Request) -> tuple[str, int] | None:
    """The local address and TCP port of the client's login session; None if the request does not name them.

    Raises RefusedError.
    """
    said = request.headers.get(SESSION_HEADER)
    try:
        return parse_frontend(said)[:2] if said else None
    except InvalidTextError as error:
        hint = f"{SESSION_HEADER}: 192.0.2.1:22, or leave it out"
        raise RefusedError("malformed", f"{SESSION_HEADER}: {said}", str(error), hint) from None


def json_response(value: Json, status: int = 200) -> web.Response:
    """A JSON answer with the version of the API."""
    return web.json_response({"apiVersion": API_VERSION, **value}, status=status)


async def chunked_json_response(
    name: str, items: Mapping[str, T], row: Callable[[T], Json], before: Json | None = None
) -> web.Response:
    """An answer with a list that is built and encoded in parts, so that other tasks of the event loop run.
    `before`: members that precede it."""
    head = [f"{json.dumps(member)}: {json.dumps(value)}" for member, value in (before or {}).items()]
    parts = []
    async for part in in_batches(items):
        parts += [json.dumps(row(item)) for item in part.values()]
    return encoded_json_response(", ".join([*head, f'"{name}": [{", ".join(parts)}]']).encode())


def encoded_json_response(members: bytes) -> web.Response:
    """As `answer`, of members that are encoded already: `"name": value, ...`."""
    head = f'{{"apiVersion": {json.dumps(API_VERSION)}, '.encode()
    return web.Response(body=b"%b%b}" % (head, members), content_type="application/json", charset="utf-8")
