"""Requests to etcd, as coroutines. All raise the errors of `vipd.sources.etcd.errors`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from vipd.host.settings.etcd import EtcdSettings
from vipd.model import limits
from vipd.sources.etcd.connection import Connection
from vipd.sources.etcd.errors import RejectedError, TooLargeError, UnreachableError
from vipd.sources.etcd.fields import Message, inner, number
from vipd.sources.etcd.messages import (
    Delete,
    Header,
    KeyRange,
    KeyValue,
    ModRevisionEquals,
    Put,
    RangeResponse,
    range_request,
    ranges_request,
    read_header,
    read_range_response,
    read_ranges,
    read_txn,
    txn_request,
)
from vipd.sources.etcd.replies import error_of_stream
from vipd.sources.etcd.watch import Watch, open_watch

PAGE = 500
"""Keys in one answer: some 0.2 MB of usual services."""
PAGE_BYTES = 2**20
"""Of values in one answer; if they are larger, the next one has fewer keys."""

_REMOVE = "remove keys below the prefix that are not needed"
_NOT_FOUND = 5
_A_LEASE = "a lease"


@dataclass(frozen=True, slots=True)
class Listing:
    """Every key of some ranges at one revision."""

    header: Header
    kvs: tuple[KeyValue, ...]


class EtcdClient:
    """One client of one etcd cluster. Close it when done."""

    def __init__(self, settings: EtcdSettings, random: Random) -> None:
        self.connection = Connection(settings, random)

    async def list(
        self,
        ranges: Sequence[KeyRange],
        page: int = PAGE,
        *,
        revision: int = 0,
        shorten: Callable[[KeyValue], KeyValue | None] = lambda kv: kv,
    ) -> Listing:
        """Every key of the ranges at one revision (0: the newest), at most `page` in an answer, and fewer
        where values are large. `shorten`: what is kept of each, if anything.

        Raises CompactedError when that revision is compacted; the newest, too, can be between two pages: list
        again.
        """
        header: Header | None = None
        kvs: list[KeyValue] = []
        size = 0
        for keys in ranges:
            at = revision or (header.revision if header else 0)
            async for answer in self.pages(keys, page, revision=at):
                header = header or answer.header
                kept = [short for kv in answer.kvs if (short := shorten(kv)) is not None]
                kvs += kept
                size += sum(len(kv.key) + len(kv.value) for kv in kept)
                self._bound(len(kvs), size)
        return Listing(header or Header("", "", 0), tuple(kvs))

    async def pages(
        self, keys: KeyRange, page: int = PAGE, *, revision: int = 0, keys_only: bool = False
    ) -> AsyncIterator[RangeResponse]:
        """As `list`, for one range, each answer by itself: together they may be larger than the memory."""
        rest: KeyRange | None = keys
        most, read = page, partial(self.range, keys_only=True) if keys_only else self.range
        while rest is not None:
            try:
                found = await read(rest, page, revision)
            except UnreachableError as error:
                if page == 1 or not any(isinstance(e, TooLargeError) for e in error.reasons.values()):
                    raise
                page = most = max(1, page // 8)
                continue
            revision = revision or found.header.revision
            page = min(_page_after(found.kvs), most)
            rest = KeyRange(found.kvs[-1].key + b"\0", keys.end) if found.more else None
            yield found

    async def range(
        self, keys: KeyRange, limit: int = 0, revision: int = 0, *, keys_only: bool = False
    ) -> RangeResponse:
        """The keys of a range in key order, at a revision (0: the newest)."""
        body = range_request(keys, limit, revision, keys_only)
        return await self.connection.call(
            "/v3/kv/range", body, f"read of {keys}", lambda answer: read_range_response(answer, keys)
        )

    async def get(self, key: bytes) -> KeyValue | None:
        """One key; None if it does not exist."""
        found = await self.range(KeyRange(key))
        return found.kvs[0] if found.kvs else None

    async def changed_since(
        self, ranges: Sequence[KeyRange], revision: int
    ) -> tuple[Header, tuple[RangeResponse, ...]]:
        """For each range its count of keys, and the key written last, without its value, if that was after a
        revision. Only one: names of keys may be as long as values."""
        requests = [range_request(keys, keys_only=True, newer_than=revision) for keys in ranges]
        what = f"read of {', '.join(map(str, ranges))}"
        return await self.connection.call(
            "/v3/kv/txn", ranges_request(requests), what, lambda answer: read_ranges(answer, ranges)
        )

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> Header:
        """Write a key."""
        body = Put(key, value, lease).fields()
        return await self.connection.call("/v3/kv/put", body, f"write of {KeyRange(key)}", read_header)

    async def txn(self, conditions: Sequence[ModRevisionEquals], then: Sequence[Put | Delete]) -> int:
        """Do all of `then` if every condition is true; returns its revision, or 0 if one was false. Compare
        and swap is one of each.

        After UnreachableError it may or may not have been done: read before a retry.
        """
        body = txn_request(conditions, then)
        keys = ", ".join(str(op.keys if isinstance(op, Delete) else KeyRange(op.key)) for op in then)
        what = f"write of {keys}"
        return await self.connection.call("/v3/kv/txn", body, what, read_txn, repeatable=False)

    async def grant_lease(self, seconds: int) -> int:
        """A new lease; its id."""
        body = {"TTL": str(seconds)}
        return await self.connection.call("/v3/lease/grant", body, _A_LEASE, lambda a: number(a, "ID", 1))

    async def renew_lease(self, lease: int) -> int:
        """Renew a lease; the seconds it has from now on. 0: it is no more."""
        body = {"ID": str(lease)}
        return await self.connection.call("/v3/lease/keepalive", body, _A_LEASE, _read_renewal)

    async def lease_times(self, lease: int) -> tuple[int, int]:
        """Seconds that a lease was granted for, and the remaining ones; none remain of an expired one."""
        body = {"ID": str(lease)}
        return await self.connection.call("/v3/lease/timetolive", body, _A_LEASE, _read_times)

    async def revoke_lease(self, lease: int) -> None:
        """End a lease, and with it its keys; nothing happens if it is no more."""
        try:
            await self.connection.call("/v3/lease/revoke", {"ID": str(lease)}, _A_LEASE, lambda a: None)
        except RejectedError as error:
            if error.code != _NOT_FOUND:
                raise

    @contextlib.asynccontextmanager
    async def watch(self, keys: KeyRange, revision: int) -> AsyncIterator[Watch]:
        """Watch a range from a revision on. Ends with an error, never by itself."""
        async with open_watch(self.connection, keys, revision) as watch:
            yield watch

    async def close(self) -> None:
        """Close every connection."""
        await self.connection.close()

    def _bound(self, keys: int, size: int) -> None:
        what = f"{self.connection.endpoint} lists more than"
        if keys > limits.ETCD_KEYS:
            raise TooLargeError(f"{what} {limits.ETCD_KEYS} keys; hint: {_REMOVE}")
        if size > limits.ETCD_BYTES:
            raise TooLargeError(f"{what} {limits.ETCD_BYTES >> 20} MiB; hint: {_REMOVE}")


def _page_after(kvs: Sequence[KeyValue]) -> int:
    """How many keys to request next, if values are as large as these."""
    size = sum(len(kv.value) for kv in kvs)
    return max(1, len(kvs) * PAGE_BYTES // size) if size > PAGE_BYTES else PAGE


def _read_renewal(answer: Message) -> int:
    if "result" not in answer:
        raise error_of_stream(answer, _A_LEASE)
    return number(inner(answer, "result"), "TTL")


def _read_times(answer: Message) -> tuple[int, int]:
    return number(answer, "grantedTTL"), max(0, number(answer, "TTL", minimum=-1))
