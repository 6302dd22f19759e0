"""Limits the file descriptors of each part of vipd, so that none can exhaust them."""

from __future__ import annotations

import resource
from typing import NamedTuple

WANTED_DESCRIPTORS = 16384
"""Descriptors for the whole process: 5,000 backends that hang for 2 s of every 5 s take 2,000."""

RESERVED = 256
"""For vipd itself: programs that write rules, files, the kernel, etcd."""

_PART = 8


class DescriptorLimits(NamedTuple):
    """Maximum number of open descriptors of each part."""

    clients: int
    """Connections of others to vipd."""
    ports: int
    """Sockets that listen."""
    probes: int
    """Sockets of health checks."""


def raise_limit() -> DescriptorLimits:
    """Raise this process's own limit as far as possible, up to WANTED, and divide it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return divide_limit(soft)


def divide_limit(limit: int) -> DescriptorLimits:
    """The division of this many descriptors."""
    limit = WANTED_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, WANTED_DESCRIPTORS)
    part = limit // _PART
    own = min(RESERVED, limit // 4)
    return DescriptorLimits(max(part, 1), max(part, 1), max(limit - own - 2 * part, 1))
