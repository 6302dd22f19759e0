"""The API's request for events: stored ones, and a stream of new ones."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web

from vipd.api.messages import answer, flag_of
from vipd.api.user_quota import UserQuota
from vipd.declaration.operations import RefusedError, Services, find
from vipd.model.formatting import time_text
from vipd.model.service import Service
from vipd.observe.events.event import EventRecord, encode
from vipd.observe.events.recorder import Follower, Recorder

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 15.0
STUCK_SECONDS = 30.0
"""A follower that reads nothing for this long is disconnected."""
MOST_FOLLOWERS = 100
BEHIND = "too far behind; ask again with after= the last id"

_PARAMETERS = ("service", "since", "after", "limit", "follow")


@dataclass(frozen=True, slots=True)
class Concerned:
    """Events about one service."""

    service: str
    owner: str = ""
    """Its declaration as a unit; empty when there is no such service now."""
    addresses: frozenset[str] = frozenset()
    """Its backends'."""

    def by(self, occurrence: EventRecord) -> bool:
        """Whether an event names the service, or no service but its file, or an address of its backends."""
        if occurrence.services:
            return self.service in occurrence.services
        by_file = bool(self.owner) and occurrence.unit == self.owner
        return by_file or not self.addresses.isdisjoint(occurrence.backends)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Filter of requested events."""

    service: Concerned | None = None
    """Only events about this service; None: all."""
    since: datetime | None = None
    after: int = 0
    """Those with a greater id."""
    limit: int | None = None
    """Only this many of the latest ones."""

    def picks(self, occurrence: EventRecord) -> bool:
        """Whether the event matches, apart from the limit."""
        return (
            occurrence.id > self.after
            and (self.service is None or self.service.by(occurrence))
            and (self.since is None or occurrence.at >= self.since)
        )

    def of(self, kept: Iterable[EventRecord]) -> Sequence[EventRecord]:
        """Those among the events kept, the oldest first."""
        found = [occurrence for occurrence in kept if self.picks(occurrence)]
        return found if self.limit is None else found[len(found) - min(self.limit, len(found)) :]


class EventRoutes:
    """Answers `/v1/events`. `services` gives those of now."""

    def __init__(self, recorder: Recorder | None, services: Callable[[], Services]) -> None:
        self._recorder, self._services = recorder, services
        self._quota = UserQuota(MOST_FOLLOWERS)

    def routes(self) -> list[web.RouteDef]:
        """Routes for the application."""
        return [web.get("/v1/events", self.events)]

    async def end(self, _: web.Application) -> None:
        """Streams end when vipd stops: it does not wait for them."""
        if self._recorder is not None:
            self._recorder.end_followers()

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The stored events, oldest first; with `follow=1` a stream of lines that continues."""
        wanted, recorder = self._wanted(request), self._recorder
        if recorder is None:
            raise RefusedError("internal", "no events are kept")
        if flag_of(request, "follow"):
            return await self._stream(request, wanted, recorder)
        kept = await asyncio.to_thread(recorder.read)
        return answer({"events": [json.loads(encode(occurrence)) for occurrence in wanted.of(kept)]})

    async def _stream(self, request: web.Request, wanted: Wanted, recorder: Recorder) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        too_many = "too many others follow already", "end some of them"
        with self._quota.taken(request, *too_many), recorder.following() as follower:
            await response.prepare(request)
            line = _Line(response)
            try:
                await line.send({"heartbeat": time_text(datetime.now(UTC)), "last": recorder.last})
                last = 0
                for occurrence in wanted.of(await asyncio.to_thread(recorder.read)):
                    await line.event(occurrence)
                    last = occurrence.id
                # Events from during the read of the ring are both there and in the queue.
                await _follow(line, follower, wanted, last)
            except TimeoutError:
                log.warning("a follower of events has taken nothing for %d s and is let go", STUCK_SECONDS)
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:
                pass  # it has disconnected
        return response

    def _wanted(self, request: web.Request) -> Wanted:
        query = request.query
        if unknown := sorted(set(query) - set(_PARAMETERS)):
            raise RefusedError("malformed", f"unknown parameter {unknown[0]}", "", ", ".join(_PARAMETERS))
        return Wanted(
            _concerned(self._services(), query.get("service", "")),
            _time(query.get("since")),
            _number(query.get("after")) or 0,
            _number(query.get("limit")),
        )


class _Line:
    """Sends lines to a client, which must read them in time."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response

    async def event(self, occurrence: EventRecord) -> None:
        """Send an event."""
        await self._send(b'{"event":' + encode(occurrence).rstrip() + b"}\n")

    async def send(self, value: dict[str, object]) -> None:
        """Send any other value."""
        await self._send(json.dumps(value).encode() + b"\n")

    async def _send(self, data: bytes) -> None:
        async with asyncio.timeout(STUCK_SECONDS):
            await self._response.write(data)


async def _follow(line: _Line, follower: Follower, wanted: Wanted, last: int) -> None:
    while not follower.over:
        occurrence = await follower.next(HEARTBEAT_SECONDS)
        if occurrence is None:
            if not follower.over:
                await line.send({"heartbeat": time_text(datetime.now(UTC))})
        elif occurrence.id > last and wanted.picks(occurrence):
            await line.event(occurrence)
    if follower.behind:
        log.warning("a follower of events is too far behind and is let go")
        await line.send({"dropped": BEHIND})


def _concerned(services: Services, target: str) -> Concerned | None:
    """The service that a target names now; events may also be about a removed one."""
    if not target:
        return None
    try:
        found: Service = find(services, target)
    except RefusedError:
        return Concerned(target)
    backends = (*found.backends, *found.fallback)
    return Concerned(found.name, found.origin.owner, frozenset(backend.address for backend in backends))


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
