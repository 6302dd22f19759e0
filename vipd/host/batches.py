"""Splits large work into parts, between which the event loop runs other tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from time import perf_counter
from typing import TypeVar

BATCH_SIZE = 20
"""Services in a part: some 10 ms of work, 30 ms if each uses every key, so that the API still
answers."""
SLICE_SECONDS = 0.005

K = TypeVar("K")
V = TypeVar("V")


def _one(_: object) -> int:
    return 1


async def in_batches(
    items: Mapping[K, V], size: int = BATCH_SIZE, weight: Callable[[V], int] = _one
) -> AsyncIterator[Mapping[K, V]]:
    """A mapping in parts, at least one: of items that weigh `size` together, or of one that weighs more. It
    must not change during the iteration."""
    part: dict[K, V] = {}
    left = size
    for key, item in items.items():
        left -= weight(item)
        if part and left < 0:
            yield part
            await asyncio.sleep(0)
            part, left = {}, size - weight(item)
        part[key] = item
    yield part
    if len(part) < len(items):
        await asyncio.sleep(0)


async def in_slices(items: Iterable[V]) -> AsyncIterator[V]:
    """The items one by one. Whenever the work on them has taken some milliseconds, the event loop runs other
    tasks."""
    began = perf_counter()
    for item in items:
        yield item
        if perf_counter() - began >= SLICE_SECONDS:
            await asyncio.sleep(0)
            began = perf_counter()
