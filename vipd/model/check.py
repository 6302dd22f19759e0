"""What a health check is: how a backend is asked, how often, and how many answers make a verdict. Pure.

Values only: `vipd.health` asks. Times are seconds, fractions allowed. Equal checks of one address and port
are one probe, however many services use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

WEIGHT_HEADER = "X-Vipd-Weight"
"""Response header by which a backend says its own weight, where its service listens to it."""

MAX_CHECK_SECONDS = 3600.0
"""Longest interval."""

MIN_CHECK_SECONDS = 0.1
"""Shortest interval and timeout."""

MAX_COUNT = 100
"""Largest rise and fall."""


class Start(StrEnum):
    """What a backend counts as until its first verdict."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Timing:
    """When a backend is asked and how many answers in a row decide."""

    interval: float = 5.0
    timeout: float = 2.0
    """Longest time for an answer; at most the interval."""
    rise: int = 2
    """Good answers in a row that make an unhealthy backend healthy."""
    fall: int = 3
    """Bad answers in a row that make a healthy backend unhealthy."""
    start: Start = Start.HEALTHY
    jitter: float = 0.1
    """Part of the interval, 0..0.5, by which each pause is shortened at random, so that a fleet does not ask
    in step. Never longer: a verdict comes within fall x interval."""


@dataclass(frozen=True, slots=True)
class TcpProbe:
    """A connection is made, and closed at once."""

    port: int | None = None
    """The port asked; None: the backend's own. So for every probe."""


@dataclass(frozen=True, slots=True)
class HttpProbe:
    """A request is answered with a wanted status, and a body that matches."""

    port: int | None = None
    tls: bool = False
    method: str = "GET"
    path: str = "/"
    host: str = ""
    """The Host header; empty: the backend's address and port."""
    status: tuple[tuple[int, int], ...] = ((200, 399),)
    """Ranges of good status codes, both ends included. A redirection is not followed."""
    body: str = ""
    """Text or regular expression that must be found in the first 64 KiB of the body; empty: any body."""
    verify: bool = True
    """TLS: whether the server's certificate must be valid for `server_name`."""
    ca: str = ""
    """TLS: file of the certificates to trust; empty: the host's."""
    server_name: str = ""
    """TLS: name sent (SNI) and verified; empty: the host, or the address."""


@dataclass(frozen=True, slots=True)
class UdpProbe:
    """A datagram is answered; with nothing expected, no ICMP error comes back within the timeout."""

    port: int | None = None
    send: bytes = b""
    expect: bytes | None = None
    """What the answer must begin with; empty: any answer; None: silence is good, only a refusal is bad."""


@dataclass(frozen=True, slots=True)
class DnsProbe:
    """A DNS query over UDP is answered with a wanted code and record."""

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
    """Who runs it; empty: the user that is there for that (vipd/host/accounts.py)."""


Probe: TypeAlias = TcpProbe | HttpProbe | UdpProbe | DnsProbe | ExecProbe


@dataclass(frozen=True, slots=True)
class Check:
    """How backends are checked; without a probe they are not."""

    probe: Probe | None = None
    timing: Timing = Timing()


UNCHECKED = Check()


def asks_host(check: Check) -> bool:
    """Whether only this host can tell if a check can work here: its program and user, or its certificates."""
    probe = check.probe
    if isinstance(probe, HttpProbe):
        return probe.tls and probe.verify and bool(probe.ca)
    return isinstance(probe, ExecProbe)
