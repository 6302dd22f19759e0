"""One logical connection to etcd: endpoints in turn, and the user's token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from vipd.host.file_calls import file_calls
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.endpoints import Endpoints
from vipd.sources.etcd.errors import (
    AuthFailedError,
    EndpointError,
    EtcdError,
    MalformedAnswerError,
    RejectedError,
    TokenRejectedError,
    TooLargeError,
    UnreachableError,
)
from vipd.sources.etcd.fields import Message, text
from vipd.sources.etcd.lines import in_thread_if_large
from vipd.sources.etcd.tls_files import password
from vipd.sources.etcd.transport import Headers, Transport, in_answer

_FAILED_PRECONDITION = 9
_MAX_TOKEN_LENGTH = 8000
"""For use in a header; Go's server accepts far more."""

T = TypeVar("T")
Read = Callable[[Message], T]
"""Parses an answer. Raises EndpointError if it is invalid."""
Attempt = Callable[[str, Headers], Awaitable[T]]
"""A request to an endpoint, with the headers that carry the token."""


class Connection:
    """Sends requests to the endpoint that worked last, and to the others in turn when it does not.

    Safe to use by several tasks of one loop.
    """

    def __init__(self, settings: EtcdSettings, random: Random) -> None:
        self._settings = settings
        self._endpoints = Endpoints(settings.endpoints, random)
        self.transport = Transport(settings)
        self._token: str | None = None
        """The one in use; None: never logged in; empty: etcd's authentication is off."""
        self._refreshing = asyncio.Lock()

    @property
    def endpoint(self) -> str:
        """The endpoint in use, or the next one to try."""
        return self._endpoints.current

    @property
    def timeout(self) -> float:
        """Seconds for one answer of one endpoint."""
        return self._settings.timeout

    def mark_failed(self, endpoint: str) -> None:
        """The caller found an endpoint unusable: try others first."""
        self._endpoints.mark_failed(endpoint)

    async def call(self, path: str, body: Message, what: str, read: Read[T], repeatable: bool = True) -> T:
        """POST a request; returns what `read` makes of the answer. `what` names it in errors: `read of KEYS`.

        A request that is not `repeatable` is sent to another endpoint only if the first one cannot have
        received it. Raises UnreachableError (one endpoint: its own error) and every other EtcdError.
        """

        async def ask(endpoint: str, headers: Headers) -> T:
            answer = await self.transport.post(endpoint, path, body, what, headers)
            return await in_thread_if_large(answer.size, lambda: _read(read, answer.message, what))

        return await self.try_endpoints(ask, repeatable)

    async def try_endpoints(self, attempt: Attempt[T], repeatable: bool = True) -> T:
        """The result at the endpoint that worked last, or at the next one in turn where it succeeds.

        Raises the same as `call`.
        """
        reasons: dict[str, EndpointError] = {}
        for endpoint in self._endpoints.round():
            try:
                return await self._with_token(endpoint, attempt)
            except EndpointError as error:
                reasons[endpoint] = error
                self._endpoints.mark_failed(endpoint)
                if error.sent and not repeatable:
                    break
        raise unreachable(reasons)

    async def close(self) -> None:
        """Close every connection."""
        await self.transport.close()

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

    async def _log_in(self, endpoint: str) -> str:
        body: Message = {"name": self._settings.user, "password": await self._password()}
        try:
            answer = await self.transport.post(endpoint, "/v3/auth/authenticate", body, "log-in", {})
        except RejectedError as error:
            if error.code == _FAILED_PRECONDITION:
                return ""  # authentication is off: a configured user needs no token
            raise
        return _read(_token, answer.message, "log-in")

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


def needs_user(error: TokenRejectedError) -> AuthFailedError:
    """etcd requires a user, and none is configured."""
    return AuthFailedError(f"etcd's authentication is on ({error}); hint: set user and password_file")


def _read(read: Read[T], answer: Message, what: str) -> T:
    try:
        return read(answer)
    except MalformedAnswerError as error:
        raise in_answer(error, what) from None


def _token(answer: Message) -> str:
    """A token that is valid in a header. Raises MalformedAnswerError."""
    token = text(answer, "token")
    if not token or len(token) > _MAX_TOKEN_LENGTH or not (token.isascii() and token.isprintable()):
        raise MalformedAnswerError("token is missing or is none")
    return token
