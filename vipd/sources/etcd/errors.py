"""Errors between vipd and etcd, by their remedy: `what: why; hint: ...`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class EtcdError(RuntimeError):
    """Any failure of a call to etcd."""


class EndpointError(EtcdError):
    """One endpoint is of no use now; another one may be."""

    def __init__(self, why: str, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent
        """The request may have reached the server, and may have been carried out."""


class UnreachableError(EtcdError):
    """No endpoint could be used."""

    def __init__(self, reasons: Mapping[str, EndpointError]) -> None:
        told = "; ".join(f"{endpoint}: {why}" for endpoint, why in reasons.items())
        malformed = any(isinstance(error, MalformedAnswerError) for error in reasons.values())
        what = "etcd gives no answer that can be used" if malformed else "etcd cannot be reached"
        super().__init__(f"{what}: {told or 'no endpoint is known'}")
        self.reasons = dict(reasons)
        """The reason for each endpoint in the order of the attempts."""


class MalformedAnswerError(EndpointError):
    """The endpoint answers with success, but not in etcd's format; the text describes the fault."""

    def __init__(self, why: str) -> None:
        super().__init__(why, sent=True)


class TooLargeError(MalformedAnswerError):
    """An answer is larger than vipd takes."""


class TLSFault(StrEnum):
    """Reason why a TLS connection fails."""

    UNKNOWN_CA = "unknown CA"
    HOSTNAME = "hostname mismatch"
    EXPIRED = "expired"
    CLIENT_CERTIFICATE = "client certificate"
    """The server requires one that vipd did not send, or rejects vipd's."""
    PLAIN_SERVER = "plain server"
    """https to a server of plain http."""
    TLS_SERVER = "TLS server"
    """http to a server of TLS."""
    FILES = "files"
    """The CA, certificate or key cannot be loaded."""
    OTHER = "other"


class TLSError(EndpointError):
    """The connection cannot be made safe."""

    def __init__(self, fault: TLSFault, why: str) -> None:
        super().__init__(why, sent=False)
        self.fault = fault


class GatewayOffError(EndpointError):
    """The endpoint has no JSON gateway: it is off, or on another port, or this is not etcd."""


class VersionError(EndpointError):
    """The server is too old for the paths that are used here."""


class CommonNameError(EndpointError):
    """The gateway refuses a client certificate with a common name while etcd's authentication is on."""


class AuthFailedError(EtcdError):
    """User and password are missing or wrong."""


class PermissionDeniedError(EtcdError):
    """The user's role lacks a permission."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"etcd denies {what}; hint: {hint}")
        self.what = what
        """The request: `read of /vipd/v1/services/*`."""


class CompactedError(EtcdError):
    """The requested revision is gone: history before `revision` has been compacted (0: not reported)."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"etcd's history before revision {revision} has been compacted")
        self.revision = revision


class RejectedError(EtcdError):
    """etcd understood the request and refused it."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(f"etcd refuses the request: {message}")
        self.message, self.code = message, code
        """etcd's own words, and the gRPC status code."""


class TokenRejectedError(EtcdError):
    """The token is no longer valid, or one is required: log in and retry."""
