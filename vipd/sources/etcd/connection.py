"""HTTP to etcd's JSON gateway: endpoints in turn, the user's token, TLS, limits of size and time.

It asks by aiohttp, which vipd needs anyway. The libraries for etcd need grpcio: 24 MB of memory, 19 MB on
disk, 0.12 s more to start, and a compiled wheel for each version of Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import TypeVar

import aiohttp

from vipd.host.durable import error_text, open_regular, read_regular
from vipd.host.file_calls import file_calls
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.errors import (
    FAILED_PRECONDITION,
    GARBAGE,
    NETWORK_ERRORS,
    EndpointError,
    EtcdError,
    Json,
    MalformedAnswerError,
    RejectedError,
    TokenRejectedError,
    TooLargeError,
    error_of_answer,
    error_of_endpoints,
    error_of_json,
    error_of_network,
    error_without_gateway,
)

MAX_BYTES = 16 * 2**20
"""Of one answer, or of one message of a stream. etcd's own limit for a request, 1.5 MiB, results in 2 MiB."""
MAX_FILE_BYTES = 2**20
"""Of a file with certificates, a key or a password."""
THREAD_MIN_BYTES = 2**17
"""Bytes above which an answer is parsed in a thread: it takes some milliseconds."""

T = TypeVar("T")
Attempt = Callable[[str, str | None], Awaitable[T]]
"""A request to an endpoint with a token. Raises EtcdError and NETWORK_ERRORS."""


class Connection:
    """Sends requests to the endpoint that worked last, and to the others in turn when it does not.

    Safe to use by several tasks of one loop. TLS files that change are read again.
    """

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

    @property
    def timeout(self) -> float:
        """Seconds for one answer of one endpoint."""
        return self._settings.timeout

    def mark_failed(self, endpoint: str) -> None:
        """Try others first from now on, unless that has been done."""
        if self.endpoint == endpoint:
            self._endpoints.append(self._endpoints.pop(0))

    async def call(
        self, path: str, body: Json, what: str, read: Callable[[Json], T], repeatable: bool = True
    ) -> T:
        """POST a request; what `read` makes of the answer. `what` names it in errors: `read of KEYS`.

        A request that is not `repeatable` is sent to another endpoint only if the first one cannot have
        received it. Raises EtcdError.
        """
        return await self.try_endpoints(
            lambda endpoint, token: self._ask(endpoint, token, path, body, what, read), repeatable
        )

    async def try_endpoints(self, attempt: Attempt[T], repeatable: bool = True) -> T:
        """The result at the endpoint that worked last, or at the next one in turn where it succeeds. Raises
        EtcdError."""
        reasons: dict[str, EndpointError] = {}
        for endpoint in tuple(self._endpoints):
            try:
                return await self._with_token(endpoint, attempt)
            except EndpointError as error:
                reasons[endpoint] = error
                self.mark_failed(endpoint)
                if error.sent and not repeatable:
                    break
        raise error_of_endpoints(reasons)

    @contextlib.asynccontextmanager
    async def open(
        self, endpoint: str, token: str | None, path: str, body: Json, what: str, **headers: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer of an endpoint that succeeds, still to be read. Raises EtcdError and NETWORK_ERRORS."""
        session = await self._open_session()
        named = {**headers, **({"Authorization": token} if token else {})}
        data = json.dumps(body).encode()
        async with session.post(endpoint + path, data=data, headers=named, allow_redirects=False) as response:
            if response.status != 200:
                text = (await read_body(response, what)).decode(errors="replace")
                refusal = error_of_answer(response.status, text, what)
                version = "" if refusal else await self._version(session, endpoint)
                raise refusal or error_without_gateway(response.status, text, version)
            self._answered.add(endpoint)
            yield response

    def network_error(self, endpoint: str, error: BaseException) -> EndpointError:
        """The error for one of NETWORK_ERRORS."""
        certified, known = self._settings.cert is not None, endpoint in self._answered
        return error_of_network(error, endpoint, self.timeout, certified, known)

    async def close(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(
        self, endpoint: str, token: str | None, path: str, body: Json, what: str, read: Callable[[Json], T]
    ) -> T:
        async with asyncio.timeout(self.timeout), self.open(endpoint, token, path, body, what) as response:
            data = await read_body(response, what)
        return await in_thread_if_large(len(data), lambda: parsed(data, what, read))

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
                fault = error if isinstance(error, EndpointError) else self.network_error(endpoint, error)
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
        path = self._settings.password_file
        try:
            secret = await file_calls.run((self, "password"), lambda: password(path))
        except TimeoutError as error:
            raise EtcdError(f"{path}: the password cannot be read: {error.strerror}") from None
        body = {"name": self._settings.user, "password": secret}
        try:
            return await self._ask(
                endpoint, None, "/v3/auth/authenticate", body, "log-in", lambda a: str(a["token"])
            )
        except RejectedError as error:
            if error.code == FAILED_PRECONDITION:
                return ""  # authentication is off: a configured user needs no token
            raise

    async def _version(self, session: aiohttp.ClientSession, endpoint: str) -> str:
        """An endpoint's answer to `GET /version`; empty without one."""
        try:
            async with session.get(f"{endpoint}/version", allow_redirects=False) as response:
                return (await read_body(response, "version")).decode(errors="replace")
        except (*NETWORK_ERRORS, TooLargeError):
            return ""

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


async def read_body(response: aiohttp.ClientResponse, what: str) -> bytes:
    """A whole body. Raises TooLargeError, and NETWORK_ERRORS."""
    data = bytearray()
    while piece := await response.content.readany():
        data += piece
        if len(data) > MAX_BYTES:
            raise too_large(what)
    return bytes(data)


def too_large(what: str) -> TooLargeError:
    """The error for an answer larger than `MAX_BYTES`, which is not read."""
    return TooLargeError(f"malformed answer ({what}): it is larger than {MAX_BYTES >> 20} MiB")


async def in_thread_if_large(size: int, work: Callable[[], T]) -> T:
    """The result of some work on this many bytes, done in a thread if they are many."""
    return await asyncio.to_thread(work) if size > THREAD_MIN_BYTES else work()


def parsed(data: bytes, what: str, read: Callable[[Json], T]) -> T:
    """What `read` makes of an answer of JSON. Raises EtcdError: of etcd's own words if it says an error."""
    try:
        answer = json.loads(data)
        if "error" not in answer:
            return read(answer)
        error = error_of_json(answer, what)
    except GARBAGE as fault:
        why = f"{fault.args[0]} is missing" if isinstance(fault, KeyError) else str(fault)[:200]
        raise MalformedAnswerError(f"malformed answer ({what}): {why}") from None
    raise error


def tls_context(settings: EtcdSettings) -> ssl.SSLContext:
    """Raises EndpointError, saying which file is at fault. It waits: call it in a thread."""
    files = f"{settings.ca}"
    try:
        context = ssl.create_default_context(cadata=_authorities(settings.ca))
        if settings.cert is not None and settings.key is not None:
            files = f"{settings.cert}, {settings.key}"
            with _opened(settings.cert) as cert, _opened(settings.key) as key:
                context.load_cert_chain(cert, key)
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


def _authorities(path: Path | None) -> str | None:
    """The text of certificates to trust; None: the system's. Raises OSError."""
    if path is None:
        return None
    data = read_regular(path, MAX_FILE_BYTES)
    if b"-----BEGIN" not in data:
        raise ssl.SSLError(0, "no certificate in it")
    # Text between certificates may be in any script; it is not read.
    return data.decode("ascii", "ignore")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[str]:
    """A path to exactly the file that was checked: OpenSSL accepts only paths, and blocks on special files.
    Raises OSError."""
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size > MAX_FILE_BYTES:
            raise OSError(0, f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _signature(path: Path) -> tuple[int, ...]:
    """Changes whenever a file does."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_ino, status.st_size, status.st_mtime_ns)
