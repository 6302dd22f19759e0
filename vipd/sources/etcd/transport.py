"""HTTP to single endpoints of etcd: TLS, timeouts, answers read, faults diagnosed.

It asks etcd's JSON gateway by aiohttp, which vipd needs anyway. The libraries for etcd need grpcio:
24 MB of memory, 19 MB on disk, 0.12 s more to start, and a compiled wheel for each version of Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import aiohttp

from vipd.host.file_calls import file_calls
from vipd.host.settings.etcd import EtcdSettings
from vipd.sources.etcd.errors import (
    EndpointError,
    EtcdError,
    GatewayOffError,
    MalformedAnswerError,
    TLSError,
    TLSFault,
)
from vipd.sources.etcd.fields import Message
from vipd.sources.etcd.lines import NETWORK_ERRORS, Lines, in_thread_if_large, read_body
from vipd.sources.etcd.replies import error_of_answer, error_without_gateway, read_object
from vipd.sources.etcd.tls_files import Signatures, signatures, tls_context
from vipd.sources.etcd.transport_faults import diagnose, error_of_exception

KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_COUNT = 3
UNACKNOWLEDGED_MILLISECONDS = 25_000
"""A connection whose other end vanished silently ends after this; a watch sends nothing by itself."""

Headers = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """An endpoint's answer, and its length as text."""

    message: Message
    size: int


class Transport:
    """Sends requests to endpoints. Safe to use by several tasks of one loop. TLS files that change are read
    again.
    """

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._context: ssl.SSLContext | None = None
        self._files: Signatures = ()

    @property
    def timeout(self) -> float:
        """Seconds for one answer of one endpoint."""
        return self._settings.timeout

    async def post(self, endpoint: str, path: str, body: Message, what: str, headers: Headers) -> Answer:
        """POST to one endpoint; what it answers. Raises EtcdError."""
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
            answer = await in_thread_if_large(len(said), lambda: read_object(said))
        if answer is None:
            raise await self._explained(endpoint, error_of_answer(status, said, what))
        return Answer(answer, len(said))

    @contextlib.asynccontextmanager
    async def stream(
        self, endpoint: str, headers: Headers, path: str, body: Message, what: str
    ) -> AsyncIterator[Lines]:
        """POST to one endpoint, and read its answer by lines as they arrive. Raises EtcdError, as the lines
        do."""
        response = await self._begin(endpoint, path, body, {**headers, "Grpc-Metadata-hasleader": "true"})
        async with response:
            if response.status != 200:
                said = await self._body(endpoint, response, what)
                raise await self._explained(endpoint, error_of_answer(response.status, said, what))
            _end_when_half_open(response)
            yield Lines(response.content, partial(self._diagnosed, endpoint))

    async def close(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _begin(
        self, endpoint: str, path: str, body: Message, headers: Headers
    ) -> aiohttp.ClientResponse:
        """The head of an answer whose body does not end."""
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
        """The session; a new one if TLS files have changed. Raises TLSError if they cannot be used.

        The old one is closed with all its streams, which are then reopened with the new certificate.
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
        """The current TLS files, and their context. Raises TLSError, TimeoutError."""

        def read() -> tuple[Signatures, ssl.SSLContext]:
            files = signatures(self._settings)
            known = self._context if self._session is not None and files == self._files else None
            return files, known or tls_context(self._settings)

        named = (self._settings.ca, self._settings.cert, self._settings.key)
        return read() if named == (None, None, None) else await file_calls.run((self, "TLS"), read)


def in_answer(error: MalformedAnswerError, what: str) -> MalformedAnswerError:
    """The same error, with the name of the request."""
    return type(error)(f"malformed answer ({what}): {error}")


def _end_when_half_open(response: aiohttp.ClientResponse) -> None:
    """Make the kernel check whether the other end still exists: nothing else does (etcd-io/etcd#8980)."""
    transport = response.connection.transport if response.connection else None
    opened = transport.get_extra_info("socket") if transport else None
    if opened is None:
        return
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MILLISECONDS)
