"""The API's request for events: stored ones, and a stream of new ones."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web

from vipd.api.messages import encoded_json_response, flag_of, route
from vipd.declaration.operations import RefusedError, Services, find
from vipd.host.batches import in_slices
from vipd.host.connections.http import CHUNK_BYTES
from vipd.model.formatting import time_text
from vipd.model.service import Service
from vipd.observe.events.event import EventRecord, encode
from vipd.observe.events.recorder import Recorder, Subscription

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 15.0
STUCK_SECONDS = 30.0
"""A follower that reads nothing for this long is disconnected."""
MAX_FOLLOWERS = 100
TOO_FAR_BEHIND = "too far behind; ask again with after= the last id"

_PARAMETERS = ("service", "since", "after", "limit")


@dataclass(frozen=True, slots=True)
class ServiceEvents:
    """Events about one service."""

    service: str
    owner: str = ""
    """Its declaration as a unit; empty when there is no such service now."""
    addresses: frozenset[str] = frozenset()
    """Its backends'."""

    def matches(self, event: EventRecord) -> bool:
        """Whether an event names the service, or no service but its file, or an address of its backends."""
        if event.services:
            return self.service in event.services
        by_file = bool(self.owner) and event.unit == self.owner
        return by_file or not self.addresses.isdisjoint(event.backends)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Filter of requested events."""

    service: ServiceEvents | None = None
    """Only events about this service; None: all."""
    since: datetime | None = None
    after: int = 0
    """Those with a greater id."""
    limit: int | None = None
    """Only this many of the latest ones."""

    def matches(self, event: EventRecord) -> bool:
        """Whether the event matches, apart from the limit."""
        return (
            event.id > self.after
            and (self.service is None or self.service.matches(event))
            and (self.since is None or event.at >= self.since)
        )

    def select(self, kept: Iterable[EventRecord]) -> Sequence[EventRecord]:
        """Those among the events kept, the oldest first."""
        found = [occurrence for occurrence in kept if self.matches(occurrence)]
        return found if self.limit is None else found[len(found) - min(self.limit, len(found)) :]


class EventRoutes:
    """Answers `/v1/events`. `services` gives those of now."""

    def __init__(self, recorder: Recorder | None, services: Callable[[], Services]) -> None:
        self._recorder, self._services = recorder, services
        self._followers, self._readers = asyncio.Semaphore(MAX_FOLLOWERS), asyncio.Semaphore()

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        return [route("GET", "/v1/events", self.events, flags=("follow",), parameters=_PARAMETERS)]

    async def end(self, _: web.Application) -> None:
        """Streams end when vipd stops: it does not wait for them."""
        if self._recorder is not None:
            self._recorder.end_subscriptions()

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The stored events, oldest first; with `follow=1` a stream of lines that continues."""
        wanted, recorder = self._read_filter(request), self._recorder
        if recorder is None:
            raise RefusedError("internal", "no events are kept")
        if flag_of(request, "follow"):
            return await self._stream(request, wanted, recorder)

        def encoded() -> bytes:
            return b", ".join([encode(occurrence).rstrip() for occurrence in wanted.select(recorder.read())])

        async with self._readers:
            return encoded_json_response(b'"events": [%b]' % await asyncio.to_thread(encoded))

    async def _stream(
        self, request: web.Request, event_filter: EventFilter, recorder: Recorder
    ) -> web.StreamResponse:
        if self._followers.locked():
            why = f"there are {MAX_FOLLOWERS}, the most of all"
            raise RefusedError("conflict", "too many others follow already", why, "end some of them")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        async with self._followers:
            try:
                await self._send(request, response, event_filter, recorder)
            except TimeoutError:
                log.warning("a follower of events has taken nothing for %d s and is let go", STUCK_SECONDS)
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:
                pass  # it has disconnected
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, wanted: EventFilter, recorder: Recorder
    ) -> None:
        with recorder.subscribe() as follower:
            await response.prepare(request)
            line = _LineWriter(response)
            await line.send({"heartbeat": time_text(datetime.now(UTC)), "last": recorder.last})
            async with self._readers:
                stored, last = await asyncio.to_thread(_stored_lines, recorder, wanted)
            async for start in in_slices(range(0, len(stored), CHUNK_BYTES)):
                await line.write(stored[start : start + CHUNK_BYTES])
            # Events from during the read of the ring are both there and in the queue.
            await _follow(line, follower, wanted, last)

    def _read_filter(self, request: web.Request) -> EventFilter:
        query = request.query
        return EventFilter(
            _service_events(self._services(), query.get("service", "")),
            _time(query.get("since")),
            _number(query.get("after")) or 0,
            _number(query.get("limit")),
        )


class _LineWriter:
    """Sends lines to a client, which must read them in time."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response

    async def event(self, event: EventRecord) -> None:
        """Send an event."""
        await self.write(_line(event))

    async def send(self, value: dict[str, object]) -> None:
        """Send any other value."""
        await self.write(json.dumps(value).encode() + b"\n")

    async def write(self, data: bytes) -> None:
        """Send a part of lines that are encoded already."""
        async with asyncio.timeout(STUCK_SECONDS):
            await self._response.write(data)


def _line(event: EventRecord) -> bytes:
    return b'{"event":' + encode(event).rstrip() + b"}\n"


def _stored_lines(recorder: Recorder, event_filter: EventFilter) -> tuple[bytes, int]:
    """The lines of the stored events, and the id of the last one; 0: there is none."""
    stored = event_filter.select(recorder.read())
    return b"".join(map(_line, stored)), stored[-1].id if stored else 0


async def _follow(
    line: _LineWriter, subscription: Subscription, event_filter: EventFilter, last: int
) -> None:
    while not subscription.finished:
        event = await subscription.next(HEARTBEAT_SECONDS)
        if event is None:
            if not subscription.finished:
                await line.send({"heartbeat": time_text(datetime.now(UTC))})
        elif event.id > last and event_filter.matches(event):
            await line.event(event)
    if subscription.overflowed:
        log.warning("a follower of events is too far behind and is let go")
        await line.send({"dropped": TOO_FAR_BEHIND})


def _service_events(services: Services, target: str) -> ServiceEvents | None:
    """The service that a target names now; events may also be about a removed one."""
    if not target:
        return None
    try:
        found: Service = find(services, target)
    except RefusedError:
        return ServiceEvents(target)
    backends = (*found.backends, *found.fallback)
    return ServiceEvents(found.name, found.origin.owner, frozenset(backend.address for backend in backends))


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        hint = "as 2026-01-31T12:00:00Z"
        raise RefusedError("malformed", f"since={text}", "it is no time", hint) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RefusedError("malformed", f"{text!r} is not a whole number of 0 or more")
    return int(text)
