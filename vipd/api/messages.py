"""Requests and answers of the API as JSON: formats in docs/api.md."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from vipd.api.request_bodies import body_of, refuse_unknown_members
from vipd.declaration.bounded_json import Json
from vipd.declaration.operations import RefusedError
from vipd.declaration.syntax import InvalidTextError, parse_frontend
from vipd.declaration.values import did_you_mean
from vipd.host.batches import in_slices
from vipd.sources.confirmation import MAX_SECONDS

T = TypeVar("T")

API_VERSION = "vipd/v1"
SESSION_HEADER = "Vipd-Session"
_MAX_DIGITS = 9
_MAX_SHOWN = 40
_FLAG_VALUES = {"1": True, "true": True, "0": False, "false": False}
BodyHandler = Callable[[web.Request, Json], Awaitable[web.StreamResponse]]


def route(
    method: str,
    path: str,
    handler: Handler,
    *,
    flags: Collection[str] = (),
    parameters: Collection[str] = (),
    large_body: bool = False,
) -> web.RouteDef:
    """A route without a body, with all query parameters of its requests; `flags` are true or false.

    A request with anything else is refused before the handler runs. `large_body`: the handler reads a body
    itself, and refuses members that it does not know.
    """

    async def checked(request: web.Request) -> web.StreamResponse:
        _check_query(request, flags, (*flags, *parameters))
        if request.body_exists and not large_body:
            await _read_body(request, (), (*flags, *parameters))
        return await handler(request)

    return web.RouteDef(method, path, checked, {})


def body_route(
    method: str,
    path: str,
    handler: BodyHandler,
    members: Collection[str],
    *,
    flags: Collection[str] = (),
    parameters: Collection[str] = (),
) -> web.RouteDef:
    """The same for requests with a JSON object, which has no other members than these. The handler gets it;
    it is empty if there is no body."""

    async def checked(request: web.Request) -> web.StreamResponse:
        _check_query(request, flags, (*flags, *parameters), members)
        return await handler(request, await _read_body(request, members, (*flags, *parameters)))

    return web.RouteDef(method, path, checked, {})


async def _read_body(request: web.Request, members: Collection[str], parameters: Collection[str]) -> Json:
    body = await body_of(request)
    refuse_unknown_members(body, members, parameters)
    return body


def _check_query(
    request: web.Request, flags: Collection[str], known: Collection[str], members: Collection[str] = ()
) -> None:
    """Raises RefusedError for a query parameter that the route does not have, or that has no usable value."""
    for name, value in request.query.items():
        shown = f"{name}={value}"[:_MAX_SHOWN]
        if name in members and name not in known:
            raise RefusedError("malformed", f"unknown parameter {name}", "", f"{name} belongs into the body")
        if name not in known:
            hint = did_you_mean(name, known) if known else "this request has none"
            raise RefusedError("malformed", f"unknown parameter {name[:_MAX_SHOWN]}", "", hint)
        if len(request.query.getall(name)) > 1:
            raise RefusedError("malformed", f"{name} is there twice", "", "say it once")
        if name in flags:
            flag_of(request, name)
        elif not value:
            raise RefusedError("malformed", shown, "it has no value", "give it one, or leave it out")


def flag_of(request: web.Request, name: str, default: bool = False) -> bool:
    """A query parameter that is `1` or `true`, `0` or `false`; `default` without it. Raises RefusedError."""
    value = request.query.get(name)
    if value is None:
        return default
    if value not in _FLAG_VALUES:
        hint = f"{name}=1 or {name}=0, or leave it out"
        raise RefusedError("malformed", f"{name}={value}"[:_MAX_SHOWN], "it is neither true nor false", hint)
    return _FLAG_VALUES[value]


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


async def list_body(
    name: str, items: Iterable[T], row: Callable[[T], Json], before: Json | None = None
) -> bytes:
    """The body of an answer with a list, made in slices, so that other tasks of the event loop run. `before`:
    members that precede it."""
    members = {"apiVersion": API_VERSION, **(before or {})}
    # Not a list of texts: as many as there are services would leave their memory in pieces.
    body = bytearray(f'{json.dumps(members)[:-1]}, "{name}": ['.encode())
    separator = b""
    async for item in in_slices(items):
        body += separator + json.dumps(row(item)).encode()
        separator = b", "
    body += b"]}"
    return bytes(body)


def body_response(body: bytes) -> web.Response:
    """A JSON answer that is encoded already."""
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def encoded_json_response(members: bytes) -> web.Response:
    """As `json_response`, of members that are encoded already: `"name": value, ...`."""
    head = f'{{"apiVersion": {json.dumps(API_VERSION)}, '.encode()
    return body_response(b"%b%b}" % (head, members))
