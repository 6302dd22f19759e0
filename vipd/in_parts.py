"""Large work in parts, between which the event loop does what else is due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from itertools import islice
from typing import TypeVar

AT_ONCE = 20
"""Services in a part: some 10 ms of work, 30 ms where each uses every key, so that the API goes on
answering."""

K = TypeVar("K")
V = TypeVar("V")


async def in_parts(items: Mapping[K, V], size: int = AT_ONCE) -> AsyncIterator[Mapping[K, V]]:
    """A mapping in parts of so many items, at least one part. It must not change meanwhile."""
    if len(items) <= size:
        yield items
        return
    left = iter(items.items())
    while part := dict(islice(left, size)):
        yield part
        await asyncio.sleep(0)
