"""The watch stream: lines of JSON, the first of which confirms its start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from vipd.sources.etcd.connection import Connection
from vipd.sources.etcd.errors import EndpointError, MalformedAnswerError
from vipd.sources.etcd.fields import MAX_BYTES
from vipd.sources.etcd.lines import Lines, in_thread_if_large, too_large
from vipd.sources.etcd.messages import Header, KeyRange, WatchEvent, WatchMessage, read_watch, watch_request
from vipd.sources.etcd.replies import error_of_cancellation, error_of_stream, read_object
from vipd.sources.etcd.transport import Headers, in_answer

GATHERED_BYTES = 2**20
"""Messages that have arrived are gathered up to this size."""


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Messages of a watch: events in order of revision, never a part of a revision.

    Without events it confirms that everything up to the header's revision has been reported.
    """

    keys: KeyRange
    header: Header
    events: tuple[WatchEvent, ...]


class Watch:
    """A watch of one range. Iterate; it ends by raising an EtcdError, never by itself."""

    def __init__(self, endpoint: str, keys: KeyRange, lines: Lines) -> None:
        self.endpoint, self.keys = endpoint, keys
        self._lines = lines

    async def begin(self) -> None:
        """Wait for the confirmation of the start. Raises EtcdError."""
        created = False
        while not created:
            message, _ = await self._message()
            created = message.created

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> WatchBatch:
        events: list[WatchEvent] = []
        size = 0
        while True:
            message, length = await self._message()
            events += message.events
            size += length
            # All that has arrived is one batch: of a key that is always written only the outcome is read.
            more = self._lines.at_hand and size < GATHERED_BYTES
            if not message.fragment and not more:
                return WatchBatch(self.keys, message.header, tuple(events))
            if size > MAX_BYTES:
                raise in_answer(too_large(), f"watch of {self.keys} at {self.endpoint}")

    async def _message(self) -> tuple[WatchMessage, int]:
        """The next message, and its length in bytes."""
        try:
            return await self._next()
        except MalformedAnswerError as error:
            raise in_answer(error, f"watch of {self.keys} at {self.endpoint}") from None

    async def _next(self) -> tuple[WatchMessage, int]:
        what = f"watch of {self.keys}"
        try:
            line = await anext(self._lines)
        except StopAsyncIteration:
            raise EndpointError(f"{self.endpoint} ended the watch") from None
        answer = await in_thread_if_large(len(line), lambda: read_object(line.decode(errors="replace")))
        if answer is None:
            raise EndpointError(f"{self.endpoint} cut off the watch in the midst of a message")
        if "result" not in answer:
            raise error_of_stream(answer, what)
        message = await in_thread_if_large(len(line), lambda: read_watch(answer["result"], self.keys))
        if message.canceled:
            raise error_of_cancellation(message.reason, message.compact_revision, what)
        return message, len(line)


@contextlib.asynccontextmanager
async def open_watch(connection: Connection, keys: KeyRange, revision: int) -> AsyncIterator[Watch]:
    """Open the stream at the first endpoint that accepts it."""
    what = f"watch of {keys}"
    async with contextlib.AsyncExitStack() as stack:

        async def begin(endpoint: str, headers: Headers) -> Watch:
            """Raises EtcdError; then nothing stays open."""
            async with contextlib.AsyncExitStack() as trying:
                request = watch_request(keys, revision)
                lines = await trying.enter_async_context(
                    connection.transport.stream(endpoint, headers, "/v3/watch", request, what)
                )
                watch = Watch(endpoint, keys, lines)
                try:
                    async with asyncio.timeout(connection.timeout):
                        await watch.begin()
                except TimeoutError:
                    raise EndpointError(f"no watch within {connection.timeout:g} s") from None
                stack.push_async_exit(trying.pop_all().__aexit__)
            return watch

        yield await connection.try_endpoints(begin)
