"""Converts an answer without success to an error. Pure."""

from __future__ import annotations

import re

from vipd.declaration.bounded_json import read_json
from vipd.sources.etcd.errors import (
    AuthFailedError,
    CommonNameError,
    CompactedError,
    EndpointError,
    EtcdError,
    GatewayOffError,
    MalformedAnswerError,
    PermissionDeniedError,
    RejectedError,
    TokenRejectedError,
    VersionError,
)
from vipd.sources.etcd.fields import MAX_BYTES, Message

OLDEST_VERSION = (3, 4)

_UNAVAILABLE_CODES = frozenset({4, 8, 14})
"""gRPC: deadline exceeded, resource exhausted, unavailable."""
_DENIED_CODE = 7
_SHOWN_VERSION = 40
_TOKEN_WORDS = ("invalid auth token", "revision of auth store is old", "user name is empty")
_ENDPOINT_WORDS = ("no leader", "request timed out", "leader changed", "not capable", "server stopped")
_SHOWN = 300
"""Characters of a server's message that an error repeats."""

GATEWAY_HINT = (
    "start etcd with --enable-grpc-gateway=true; if it has --listen-client-http-urls, name that port"
)


def read_object(text: str) -> Message | None:
    """The JSON object in a text; None if there is none, or one that is nested without end."""
    try:
        found = read_json(text, MAX_BYTES)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def error_of_answer(status: int, text: str, what: str) -> EtcdError:
    """The error for an answer with another status than 200; `what` is the request: `read of KEYS`."""
    if status == 400 and text.startswith("CommonName of client"):
        return CommonNameError(
            "etcd's JSON gateway takes no client certificate with a common name while authentication is on; "
            "hint: issue the certificate without CN, and name user and password_file"
        )
    answer = read_object(text)
    if answer is not None and "code" in answer:
        return error_of_message(_words(answer), _code(answer), what)
    if status == 200 and text.lstrip()[:1] in ("{", "["):
        return MalformedAnswerError(f"malformed answer ({what}): it is no JSON object: {_cut(text[:80])}")
    if status >= 500:
        return EndpointError(f"answers HTTP {status}: {_cut(text)}")
    return GatewayOffError(f"answers HTTP {status}: {_cut(text)}")


def error_of_message(message: str, code: int, what: str) -> EtcdError:
    """The error for a message of etcd's, in an answer or in a watch stream."""
    if any(words in message for words in _TOKEN_WORDS):
        return TokenRejectedError(message)
    if "authentication failed" in message:
        return AuthFailedError(
            "etcd knows no such user, or another password; hint: check user and password_file"
        )
    if code == _DENIED_CODE or "permission denied" in message:
        return PermissionDeniedError(what, "grant the user's role this range: etcdctl role grant-permission")
    if "revision has been compacted" in message:
        return CompactedError(0)
    if code in _UNAVAILABLE_CODES or any(words in message for words in _ENDPOINT_WORDS):
        return EndpointError(message)
    return RejectedError(message, code)


def error_of_stream(answer: Message, what: str) -> EtcdError:
    """The error for an `error` object within a stream."""
    error = answer.get("error")
    if error is None:
        return MalformedAnswerError("there is neither a result nor an error")
    found = error if isinstance(error, dict) else answer
    return error_of_message(_words(found), _code(found), what)


def error_of_cancellation(reason: str, compact_revision: int, what: str) -> EtcdError:
    """Why etcd ended a watch."""
    if compact_revision:
        return CompactedError(compact_revision)
    reason = _cut(reason)
    code = _DENIED_CODE if "PermissionDenied" in reason else 0
    error = error_of_message(reason or "no reason told", code, what)
    return EndpointError(f"ended the watch: {reason}") if isinstance(error, RejectedError) else error


def error_without_gateway(found: GatewayOffError, version_status: int, version_text: str) -> EndpointError:
    """The same fault, after a request to `/version`: etcd without gateway, too old, or no etcd."""
    answer = read_object(version_text) if version_status == 200 else None
    version = _cut(str(answer.get("etcdserver", "")))[:_SHOWN_VERSION] if answer else ""
    if not version:
        return GatewayOffError(
            f"is no etcd client port ({found}); hint: name the port of clients, often 2379"
        )
    numbers = tuple(int(number) for number in re.findall(r"[0-9]+", version)[:2])
    if numbers < OLDEST_VERSION:
        return VersionError(f"is etcd {version}: 3.4 or later is needed for /v3; hint: upgrade it")
    return GatewayOffError(f"is etcd {version} with its JSON gateway off; hint: {GATEWAY_HINT}")


def _words(answer: Message) -> str:
    """etcd's own words."""
    found = next((answer[key] for key in ("message", "error") if answer.get(key)), None)
    return _cut(found) if isinstance(found, str) else "an error without a message"


def _code(answer: Message) -> int:
    """The gRPC status code; 0 when there is none that can be read."""
    found = answer.get("grpc_code") or answer.get("code")
    return found if isinstance(found, int) else 0


def _cut(text: str) -> str:
    """One line that can be printed, of bounded length."""
    line = " ".join(text[: 4 * _SHOWN].split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."
