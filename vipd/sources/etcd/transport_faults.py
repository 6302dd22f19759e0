"""Converts an exception of the network or of TLS to an error with a remedy."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

import aiohttp

from vipd.sources.etcd.errors import EndpointError, GatewayOffError, TLSError, TLSFault
from vipd.sources.etcd.replies import GATEWAY_HINT

DIAGNOSIS_SECONDS = 2.0
TLS_ALERT_SECONDS = 0.5
"""How long a server may take to report that it rejects a certificate. A server that reports nothing
costs this much at each broken connection."""

_EXPIRED_CODES = frozenset({9, 10})
_NAME_CODES = frozenset({62, 64})
_CA_CODES = frozenset({2, 18, 19, 20, 21})
"""OpenSSL's verify codes (x509_vfy.h): not yet valid or expired; host name or address; unknown issuer."""


def error_of_exception(error: BaseException, timeout: float, has_certificate: bool) -> EndpointError:
    """The error for a failed request. `has_certificate`: a client certificate is configured."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return _error_of_certificate(error.certificate_error)
    cause = _ssl_error(error)
    if cause is not None:
        return _error_of_tls(cause, has_certificate)
    if isinstance(error, asyncio.TimeoutError):
        return EndpointError(f"no answer within {timeout:g} s", sent=True)
    if isinstance(error, aiohttp.ClientConnectorError):
        return EndpointError(f"cannot connect: {_words(error.os_error)}", sent=False)
    if isinstance(error, aiohttp.ClientResponseError):
        return GatewayOffError(f"does not speak HTTP/1.1: a port for gRPC alone? hint: {GATEWAY_HINT}")
    return EndpointError(f"the connection broke: {error or type(error).__name__}", sent=True)


async def diagnose(
    url: str,
    error: BaseException,
    found: EndpointError,
    context: ssl.SSLContext | None,
    has_certificate: bool,
) -> EndpointError:
    """Examine an endpoint that closed the connection silently: it may reject vipd's certificate, which
    `context` contains, or use the other scheme.

    Sends no secret: a TLS handshake, or `GET /version`.
    """
    hung_up = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError) or isinstance(
        error.__cause__, ConnectionResetError
    )
    host, port = _place(url)
    if url.startswith("http://"):
        if hung_up and await _speaks_tls(host, port):
            why = "this port speaks TLS; hint: write https:// and name its ca"
            return TLSError(TLSFault.TLS_SERVER, why)
        return found
    if hung_up and context is not None and (alert := await _last_word(host, port, context)):
        return _error_of_tls(alert, has_certificate)
    unreadable = isinstance(found, TLSError) and found.fault is TLSFault.OTHER
    if (hung_up or unreadable) and await _speaks_plain_http(host, port):
        return TLSError(TLSFault.PLAIN_SERVER, "this port speaks plain HTTP; hint: write http://")
    return found


def _words(error: OSError) -> str:
    """The system's words; a resolver's errors have numbers of their own and bring words along."""
    known = error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror)
    return os.strerror(error.errno) if known and error.errno else str(error) or type(error).__name__


def _error_of_certificate(error: Exception) -> TLSError:
    code = getattr(error, "verify_code", 0)
    words = getattr(error, "verify_message", "") or str(error)
    if code in _EXPIRED_CODES:
        why = f"the server's certificate is out of date: {words}; hint: renew it, and check the clocks"
        return TLSError(TLSFault.EXPIRED, why)
    if code in _NAME_CODES:
        why = (
            f"the server's certificate is for another name: {words}; hint: use a name or address that it has"
        )
        return TLSError(TLSFault.HOSTNAME, why)
    if code in _CA_CODES:
        why = f"the server's certificate is of an unknown CA: {words}; hint: name the CA's file in ca"
        return TLSError(TLSFault.UNKNOWN_CA, why)
    return TLSError(TLSFault.OTHER, f"the server's certificate cannot be trusted: {words}")


def _error_of_tls(error: ssl.SSLError, has_certificate: bool) -> TLSError:
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason and ("certificate" in reason or "unknown ca" in reason):
        what = "refuses our client certificate" if has_certificate else "demands a client certificate"
        hint = "one signed by the CA that etcd trusts (--trusted-ca-file) in cert and key"
        return TLSError(TLSFault.CLIENT_CERTIFICATE, f"the server {what} ({reason}); hint: {hint}")
    return TLSError(TLSFault.OTHER, f"TLS fails: {reason}")


def _ssl_error(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        error = error.__cause__
    return None


def _place(url: str) -> tuple[str, int]:
    host, _, port = url.partition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)


async def _last_word(host: str, port: int, context: ssl.SSLContext) -> ssl.SSLError | None:
    """Why a server ends a TLS connection. After a request that the server did not read, its reason is lost:
    the kernel drops received data when the connection is reset."""
    try:
        async with asyncio.timeout(DIAGNOSIS_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            async with asyncio.timeout(TLS_ALERT_SECONDS):
                await reader.read(1)
        finally:
            writer.transport.abort()
    except ssl.SSLError as error:
        return error if "ALERT" in (error.reason or "") else None
    except (OSError, TimeoutError):
        return None
    return None


async def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: the question is only whether there is TLS
    try:
        async with asyncio.timeout(DIAGNOSIS_SECONDS):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.transport.abort()
            return True
    except (OSError, TimeoutError):
        return False


async def _speaks_plain_http(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(DIAGNOSIS_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                return (await reader.read(5)).startswith(b"HTTP/")
            finally:
                writer.transport.abort()
    except (OSError, TimeoutError):
        return False
