"""How many file descriptors each part of vipd may use, so that none of them leaves the others without."""

from __future__ import annotations

import resource
from typing import NamedTuple

WANTED = 16384
"""Descriptors for the whole process: 5,000 backends that hang for 2 s of every 5 s take 2,000."""

RESERVED = 256
"""For what vipd does itself: programs that write rules, files, the kernel, etcd."""

_PART = 8


class Shares(NamedTuple):
    """What may be open at once."""

    clients: int
    """Connections of others to vipd."""
    ports: int
    """Sockets that listen."""
    probes: int
    """Sockets of health checks."""


def make_room() -> Shares:
    """Raise this process's own limit as far as it may, up to WANTED, and share it out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return shares(soft)


def shares(limit: int) -> Shares:
    """How so many descriptors are shared out."""
    limit = WANTED if limit == resource.RLIM_INFINITY else min(limit, WANTED)
    part = limit // _PART
    own = min(RESERVED, limit // 4)
    return Shares(max(part, 1), max(part, 1), max(limit - own - 2 * part, 1))
