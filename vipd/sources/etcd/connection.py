"""One logical connection to etcd: endpoints in turn, TLS, the user's token, timeouts.

It asks etcd's JSON gateway by aiohttp, which vipd needs anyway. The libraries for etcd need grpcio:
24 MB of memory, 19 MB on disk, 0.12 s more to start, and a compiled wheel for each version of Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

import aiohttp

from vipd.host.file_calls import file_calls
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.endpoints import Endpoints
from vipd.sources.etcd.errors import (
    AuthFailedError,
    EndpointError,
    EtcdError,
    GatewayOffError,
    MalformedAnswerError,
    RejectedError,
    TLSError,
    TLSFault,
    TokenRejectedError,
    TooLargeError,
    UnreachableError,
)
from vipd.sources.etcd.fields import Message, text
from vipd.sources.etcd.lines import NETWORK_ERRORS, Lines, beside, read_body
from vipd.sources.etcd.replies import error_of_answer, error_without_gateway, read_object
from vipd.sources.etcd.tls_files import Signatures, password, signatures, tls_context
from vipd.sources.etcd.transport_faults import diagnose, error_of_exception

KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_COUNT = 3
UNACKNOWLEDGED_MILLISECONDS = 25_000
"""A connection whose other end is gone without a word ends after this; a watch sends nothing by itself."""

_FAILED_PRECONDITION = 9
_LONGEST_TOKEN = 8000
"""For use in a header; Go's server accepts far more."""

T = TypeVar("T")
Read = Callable[[Message], T]
"""What an answer says. Raises EndpointError when it is none."""
Headers = dict[str, str]
Attempt = Callable[[str, Headers], Awaitable[T]]
"""A request to an endpoint, with the headers that carry the token."""


class Connection:
    """Sends requests to the endpoint that worked last, and to the others in turn when it does not.

    Safe to use by several tasks of one loop. TLS files that change are read again.
    """

    def __init__(self, settings: EtcdSettings, random: Random) -> None:
        self._settings = settings
        self._endpoints = Endpoints(settings.endpoints, random)
        self._session: aiohttp.ClientSession | None = None
        self._context: ssl.SSLContext | None = None
        self._files: Signatures = ()
        self._token: str | None = None
        self._refreshing = asyncio.Lock()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, or the next one to try."""
        return self._endpoints.current

    @property
    def timeout(self) -> float:
        """Seconds for one answer of one endpoint."""
        return self._settings.timeout

    @property
    def token(self) -> str | None:
        """The token in use; None: never logged in; empty: etcd's authentication is off."""
        return self._token

    def failed(self, endpoint: str) -> None:
        """The caller found an endpoint unusable: try others first."""
        self._endpoints.failed(endpoint)

    async def call(self, path: str, body: Message, what: str, read: Read[T], repeatable: bool = True) -> T:
        """POST a request; returns what `read` makes of the answer. `what` names it in errors: `read of KEYS`.

        A request that is not `repeatable` is sent to another endpoint only if the first one cannot have
        received it. Raises UnreachableError (one endpoint: its own error) and every other EtcdError.
        """

        async def ask(endpoint: str, headers: Headers) -> T:
            answer = await self._post(endpoint, path, body, what, headers)
            return await beside(answer.size, lambda: _read(read, answer.message, what))

        return await self.at_an_endpoint(ask, repeatable)

    async def at_an_endpoint(self, attempt: Attempt[T], repeatable: bool = True) -> T:
        """The result at the endpoint that worked last, or at the next one in turn where it succeeds.

        Raises the same as `call`.
        """
        reasons: dict[str, EndpointError] = {}
        for endpoint in self._endpoints.round():
            try:
                return await self._with_token(endpoint, attempt)
            except EndpointError as error:
                reasons[endpoint] = error
                self._endpoints.failed(endpoint)
                if error.sent and not repeatable:
                    break
        raise unreachable(reasons)

    @contextlib.asynccontextmanager
    async def stream(
        self, endpoint: str, headers: Headers, path: str, body: Message, what: str
    ) -> AsyncIterator[Lines]:
        """POST to one endpoint, and read its answer by lines as it comes. Raises EtcdError, lines do too."""
        response = await self._begin(endpoint, path, body, {**headers, "Grpc-Metadata-hasleader": "true"})
        async with response:
            if response.status != 200:
                said = await self._body(endpoint, response, what)
                raise await self._explained(endpoint, error_of_answer(response.status, said, what))
            _end_when_half_open(response)
            yield Lines(response.content, partial(self._diagnosed, endpoint))

    async def close(self) -> None:
        """Give up every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _with_token(self, endpoint: str, attempt: Attempt[T]) -> T:
        """Try one endpoint; a token that is no longer valid is renewed once."""
        headers = await self._authorization(endpoint)
        used = self._token
        try:
            return await attempt(endpoint, headers)
        except TokenRejectedError as error:
            if not self._settings.user:
                raise needs_user(error) from None
        except EndpointError as error:
            if error.sent:
                self._discard_token(used)
            raise
        await self._renew_token(endpoint, used)
        try:
            return await attempt(endpoint, await self._authorization(endpoint))
        except TokenRejectedError as error:
            raise EndpointError(f"refuses a token that it has just given: {error}", sent=False) from None

    async def _authorization(self, endpoint: str) -> Headers:
        if not self._settings.user:
            return {}
        if self._token is None:
            await self._renew_token(endpoint, None)
        return {"Authorization": self._token} if self._token else {}

    async def _renew_token(self, endpoint: str, stale: str | None) -> None:
        """Log in again, unless another task has since `stale` was in use. Never two log-ins at once."""
        async with self._refreshing:
            if self._token == stale:
                self._token = await self._log_in(endpoint)

    def _discard_token(self, stale: str | None) -> None:
        """Log in before the next request, because one with the token `stale` had no answer.

        etcd does not reject a simple token whose index is above its own, as after a wipe or a restore: the
        request waits until the store has reached that index. A newer token stays.
        """
        if stale is not None and self._token == stale:
            self._token = None

    async def _begin(
        self, endpoint: str, path: str, body: Message, headers: Headers
    ) -> aiohttp.ClientResponse:
        """The head of an answer whose body has no end in time."""
        session = await self._open()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout)
        data = json.dumps(body).encode()
        try:
            async with asyncio.timeout(self.timeout):
                return await session.post(
                    endpoint + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
                )
        except NETWORK_ERRORS as error:
            raise await self._diagnosed(endpoint, error) from None

    async def _log_in(self, endpoint: str) -> str:
        body: Message = {"name": self._settings.user, "password": await self._password()}
        try:
            answer = await self._post(endpoint, "/v3/auth/authenticate", body, "log-in", {})
        except RejectedError as error:
            if error.code == _FAILED_PRECONDITION:
                return ""  # authentication is off: a configured user needs no token
            raise
        return _read(_token, answer.message, "log-in")

    async def _post(self, endpoint: str, path: str, body: Message, what: str, headers: Headers) -> _Answer:
        session = await self._open()
        timeout = aiohttp.ClientTimeout(total=self.timeout)
        try:
            data = json.dumps(body).encode()
            async with session.post(
                endpoint + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                status, said = response.status, await self._body(endpoint, response, what)
        except NETWORK_ERRORS as error:
            raise await self._diagnosed(endpoint, error) from None
        answer = None
        if status == 200:
            answer = await beside(len(said), lambda: read_object(said))
        if answer is None:
            raise await self._explained(endpoint, error_of_answer(status, said, what))
        return _Answer(answer, len(said))

    async def _body(self, endpoint: str, response: aiohttp.ClientResponse, what: str) -> str:
        try:
            async with asyncio.timeout(self.timeout):
                return await read_body(response.content)
        except NETWORK_ERRORS as error:
            raise await self._diagnosed(endpoint, error) from None
        except MalformedAnswerError as error:
            raise in_answer(error, what) from None

    async def _diagnosed(self, endpoint: str, error: BaseException) -> EndpointError:
        certified = self._settings.cert is not None
        found = error_of_exception(error, self.timeout, certified)
        return await diagnose(endpoint, error, found, self._context, certified)

    async def _explained(self, endpoint: str, error: EtcdError) -> EtcdError:
        """Why there is no gateway at an endpoint that answers HTTP."""
        if not isinstance(error, GatewayOffError):
            return error
        timeout = aiohttp.ClientTimeout(total=self.timeout)
        try:
            session = await self._open()
            url = f"{endpoint}/version"
            async with session.get(url, timeout=timeout, allow_redirects=False) as response:
                return error_without_gateway(error, response.status, await read_body(response.content))
        except (*NETWORK_ERRORS, MalformedAnswerError):
            return error

    async def _open(self) -> aiohttp.ClientSession:
        """The session; a new one when TLS files have changed. Raises TLSError when they cannot be used.

        The old one is closed with all its streams: they come again with the new certificate.
        """
        try:
            files, context = await self._tls()
        except TimeoutError as error:
            if self._session is not None:
                return self._session
            raise TLSError(TLSFault.FILES, f"ca, cert or key: {error.strerror}") from None
        if self._session is not None and files == self._files:
            return self._session
        self._context = context
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0)
        old, self._files = self._session, files
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # a few bytes could become any number
        )
        if old is not None:
            await old.close()
        return self._session

    async def _tls(self) -> tuple[Signatures, ssl.SSLContext]:
        """The TLS files as they are now, and what they make. Raises TLSError, TimeoutError."""

        def read() -> tuple[Signatures, ssl.SSLContext]:
            files = signatures(self._settings)
            known = self._context if self._session is not None and files == self._files else None
            return files, known or tls_context(self._settings)

        named = (self._settings.ca, self._settings.cert, self._settings.key)
        return read() if named == (None, None, None) else await file_calls.run((self, "TLS"), read)

    async def _password(self) -> str:
        path = self._settings.password_file
        try:
            return await file_calls.run((self, "password"), lambda: password(path))
        except TimeoutError as error:
            raise AuthFailedError(f"{path}: the password cannot be read: {error.strerror}") from None


def unreachable(reasons: dict[str, EndpointError]) -> EtcdError:
    """No endpoint worked. If all have the same kind of fault, with a known remedy, returns that one."""
    kinds = {type(error) for error in reasons.values()}
    told = UnreachableError(reasons)
    unknown = {EndpointError, MalformedAnswerError, TooLargeError}
    if len(kinds) == 1 and not kinds & unknown:
        error = next(iter(reasons.values()))
        error.args = (str(told),)
        return error
    return told


def in_answer(error: MalformedAnswerError, what: str) -> MalformedAnswerError:
    """The same error with what was asked for."""
    return type(error)(f"malformed answer ({what}): {error}")


def needs_user(error: TokenRejectedError) -> AuthFailedError:
    """etcd requires a user, and none is configured."""
    return AuthFailedError(f"etcd's authentication is on ({error}); hint: set user and password_file")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What an endpoint says, and how long it was as text."""

    message: Message
    size: int


def _read(read: Read[T], answer: Message, what: str) -> T:
    try:
        return read(answer)
    except MalformedAnswerError as error:
        raise in_answer(error, what) from None


def _token(answer: Message) -> str:
    """A token that is valid in a header. Raises MalformedAnswerError."""
    token = text(answer, "token")
    if not token or len(token) > _LONGEST_TOKEN or not (token.isascii() and token.isprintable()):
        raise MalformedAnswerError("token is missing or is none")
    return token


def _end_when_half_open(response: aiohttp.ClientResponse) -> None:
    """Have the kernel look whether the other end is still there: nothing else would (etcd-io/etcd#8980)."""
    transport = response.connection.transport if response.connection else None
    opened = transport.get_extra_info("socket") if transport else None
    if opened is None:
        return
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
