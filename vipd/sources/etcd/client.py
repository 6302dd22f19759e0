"""One client of etcd v3 over its JSON gateway: base64 keys, 64-bit numbers as text, no zeros.

It uses the endpoint that worked last, and the others in turn when that fails; logs in; reads TLS files again
when they change. Keys and values are text, in which bytes that are no UTF-8 are lone surrogates: no two keys
are the same text. All coroutines raise EtcdError.

It asks by aiohttp, which vipd needs anyway. The libraries for etcd need grpcio: 24 MB of memory, 19 MB on
disk, 0.12 s more to start, and a compiled wheel for each version of Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from asyncio import timeout
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

import aiohttp

from vipd.declaration.problems import printable
from vipd.host.durable import error_text, read_regular
from vipd.host.file_calls import file_calls
from vipd.host.settings.etcd import EtcdSettings
from vipd.model import limits
from vipd.model.text import byte_size
from vipd.sources.etcd.errors import (
    FAILED_PRECONDITION,
    GARBAGE,
    NETWORK_ERRORS,
    NOT_FOUND,
    EndpointError,
    EtcdError,
    Json,
    RejectedError,
    TokenRejectedError,
    TooLargeError,
    error_of_answer,
    error_of_cancellation,
    error_of_json,
    error_of_network,
)

PAGE = 500
"""Keys in one answer: some 0.2 MB of usual services. Where values are large, fewer are asked for."""
MAX_BYTES = 16 * 2**20
"""Of one answer, or of one message of a stream. etcd's own limit for a request, 1.5 MiB, results in 2 MiB."""
MAX_FILE_BYTES = 2**20
"""Of a file with certificates, a key or a password."""
THREAD_MIN_BYTES = 2**17
"""Bytes above which an answer is parsed in a thread: it takes some milliseconds."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
)
"""A connection whose other end vanished silently ends after 25 s; a watch sends nothing by itself."""

_LEASE = "a lease"

T = TypeVar("T")
Attempt = Callable[[str, str | None], Awaitable[T]]
"""A request to an endpoint with a token. Raises EtcdError and NETWORK_ERRORS."""


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


class Watch(NamedTuple):
    """A watch of one prefix; it ends by raising an EtcdError, never by itself."""

    endpoint: str
    events: AsyncIterator[tuple[int, list[Event]]]
    """Events in order of revision, never a part of a revision, each time with the store's newest revision."""


class _Message(NamedTuple):
    """One line of a watch."""

    fragment: bool
    """More events of the same revisions follow in the next message."""
    revision: int
    events: list[Event]


class EtcdClient:
    """One client of one etcd cluster. Safe to use by several tasks of one loop. Close it when done."""

    def __init__(self, settings: EtcdSettings, random: Random) -> None:
        self._settings = settings
        self._endpoints = [url.rstrip("/") for url in dict.fromkeys(settings.endpoints)]
        random.shuffle(self._endpoints)  # a fleet spreads
        self._answered: set[str] = set()
        self._session: aiohttp.ClientSession | None = None
        self._files: list[tuple[int, ...]] = []
        self._token: str | None = None
        """The one in use; None: log in first; empty: etcd's authentication is off."""
        self._logging_in = asyncio.Lock()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, or the next one to try."""
        return self._endpoints[0]

    def mark_failed(self, endpoint: str) -> None:
        """Try others first from now on, unless that has been done."""
        if self.endpoint == endpoint:
            self._endpoints.append(self._endpoints.pop(0))

    async def list_keys(
        self,
        prefixes: Sequence[str],
        shorten: Callable[[KeyValue], KeyValue | None] = lambda kv: kv,
        revision: int = 0,
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
                if len(kvs) > limits.ETCD_KEYS or size > limits.ETCD_BYTES:
                    most = f"{limits.ETCD_KEYS} keys and {limits.ETCD_BYTES >> 20} MiB"
                    request = f"{self.endpoint} lists more than {most}, which are the most"
                    raise TooLargeError(f"{request}; hint: remove keys below the prefix that are not needed")
        return Page(header, kvs, count=len(kvs))

    async def pages(self, prefix: str, *, revision: int = 0, keys_only: bool = False) -> AsyncIterator[Page]:
        """As `list_keys`, for one prefix, each answer by itself: all may be larger than the memory."""
        start, limit, more = prefix, PAGE, True
        while more:
            body = {**_range(start, after(prefix)), "revision": str(revision), "keys_only": keys_only}
            page = await self._some(body, f"{prefix}*", limit)
            revision, more = revision or page.header.revision, page.more
            start, limit = (page.kvs[-1].key + "\0", len(page.kvs)) if more else ("", 0)
            yield page

    async def newest(self, prefix: str, limit: int, *, keys_only: bool = False) -> list[KeyValue]:
        """The keys with a prefix that were written last, the newest first, at most so many; fewer if they are
        too large for one answer."""
        newest = {"sort_order": "DESCEND", "sort_target": "MOD", "keys_only": keys_only}
        body = {**_range(prefix, after(prefix)), **newest}
        return (await self._some(body, f"{prefix}*", limit)).kvs

    async def get(self, key: str, revision: int = 0) -> KeyValue | None:
        """One key at a revision (0: the newest); None if it does not exist."""
        page = await self._range({**_range(key), "revision": str(revision)}, key)
        return page.kvs[0] if page.kvs else None

    async def get_all(self, keys: Sequence[str], revision: int) -> list[KeyValue]:
        """Those of some keys that existed at a revision, in one request: at most 128 by etcd's default."""
        asked = [{**_range(key), "revision": str(revision)} for key in keys]
        try:
            pages = await self._ranges(asked, f"read of {', '.join(keys)}") if asked else []
        except TooLargeError:
            if len(keys) == 1:
                raise
            half = len(keys) // 2
            return await self.get_all(keys[:half], revision) + await self.get_all(keys[half:], revision)
        return [kv for page in pages for kv in page.kvs]

    async def changed_since(self, prefixes: Sequence[str], revision: int, key: str) -> list[Page]:
        """For each prefix its count of keys, and the key written last, without its value, if that was after a
        revision; and then a key of one's own: all at one revision. Of the keys only one is read: their names
        may be as long as values."""
        newer = {"keys_only": True, "min_mod_revision": str(revision + 1), "limit": "1"}
        newest = {**newer, "sort_order": "DESCEND", "sort_target": "MOD"}
        asked = [{**_range(prefix, after(prefix)), **newest} for prefix in prefixes]
        asked.append({**_range(key or prefixes[0]), "keys_only": True})
        return await self._ranges(asked, f"read of {', '.join(f'{prefix}*' for prefix in prefixes)}")

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write a key."""
        await self._call("/v3/kv/put", _put(key, value, lease), f"write of {key}", _header)

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

        def read(answer: Json) -> int:
            return _header(answer).revision if answer.get("succeeded") else 0

        body, request = {"compare": compare, "success": then}, f"write of {', '.join((*puts, *deletes))}"
        return await self._call("/v3/kv/txn", body, request, read, repeatable=False)

    async def grant_lease(self, seconds: int) -> int:
        """A new lease; its id."""
        return await self._call("/v3/lease/grant", {"TTL": str(seconds)}, _LEASE, lambda a: int(a["ID"]))

    async def renew_lease(self, lease: int) -> int:
        """Renew a lease; the seconds it has from now on. 0: it is no more."""
        return await self._call(
            "/v3/lease/keepalive", {"ID": str(lease)}, _LEASE, lambda a: int(a["result"].get("TTL", 0))
        )

    async def lease_times(self, lease: int) -> tuple[int, int]:
        """Seconds that a lease was granted for, and the remaining ones; none remain of an expired one."""

        def read(answer: Json) -> tuple[int, int]:
            return int(answer.get("grantedTTL", 0)), max(0, int(answer.get("TTL", 0)))

        return await self._call("/v3/lease/timetolive", {"ID": str(lease)}, _LEASE, read)

    async def revoke_lease(self, lease: int) -> None:
        """End a lease, and with it its keys; nothing happens if it is no more."""
        try:
            await self._call("/v3/lease/revoke", {"ID": str(lease)}, _LEASE, _header)
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
        request = f"watch of {printable(prefix)}*"
        async with contextlib.AsyncExitStack() as opened:

            async def begin(endpoint: str, token: str | None) -> Watch:
                async with contextlib.AsyncExitStack() as opening, timeout(self._settings.timeout):
                    response = await opening.enter_async_context(
                        self._open(endpoint, token, "/v3/watch", body, request)
                    )
                    _end_when_half_open(response)
                    events = _watched(endpoint, response.content, request)
                    await anext(events)
                    opened.push_async_exit(opening.pop_all())
                return Watch(endpoint, events)

            yield await self._try_endpoints(begin)

    async def close(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _range(self, body: Json, keys: str) -> Page:
        return await self._call("/v3/kv/range", body, f"read of {keys}", lambda a: _page(a, _header(a)))

    async def _ranges(self, asked: Sequence[Json], request: str) -> list[Page]:
        def read(answer: Json) -> list[Page]:
            header = _header(answer)
            responses = zip(asked, answer["responses"], strict=True)
            return [_page(response["response_range"], header) for _, response in responses]

        body = {"success": [{"request_range": one} for one in asked]}
        return await self._call("/v3/kv/txn", body, request, read)

    async def _some(self, body: Json, keys: str, limit: int) -> Page:
        """At most so many keys of a range, fewer if they are too large for one answer."""
        while True:
            try:
                return await self._range({**body, "limit": str(limit)}, keys)
            except TooLargeError:
                if limit == 1:
                    raise
                limit = max(1, limit // 8)

    async def _call(
        self, path: str, body: Json, request: str, read: Callable[[Json], T], repeatable: bool = True
    ) -> T:
        """POST a request; what `read` makes of the answer. `request` names it in errors: `read of KEYS`.

        A request that is not `repeatable` is sent to another endpoint only if the first one cannot have
        received it.
        """
        request = printable(request)
        return await self._try_endpoints(
            lambda endpoint, token: self._ask(endpoint, token, path, body, request, read), repeatable
        )

    async def _try_endpoints(self, attempt: Attempt[T], repeatable: bool = True) -> T:
        """The result at the endpoint that worked last, or at the next one in turn where it succeeds."""
        errors: dict[str, EndpointError] = {}
        for endpoint in tuple(self._endpoints):
            try:
                return await self._with_token(endpoint, attempt)
            except EndpointError as error:
                errors[endpoint] = error
                self.mark_failed(endpoint)
                if error.sent and not repeatable:
                    break
        why = "; ".join(f"{endpoint}: {error}" for endpoint, error in errors.items())
        kind = TooLargeError if any(isinstance(e, TooLargeError) for e in errors.values()) else EndpointError
        raise kind(f"etcd cannot be reached: {why}", sent=any(error.sent for error in errors.values()))

    async def _with_token(self, endpoint: str, attempt: Attempt[T]) -> T:
        """Try one endpoint; a token that is no longer valid is renewed once."""
        for renewed in (False, True):
            token = None
            try:
                token = await self._current_token(endpoint)
                return await attempt(endpoint, token)
            except TokenRejectedError as error:
                if not self._settings.user:
                    hint = "set user and password_file"
                    raise EtcdError(f"etcd's authentication is on ({error}); hint: {hint}") from None
                self._discard(token)
                if renewed:
                    why = f"refuses a token that it has just given: {error}"
                    raise EndpointError(why, sent=False) from None
            except (EndpointError, *NETWORK_ERRORS) as error:
                certified, known = self._settings.cert is not None, endpoint in self._answered
                fault = error_of_network(error, endpoint, self._settings.timeout, certified, known)
                if fault.sent:
                    # etcd does not reject a simple token whose index is above its own, as after a wipe or a
                    # restore: the request waits until the store has reached that index.
                    self._discard(token)
                raise fault from None
        raise AssertionError("either returned or raised")

    def _discard(self, token: str | None) -> None:
        """Log in before the next request, unless another task has done so since."""
        if self._token == token:
            self._token = None

    async def _current_token(self, endpoint: str) -> str | None:
        """Never two log-ins at once."""
        if not self._settings.user:
            return None
        async with self._logging_in:
            if self._token is None:
                self._token = await self._log_in(endpoint)
            return self._token

    async def _log_in(self, endpoint: str) -> str:
        path, request = self._settings.password_file, "log-in"
        try:
            secret = await file_calls.run((self, "password"), lambda: password(path))
        except TimeoutError as error:
            raise EtcdError(f"{path}: the password cannot be read: {error.strerror}") from None
        body = {"name": self._settings.user, "password": secret}
        try:
            return await self._ask(
                endpoint, None, "/v3/auth/authenticate", body, request, lambda a: str(a["token"])
            )
        except RejectedError as error:
            if error.code == FAILED_PRECONDITION:
                return ""  # authentication is off: a configured user needs no token
            raise

    async def _ask(
        self, endpoint: str, token: str | None, path: str, body: Json, request: str, read: Callable[[Json], T]
    ) -> T:
        async with (
            timeout(self._settings.timeout),
            self._open(endpoint, token, path, body, request) as response,
        ):
            data = await _read_body(response, request)
        return await in_thread_if_large(len(data), lambda: _parsed(data, request, read))

    @contextlib.asynccontextmanager
    async def _open(
        self, endpoint: str, token: str | None, path: str, body: Json, request: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of an endpoint that succeeds, still to be read. Raises EtcdError and NETWORK_ERRORS."""
        session = await self._open_session()
        # A watch at a member without a leader ends then, and waits for none.
        headers = {"Grpc-Metadata-hasleader": "true", **({"Authorization": token} if token else {})}
        data = json.dumps(body).encode()
        async with session.post(
            endpoint + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                text = (await _read_body(response, request)).decode(errors="replace")
                raise error_of_answer(response.status, text, request)
            self._answered.add(endpoint)
            yield response

    async def _open_session(self) -> aiohttp.ClientSession:
        """The session; a new one if TLS files have changed. Raises EndpointError if they cannot be used.

        The old one is closed with all its streams, which are then reopened with the new certificate.
        """
        settings = self._settings
        paths = [path for path in (settings.ca, settings.cert, settings.key) if path]

        def read() -> tuple[list[tuple[int, ...]], ssl.SSLContext | None]:
            files = [_signature(path) for path in paths]
            current = self._session is not None and files == self._files
            return files, None if current else tls_context(settings)

        try:
            files, context = await file_calls.run((self, "TLS"), read) if paths else read()
        except TimeoutError as error:
            if self._session is None:
                raise EndpointError(f"ca, cert or key: {error.strerror}", sent=False) from None
            return self._session
        old = self._session
        if context is not None and (old is None or files != self._files):  # no other task was first
            self._files = files
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,  # a few bytes could become any number
                timeout=aiohttp.ClientTimeout(total=None),
            )
            if old is not None:
                await old.close()
        assert self._session is not None  # noqa: S101 (made above, or before)
        return self._session


async def _watched(
    endpoint: str, body: aiohttp.StreamReader, request: str
) -> AsyncIterator[tuple[int, list[Event]]]:
    """Events in order of revision, never a part of a revision, all that have arrived, each time with the
    store's newest revision as far as it is known. The first ones are none: etcd has begun the watch."""
    received, revision, events = bytearray(), 0, list[Event]()
    started, whole, size = False, False, 0
    while True:
        try:
            piece = await body.readany()
        except NETWORK_ERRORS as error:
            raise EndpointError(f"{endpoint} broke the watch: {error or type(error).__name__}") from None
        if not piece:
            raise EndpointError(f"{endpoint} ended the watch")
        begun = len(received)
        received += piece
        end = received.rfind(b"\n", begun) + 1
        size += len(piece)
        if size > MAX_BYTES:
            raise _too_large(f"{request} at {endpoint}")
        lines = [line for line in bytes(received[:end]).split(b"\n") if line.strip()]
        del received[:end]
        for message in await in_thread_if_large(end, partial(_messages, lines, request)):
            revision, whole = message.revision or revision, not message.fragment
            events += message.events
        if lines and not started:
            started = True
            yield revision, []
        if lines and whole:
            yield revision, events
            events, size = [], len(received)


def _messages(lines: Sequence[bytes], request: str) -> list[_Message]:
    def read(answer: Json) -> _Message:
        result = answer["result"]
        if result.get("canceled"):
            raise error_of_cancellation(result, request)
        # A proxy of etcd leaves the header of some messages empty.
        revision = int((result.get("header") or {}).get("revision") or 0)
        events = [Event(e.get("type") == "DELETE", _kv(e["kv"])) for e in result.get("events", ())]
        return _Message(bool(result.get("fragment")), revision, events)

    return [_parsed(line, request, read) for line in lines]


def after(prefix: str) -> str:
    """The end of the range of all keys with a prefix, whose last character is ASCII."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


async def in_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """The result of some work on this many bytes, done in a thread if they are many."""
    return await asyncio.to_thread(work) if size > THREAD_MIN_BYTES else work()


def tls_context(settings: EtcdSettings) -> ssl.SSLContext:
    """Raises EndpointError, saying which file is at fault. It waits: call it in a thread."""
    files: object = None
    try:
        for files in filter(None, (settings.ca, settings.cert, settings.key)):
            read_regular(files, MAX_FILE_BYTES)  # OpenSSL would wait for a pipe
        files = settings.ca
        context = ssl.create_default_context(cafile=settings.ca)
        if settings.cert is not None:
            files = f"{settings.cert}, {settings.key}"
            context.load_cert_chain(settings.cert, settings.key)
    except (OSError, ValueError) as error:
        why = f"{files}: cannot be used for TLS: {error_text(error)}"
        raise EndpointError(why, sent=False) from None
    return context


def password(path: Path | None) -> str:
    """Raises EtcdError. It waits: call it in a thread."""
    try:
        data = read_regular(path, MAX_FILE_BYTES) if path else b""
        return data.decode("utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise EtcdError(f"{path}: the password cannot be read: {error_text(error)}") from None


def _signature(path: Path) -> tuple[int, ...]:
    """Changes whenever a file does."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_ino, status.st_size, status.st_mtime_ns)


async def _read_body(response: aiohttp.ClientResponse, request: str) -> bytes:
    """A whole body. Raises TooLargeError, and NETWORK_ERRORS."""
    data = bytearray()
    while piece := await response.content.readany():
        data += piece
        if len(data) > MAX_BYTES:
            raise _too_large(request)
    return bytes(data)


def _too_large(request: str) -> TooLargeError:
    return TooLargeError(f"malformed answer ({request}): it is larger than {MAX_BYTES >> 20} MiB")


def _parsed(data: bytes, request: str, read: Callable[[Json], T]) -> T:
    """What `read` makes of an answer of JSON. Raises EtcdError: of etcd's own words if it says an error."""
    try:
        answer = json.loads(data)
        if "error" not in answer:
            return read(answer)
        error = error_of_json(answer, request)
    except GARBAGE as fault:
        why = f"{fault.args[0]} is missing" if isinstance(fault, KeyError) else str(fault)[:200]
        raise EndpointError(f"malformed answer ({request}): {why}") from None
    raise error


def _encoded(text: str) -> str:
    return b64encode(text.encode(errors="surrogateescape")).decode("ascii")


def _decoded(data: str) -> str:
    return b64decode(data).decode(errors="surrogateescape")


def _range(key: str, end: str = "") -> Json:
    return {"key": _encoded(key), **({"range_end": _encoded(end)} if end else {})}


def _put(key: str, value: str, lease: int) -> Json:
    return {**_range(key), "value": _encoded(value), **({"lease": str(lease)} if lease else {})}


def _header(answer: Json) -> Header:
    header = answer["header"]
    return Header(str(header["cluster_id"]), int(header["revision"]))


def _page(answer: Json, header: Header) -> Page:
    kvs = [_kv(kv) for kv in answer.get("kvs", ())]
    return Page(header, kvs, bool(answer.get("more")) and bool(kvs), int(answer.get("count", 0)))


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
