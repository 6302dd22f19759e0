"""How many sockets probes may have open at once."""

from __future__ import annotations

import resource

WANTED = 16384
"""Descriptors for the whole process: 5,000 backends that hang for 2 s of every 5 s take 2,000."""

RESERVED = 256
"""Left for all else that vipd does."""


def make_room() -> int:
    """Raise this process's own limit as far as it may, up to WANTED; how many of them probes may use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return room(soft)


def room(limit: int) -> int:
    """How many of so many descriptors probes may use, one each."""
    least = WANTED if limit == resource.RLIM_INFINITY else limit
    return max(least - RESERVED, least // 2, 1)
