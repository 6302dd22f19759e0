"""Requests to etcd v3 in the form of its JSON gateway: base64 keys, 64-bit numbers as text, no zeros.

Keys and values are text, in which bytes that are no UTF-8 are lone surrogates: no two keys are the same text.
All coroutines raise EtcdError.
"""

from __future__ import annotations

import contextlib
import socket
from asyncio import timeout
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import aiohttp

from vipd.declaration.problems import printable
from vipd.host.settings.etcd import EtcdSettings
from vipd.model import limits
from vipd.model.text import byte_size
from vipd.sources.etcd.connection import MAX_BYTES, Connection, in_thread_if_large, parsed, too_large
from vipd.sources.etcd.errors import (
    NETWORK_ERRORS,
    NOT_FOUND,
    EndpointError,
    EtcdError,
    Json,
    RejectedError,
    TooLargeError,
    error_of_cancellation,
)

PAGE = 500
"""Keys in one answer: some 0.2 MB of usual services. Where values are large, fewer are asked for."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
)
"""A connection whose other end vanished silently ends after 25 s; a watch sends nothing by itself."""

_LEASE = "a lease"
_REMOVE = "remove keys below the prefix that are not needed"


class KeyValue(NamedTuple):
    """One key as stored. Revisions are the store's, counted over all keys."""

    key: str
    value: str
    mod_revision: int
    create_revision: int = 0
    lease: int = 0

    @property
    def size(self) -> int:
        """Bytes of key and value."""
        return byte_size(self.key) + byte_size(self.value)


class Event(NamedTuple):
    """One change of one key; a deleted one has no value."""

    deleted: bool
    kv: KeyValue


class Header(NamedTuple):
    """The cluster that answered, and the store's revision at that moment."""

    cluster: str
    revision: int


@dataclass(frozen=True, slots=True)
class Page:
    """Keys of a prefix in their order."""

    header: Header
    kvs: list[KeyValue]
    more: bool = False
    """The limit cut it off."""
    count: int = 0
    """Number of keys in the range, whatever limit and filters."""


class Message(NamedTuple):
    """One line of a watch."""

    created: bool
    fragment: bool
    """More events of the same revisions follow in the next message."""
    revision: int
    events: list[Event]


class EtcdClient:
    """One client of one etcd cluster. Safe to use by several tasks of one loop. Close it when done."""

    def __init__(self, settings: EtcdSettings, random: Random) -> None:
        self.connection = Connection(settings, random)

    async def list_keys(
        self,
        prefixes: Sequence[str],
        *,
        revision: int = 0,
        shorten: Callable[[KeyValue], KeyValue | None] = lambda kv: kv,
    ) -> Page:
        """Every key of some prefixes at one revision (0: the newest). `shorten`: what is kept of each, if
        anything.

        Raises CompactedError when that revision is compacted; the newest, too, can be between two pages: list
        again.
        """
        header, kvs, size = Header("", revision), list[KeyValue](), 0
        for prefix in prefixes:
            async for page in self.pages(prefix, revision=header.revision):
                header = page.header if not header.cluster else header
                kept = [short for kv in page.kvs if (short := shorten(kv)) is not None]
                kvs += kept
                size += sum(kv.size for kv in kept)
                self._bound(len(kvs), size)
        return Page(header, kvs, count=len(kvs))

    async def pages(self, prefix: str, *, revision: int = 0, keys_only: bool = False) -> AsyncIterator[Page]:
        """As `list_keys`, for one prefix, each answer by itself: all may be larger than the memory."""
        start, limit, more = prefix, PAGE, True
        while more:
            options = {"limit": str(limit), "revision": str(revision), "keys_only": keys_only}
            body = {**_range(start, after(prefix)), **options}
            try:
                page = await self._range(body, f"{prefix}*")
            except TooLargeError:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)
                continue
            revision, more = revision or page.header.revision, page.more
            start = page.kvs[-1].key + "\0" if page.kvs else start
            yield page

    async def get(self, key: str, revision: int = 0) -> KeyValue | None:
        """One key at a revision (0: the newest); None if it does not exist."""
        page = await self._range({**_range(key), "revision": str(revision)}, key)
        return page.kvs[0] if page.kvs else None

    async def changed_since(self, prefixes: Sequence[str], revision: int) -> list[Page]:
        """For each prefix its count of keys, and the key written last, without its value, if that was after a
        revision: all at one. Of the keys only one is read: their names may be as long as values."""
        newer = {"keys_only": True, "min_mod_revision": str(revision + 1), "limit": "1"}
        newest = {**newer, "sort_order": "DESCEND", "sort_target": "MOD"}
        asked = [{"request_range": {**_range(prefix, after(prefix)), **newest}} for prefix in prefixes]

        def read(answer: Json) -> list[Page]:
            header = _header(answer)
            parts = zip(prefixes, answer["responses"], strict=True)
            return [_page(part["response_range"], header) for _, part in parts]

        what = f"read of {', '.join(f'{printable(prefix)}*' for prefix in prefixes)}"
        return await self.connection.call("/v3/kv/txn", {"success": asked}, what, read)

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write a key."""
        what = f"write of {printable(key)}"
        await self.connection.call("/v3/kv/put", _put(key, value, lease), what, _header)

    async def txn(
        self,
        unchanged: Mapping[str, int],
        puts: Mapping[str, tuple[str, int]] | None = None,
        deletes: Collection[str] = (),
    ) -> int:
        """Write values with their leases, and delete keys, if others were last written at these revisions (0:
        they do not exist); returns the new revision, or 0 if one was not.

        After an EndpointError that was `sent` it may or may not have been done: read before a retry.
        """
        puts = puts or {}
        compare = [
            {"target": "MOD", "result": "EQUAL", "key": _encoded(key), "mod_revision": str(revision)}
            for key, revision in unchanged.items()
        ]
        then = [{"request_put": _put(key, value, lease)} for key, (value, lease) in puts.items()]
        then += [{"request_delete_range": _range(key)} for key in deletes]
        what = f"write of {', '.join(map(printable, (*puts, *deletes)))}"

        def read(answer: Json) -> int:
            return _header(answer).revision if answer.get("succeeded") else 0

        body = {"compare": compare, "success": then}
        return await self.connection.call("/v3/kv/txn", body, what, read, repeatable=False)

    async def grant_lease(self, seconds: int) -> int:
        """A new lease; its id."""
        body = {"TTL": str(seconds)}
        return await self.connection.call("/v3/lease/grant", body, _LEASE, lambda a: int(a["ID"]))

    async def renew_lease(self, lease: int) -> int:
        """Renew a lease; the seconds it has from now on. 0: it is no more."""
        return await self.connection.call(
            "/v3/lease/keepalive", {"ID": str(lease)}, _LEASE, lambda a: int(a["result"].get("TTL", 0))
        )

    async def lease_times(self, lease: int) -> tuple[int, int]:
        """Seconds that a lease was granted for, and the remaining ones; none remain of an expired one."""

        def read(answer: Json) -> tuple[int, int]:
            return int(answer.get("grantedTTL", 0)), max(0, int(answer.get("TTL", 0)))

        return await self.connection.call("/v3/lease/timetolive", {"ID": str(lease)}, _LEASE, read)

    async def revoke_lease(self, lease: int) -> None:
        """End a lease, and with it its keys; nothing happens if it is no more."""
        try:
            await self.connection.call("/v3/lease/revoke", {"ID": str(lease)}, _LEASE, _header)
        except RejectedError as error:
            if error.code != NOT_FOUND:
                raise

    @contextlib.asynccontextmanager
    async def watch(self, prefix: str, revision: int) -> AsyncIterator[Watch]:
        """Watch a prefix from a revision on, at the first endpoint that accepts it.

        One watch a request, though several would fit in a body: measured with 3.4.23, of 120 streams that
        requested three watches in 600 bytes nine never began one of them. The gateway drops any part of a
        body that it has not read when its answer begins.
        """
        options = {"start_revision": str(revision), "progress_notify": True, "fragment": True}
        body = {"create_request": {**_range(prefix, after(prefix)), **options}}
        what, connection = f"watch of {printable(prefix)}*", self.connection
        leader = {"Grpc-Metadata-hasleader": "true"}
        async with contextlib.AsyncExitStack() as opened:

            async def begin(endpoint: str, token: str | None) -> Watch:
                async with contextlib.AsyncExitStack() as opening, timeout(connection.timeout):
                    response = await opening.enter_async_context(
                        connection.open(endpoint, token, "/v3/watch", body, what, **leader)
                    )
                    _end_when_half_open(response)
                    watch = Watch(connection, endpoint, response.content, what)
                    await watch.begin()
                    opened.push_async_exit(opening.pop_all())
                return watch

            yield await connection.try_endpoints(begin)

    async def close(self) -> None:
        """Close every connection."""
        await self.connection.close()

    async def _range(self, body: Json, keys: str) -> Page:
        what = f"read of {printable(keys)}"
        return await self.connection.call("/v3/kv/range", body, what, lambda a: _page(a, _header(a)))

    def _bound(self, keys: int, size: int) -> None:
        what = f"{self.connection.endpoint} lists more than"
        if keys > limits.ETCD_KEYS:
            raise TooLargeError(f"{what} {limits.ETCD_KEYS} keys; hint: {_REMOVE}")
        if size > limits.ETCD_BYTES:
            raise TooLargeError(f"{what} {limits.ETCD_BYTES >> 20} MiB; hint: {_REMOVE}")


class Watch:
    """A watch of one prefix. Iterate; it ends by raising an EtcdError, never by itself."""

    def __init__(self, connection: Connection, endpoint: str, body: aiohttp.StreamReader, what: str) -> None:
        self.endpoint = endpoint
        self.revision = 0
        """The store's newest, as far as it has told."""
        self._connection, self._body, self._what = connection, body, what
        self._received = bytearray()
        self._events: list[Event] = []
        self._size = 0
        self._created = self._whole = False
        """The last message was whole: no fragment of it is to come."""

    async def begin(self) -> None:
        """Wait for the confirmation of the start. Raises EtcdError."""
        while not self._created:
            await self._receive()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> list[Event]:
        """Events in order of revision, never a part of a revision: all that have arrived."""
        while not self._whole:
            await self._receive()
        events, self._events = self._events, []
        self._size, self._whole = 0, False
        return events

    async def _receive(self) -> None:
        """Read the next messages: all that have arrived, at least one."""
        lines = await self._lines()
        self._size += len(lines)
        if self._size > MAX_BYTES:
            raise self._too_large()

        def messages() -> list[Message]:
            return [parsed(line, self._what, self._read) for line in lines.split(b"\n") if line.strip()]

        for message in await in_thread_if_large(len(lines), messages):
            self._created |= message.created
            self._whole = not message.fragment
            self.revision = message.revision or self.revision
            self._events += message.events

    def _read(self, answer: Json) -> Message:
        result = answer["result"]
        if result.get("canceled"):
            raise error_of_cancellation(result, self._what)
        events = [
            Event(event.get("type") == "DELETE", _kv(event["kv"])) for event in result.get("events", ())
        ]
        # A proxy of etcd leaves the header of some messages empty.
        revision = int((result.get("header") or {}).get("revision") or 0)
        return Message(bool(result.get("created")), bool(result.get("fragment")), revision, events)

    async def _lines(self) -> bytes:
        while True:
            try:
                piece = await self._body.readany()
            except NETWORK_ERRORS as error:
                raise self._connection.network_error(self.endpoint, error) from None
            if not piece:
                raise EndpointError(f"{self.endpoint} ended the watch")
            begun = len(self._received)
            self._received += piece
            if end := self._received.rfind(b"\n", begun) + 1:
                lines = bytes(self._received[:end])
                del self._received[:end]
                return lines
            if len(self._received) > MAX_BYTES:
                raise self._too_large()

    def _too_large(self) -> EtcdError:
        return too_large(f"{self._what} at {self.endpoint}")


def after(prefix: str) -> str:
    """The end of the range of all keys with a prefix, whose last character is ASCII."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _encoded(text: str) -> str:
    return b64encode(text.encode(errors="surrogateescape")).decode("ascii")


def _decoded(data: str) -> str:
    return b64decode(data, validate=True).decode(errors="surrogateescape")


def _range(start: str, end: str = "") -> Json:
    """As requests write it; no end: the one key `start`."""
    return {"key": _encoded(start), **({"range_end": _encoded(end)} if end else {})}


def _put(key: str, value: str, lease: int) -> Json:
    return {"key": _encoded(key), "value": _encoded(value), **({"lease": str(lease)} if lease else {})}


def _header(answer: Json) -> Header:
    header = answer["header"]
    return Header(str(header["cluster_id"]), int(header["revision"]))


def _page(answer: Json, header: Header) -> Page:
    kvs = [_kv(kv) for kv in answer.get("kvs", ())]
    more = bool(answer.get("more"))
    if more and not kvs:
        raise ValueError("there are more keys after none")
    return Page(header, kvs, more, int(answer.get("count", 0)))


def _kv(kv: Json) -> KeyValue:
    return KeyValue(
        _decoded(kv["key"]),
        _decoded(kv.get("value", "")),
        int(kv["mod_revision"]),
        int(kv.get("create_revision", 0)),
        int(kv.get("lease", 0)),
    )


def _end_when_half_open(response: aiohttp.ClientResponse) -> None:
    """Make the kernel check whether the other end still exists: nothing else does (etcd-io/etcd#8980)."""
    transport = response.connection.transport if response.connection else None
    opened = transport.get_extra_info("socket") if transport else None
    if opened is not None:
        for level, option, value in KEEPALIVE:
            opened.setsockopt(level, option, value)
