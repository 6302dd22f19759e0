"""Health checks: how a backend is probed, how often, and how many results change its status. Pure.

Values only: `vipd.health` sends the probes. Times are seconds, fractions allowed. Equal checks of one address
and port are one probe, however many services use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

WEIGHT_HEADER = "X-Vipd-Weight"
"""Response header in which a backend reports its own weight, for services that accept it."""

MAX_CHECK_SECONDS = 3600.0
"""Longest interval."""

MIN_CHECK_SECONDS = 0.1
"""Shortest interval and timeout."""

MAX_COUNT = 100
"""Largest rise and fall."""


class InitialHealth(StrEnum):
    """The status of a backend before its first verdict."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Timing:
    """When a backend is probed, and how many equal results in a row change its status."""

    interval: float = 5.0
    timeout: float = 2.0
    """Longest wait for an answer; at most the interval."""
    rise: int = 2
    """Good answers in a row that make an unhealthy backend healthy."""
    fall: int = 3
    """Bad answers in a row that make a healthy backend unhealthy."""
    start: InitialHealth = InitialHealth.HEALTHY
    jitter: float = 0.1
    """Part of the interval, 0..0.5, by which each pause is shortened at random, so that the probes of a fleet
    spread over time. The interval is never exceeded: a verdict takes at most fall x interval."""


@dataclass(frozen=True, slots=True)
class TcpProbe:
    """A connection is made, and closed at once."""

    port: int | None = None
    """The port to probe; None: the backend's own. Every probe has this field."""


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """Succeeds if the response has an accepted status and a matching body."""

    port: int | None = None
    tls: bool = False
    method: str = "GET"
    path: str = "/"
    host: str = ""
    """The Host header; empty: the backend's address and port."""
    status: tuple[tuple[int, int], ...] = ((200, 399),)
    """Ranges of good status codes, both ends included. A redirection is not followed."""
    body: str = ""
    """Text or regular expression that the first 64 KiB of the body must contain; empty: any body."""
    verify: bool = True
    """TLS: whether the server's certificate must be valid for `server_name`."""
    ca: str = ""
    """TLS: file of the certificates to trust; empty: the host's."""
    server_name: str = ""
    """TLS: name sent (SNI) and verified; empty: the host, or the address."""


@dataclass(frozen=True, slots=True)
class UdpProbe:
    """Succeeds if an answer arrives; if no answer is expected, if no ICMP error arrives within the
    timeout."""

    port: int | None = None
    send: bytes = b""
    expect: bytes | None = None
    """Prefix of the answer; empty: any answer; None: no answer is a success, only an ICMP error fails."""


@dataclass(frozen=True, slots=True)
class DnsProbe:
    """A DNS query over UDP; succeeds if the answer has an accepted code and record."""

    port: int | None = None
    query: str = "."
    type: str = "A"
    """Record type by name: A, AAAA, NS, SOA, TXT, MX, SRV, CNAME or PTR."""
    rcode: str = "NOERROR"
    answer: str = ""
    """Text of a record that must be among the answers; empty: any or none."""


@dataclass(frozen=True, slots=True)
class ExecProbe:
    """A program ends with 0. It is started without a shell, as an unprivileged user, with the environment
    variables VIPD_ADDRESS, VIPD_PORT and VIPD_PROTOCOL alone beside PATH."""

    port: int | None = None
    command: tuple[str, ...] = ()
    """The program's absolute path and its arguments."""
    user: str = ""
    """User that runs the program; empty: one of its author's own (`vipd/host/accounts.py`)."""


Probe: TypeAlias = TcpProbe | HttpProbe | UdpProbe | DnsProbe | ExecProbe


@dataclass(frozen=True, slots=True)
class Check:
    """Health check of backends; without a probe they are not checked."""

    probe: Probe | None = None
    timing: Timing = Timing()


UNCHECKED = Check()


def depends_on_host(check: Check) -> bool:
    """Whether a check depends on this host: on a program and a user, or on certificates."""
    probe = check.probe
    if isinstance(probe, HttpProbe):
        return probe.tls and probe.verify and bool(probe.ca)
    return isinstance(probe, ExecProbe)
