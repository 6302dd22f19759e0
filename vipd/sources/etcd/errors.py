"""What goes wrong between vipd and etcd, by what helps: another endpoint, a new list, a hint. Pure."""

from __future__ import annotations

import json
import os
import socket
import ssl
from typing import Any

import aiohttp

Json = dict[str, Any]
GARBAGE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Exceptions from reading what is no answer of etcd."""
NETWORK_ERRORS = (aiohttp.ClientError, OSError)
"""Exceptions of aiohttp for network failures; timeouts and TLS errors are kinds of OSError."""

NOT_FOUND, FAILED_PRECONDITION = 5, 9
"""gRPC status codes."""
_PERMISSION_DENIED = 7
_UNAVAILABLE = frozenset({4, 8, 14})
"""Deadline exceeded, resource exhausted, unavailable."""
_TOKEN_WORDS = ("invalid auth token", "revision of auth store is old", "user name is empty")
_ENDPOINT_WORDS = ("no leader", "request timed out", "leader changed", "not capable", "server stopped")
_MAX_TEXT = 300
"""Characters of a server's message that an error repeats."""

_GATEWAY = "start etcd with --enable-grpc-gateway=true; if it has --listen-client-http-urls, name that port"
_CERTIFICATE = "one signed by the CA that etcd trusts (--trusted-ca-file) in cert and key"
_COMMON_NAME = (
    "etcd's JSON gateway takes no client certificate with a common name while authentication is on; "
    "hint: issue the certificate without CN, and name user and password_file"
)
_CERTIFICATE_FAULTS = {
    **dict.fromkeys((9, 10), "is out of date: {}; hint: renew it, and check the clocks"),
    **dict.fromkeys((62, 64), "is for another name: {}; hint: use a name or address that it has"),
    **dict.fromkeys((2, 18, 19, 20, 21), "is of an unknown CA: {}; hint: name the CA's file in ca"),
}
"""By OpenSSL's verify codes (x509_vfy.h)."""


class EtcdError(RuntimeError):
    """A request failed: `what: why; hint: ...`."""


class EndpointError(EtcdError):
    """One endpoint is of no use now, another one may be; or none of them is."""

    def __init__(self, why: str, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent
        """The request may have reached the server, and may have been carried out."""


class TooLargeError(EndpointError):
    """An answer is larger than vipd reads."""


class CompactedError(EtcdError):
    """The requested revision is gone: history before `revision` has been compacted (0: not reported)."""

    def __init__(self, revision: int = 0) -> None:
        super().__init__(f"etcd's history before revision {revision} has been compacted")


class RejectedError(EtcdError):
    """etcd understood the request and refused it, with a gRPC status code."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


class TokenRejectedError(EtcdError):
    """The token is no longer valid, or one is required: log in and retry."""


def error_of_message(message: str, code: int, request: str) -> EtcdError:
    """The error for etcd's own words; `request` is the request: `read of KEYS`."""
    if any(words in message for words in _TOKEN_WORDS):
        return TokenRejectedError(message)
    if "authentication failed" in message:
        hint = "check user and password_file"
        return EtcdError(f"etcd knows no such user, or another password; hint: {hint}")
    if code == _PERMISSION_DENIED or "permission denied" in message or "PermissionDenied" in message:
        hint = "grant the user's role this range: etcdctl role grant-permission"
        return EtcdError(f"etcd denies {request}; hint: {hint}")
    if "revision has been compacted" in message:
        return CompactedError()
    if code in _UNAVAILABLE or any(words in message for words in _ENDPOINT_WORDS):
        return EndpointError(message)
    return RejectedError(f"etcd refuses the request: {message}", code)


def error_of_json(answer: Json, request: str) -> EtcdError:
    """The error in an answer. Raises `GARBAGE` if there is none."""
    fault = answer["error"] if isinstance(answer.get("error"), dict) else answer
    code = fault.get("grpc_code") or fault.get("code") or 0
    return error_of_message(shortened(fault.get("message") or fault["error"]), int(code), request)


def error_of_cancellation(result: Json, request: str) -> EtcdError:
    """Why etcd ended a watch."""
    if revision := int(result.get("compact_revision") or 0):
        return CompactedError(revision)
    reason = shortened(str(result.get("cancel_reason") or "no reason told"))
    error = error_of_message(reason, 0, request)
    return EndpointError(f"ended the watch: {reason}") if isinstance(error, RejectedError) else error


def error_of_answer(status: int, text: str, request: str) -> EtcdError:
    """The error for an answer without success."""
    if text.startswith("CommonName of client"):
        return EndpointError(_COMMON_NAME, sent=False)
    try:
        return error_of_json(json.loads(text), request)
    except GARBAGE:
        answer = f"answers HTTP {status}: {shortened(text)}"
        if status >= 500:
            return EndpointError(answer)
        why = f"is no JSON gateway of etcd 3.4 or later ({answer})"
        return EndpointError(f"{why}; hint: name the port of clients, often 2379; {_GATEWAY}", sent=False)


def error_of_network(
    error: BaseException, url: str, timeout: float, certified: bool, known: bool
) -> EndpointError:
    """The error for an exception of aiohttp, TLS or the system; an EndpointError is one already. `certified`:
    a client certificate is configured. `known`: the endpoint has answered before."""
    if isinstance(error, EndpointError):
        return error
    certificate = "refuses our client certificate" if certified else "demands a client certificate"
    if tls_fault := _tls_fault(error, certificate):
        return EndpointError(tls_fault, sent=False)
    if isinstance(error, TimeoutError):
        return EndpointError(f"no answer within {timeout:g} s")
    if isinstance(error, aiohttp.ClientConnectorError):
        hung_up = isinstance(error.os_error, ConnectionResetError) and url.startswith("https:")
        hint = "; hint: write http:// if this port speaks plain HTTP" if hung_up else ""
        return EndpointError(f"cannot connect: {_words(error.os_error)}{hint}", sent=False)
    if isinstance(error, aiohttp.ClientResponseError):
        return EndpointError(f"does not speak HTTP/1.1: a port for gRPC alone? hint: {_GATEWAY}", sent=False)
    hint = ""
    if not known and isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError):
        hint = "; hint: write https:// if this port speaks TLS, and name its ca"
        if url.startswith("https:"):
            # What a server says last is lost when it resets a connection with data that it has not read.
            hint = f"; perhaps the server {certificate}; hint: {_CERTIFICATE}"
    return EndpointError(f"the connection broke: {error or type(error).__name__}{hint}")


def shortened(text: str) -> str:
    """One line that can be printed, of bounded length."""
    line = " ".join(text[: 4 * _MAX_TEXT].split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 3] + "..."


def _tls_fault(error: BaseException | None, certificate: str) -> str:
    """Why TLS fails; empty for any other fault. `certificate`: what the server may do about that of vipd."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        refusal = error.certificate_error
        words = getattr(refusal, "verify_message", "") or str(refusal)
        fault = _CERTIFICATE_FAULTS.get(getattr(refusal, "verify_code", 0), "cannot be trusted: {}")
        return f"the server's certificate {fault.format(words)}"
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__
    if error is None:
        return ""
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason and ("certificate" in reason or "unknown ca" in reason):
        return f"the server {certificate} ({reason}); hint: {_CERTIFICATE}"
    if reason in ("wrong version number", "record layer failure"):
        return "this port speaks plain HTTP; hint: write http://"
    return f"TLS fails: {reason}"


def _words(error: OSError) -> str:
    """The system's words; a resolver's errors have numbers of their own and bring words along."""
    known = error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror)
    return os.strerror(error.errno) if known and error.errno else str(error) or type(error).__name__
