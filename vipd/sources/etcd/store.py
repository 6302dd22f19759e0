"""vipctl's writes to etcd: services, one key each, with a note in the history; and overrides.

Every write is a transaction that fails if another client has changed one of its keys since this host last
received it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from vipd.declaration.operations import Outcome, RefusedError
from vipd.declaration.problems import printable
from vipd.model.override import Override, OverrideKey, OverrideTarget, merge_parts
from vipd.model.service import Service
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError, RejectedError, UnreachableError
from vipd.sources.etcd.fleet_keys import (
    UnwritableError,
    keys_of_targets,
    override_key,
    override_keys,
    override_value,
    read_overrides,
    service_key,
    service_value,
    weight_override_key,
)
from vipd.sources.etcd.messages import Delete, KeyRange, ModRevisionEquals, Put
from vipd.sources.etcd.source import EtcdSource
from vipd.sources.etcd.store_history import EtcdHistory, note_value
from vipd.sources.etcd.values import Layout, unit_name
from vipd.sources.history import NO_NOTE, ChangeNote, Entry

Answer = TypeVar("Answer")

OBSERVE_TIMEOUT_SECONDS = 10.0
"""How long an answer waits until this host receives its own write."""
POLL_SECONDS = 0.01
MAX_DELETES_PER_TXN = 100
"""Fewer than the 128 operations that etcd accepts in a transaction by default."""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The outcome of a write."""

    revision: int
    """0 when there was nothing to write."""
    keys: Mapping[str, bool]
    """Whether each exists now, or was removed."""

    @property
    def place(self) -> str:
        """`etcd /vipd/v1/services/dns at revision 42`."""
        keys = list(map(printable, self.keys))
        named = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more keys" if keys else ""
        return f"etcd {named} at revision {self.revision}" if self.revision else f"etcd {named}".rstrip()


class EtcdStore:
    """The services and overrides in etcd, as known to this host, and changes to them."""

    def __init__(
        self,
        client: EtcdClient,
        source: EtcdSource,
        prefix: str,
        clock: Callable[[], datetime],
        host: str = "",
    ) -> None:
        """`host`: the name of this host, for the history."""
        self._client, self._source, self._layout, self._clock = client, source, Layout(prefix), clock
        self._host, self._stopping = host, False
        self._history = EtcdHistory(client, self._layout)

    @property
    def services(self) -> dict[str, Service]:
        """Every service in etcd, without backends that registered themselves; for a faulty value, its last
        good one."""
        found = {}
        for unit in self._source.units().values():
            for service in (unit.candidate if unit.candidate.ok else unit.accepted).services:
                found[service.name] = service
        return found

    @property
    def place(self) -> str:
        """Location of the services."""
        return f"etcd {self._layout.services}"

    def check(self, outcome: Outcome) -> None:
        """Check that a change can be written at all. Raises RefusedError."""
        self._puts(outcome)

    @property
    def history_place(self) -> str:
        """Location of the notes on changes."""
        return f"etcd {self._layout.history}"

    async def history(self) -> tuple[Entry, ...]:
        """The newest changes, the oldest first. Raises RefusedError."""
        return await self._asked(self._history.entries())

    async def changes_in(self, entry: Entry) -> Sequence[tuple[str, Service | None, Service | None]]:
        """The services that an entry names, each before and after it. Raises RefusedError."""
        return await self._asked(self._history.changes_in(entry))

    async def services_since(self, revision: int) -> Mapping[str, Service | None]:
        """What the services that changed since a revision were at it; None: not there. Raises
        RefusedError."""
        known = {name: self._source.mod_revision(self._key(name)) for name in self.services}
        return await self._asked(self._history.services_since(revision, known))

    async def save(self, outcome: Outcome, note: ChangeNote = NO_NOTE) -> WriteResult:
        """Write a change that was decided on the current `services`.

        Raises RefusedError; then nothing was written, unless the error reports that this is unknown.
        """
        puts = self._puts(outcome)
        results = outcome.results
        deletes = [name for name, action in results.items() if action == "removed"]
        then: list[Put | Delete] = [*puts]
        then += [Delete(KeyRange(self._key(name).encode())) for name in deletes]
        if then:
            value = note_value(self._clock(), note, self._host, outcome)
            then.append(Put(self._layout.history.encode(), value.encode()))
        # If nothing changes, unchanged services count too: this host may not know the latest change yet.
        names = [name for name, action in results.items() if action != "unchanged"] or list(results)
        keys = [self._key(name) for name in names]
        revision = await self._write(keys, then)
        return WriteResult(revision if then else 0, {self._key(n): results[n] != "removed" for n in names})

    async def put_override(self, order: Override) -> WriteResult:
        """Write an override beside the other part of an earlier one; one that expires gets a lease that
        expires with it. Raises as `save` does."""
        known, wanted = self._overrides_at_keys(order)
        puts = {key: each for key, each in wanted.items() if known.get(key) != each}
        gone = known.keys() - wanted.keys()
        values = {key: _order_value(each) for key, each in puts.items()}
        leases: list[int] = []
        then: list[Put | Delete] = [Delete(KeyRange(_encoded(key))) for key in gone]
        try:
            for key, each in puts.items():
                # An override without expiry has no lease to revoke.
                leases += [await self._lease(each.until)] if each.until is not None else []
                lease = leases[-1] if each.until is not None else 0
                then.append(Put(_encoded(key), values[key].encode(), lease))
            revision = await self._write([*gone, *puts], then) if then else 0
        except RefusedError:
            for lease in leases:
                with contextlib.suppress(EtcdError):
                    await self._client.revoke_lease(lease)
            raise
        return WriteResult(revision, dict.fromkeys(gone, False) | dict.fromkeys(puts, True))

    def _overrides_at_keys(self, order: Override) -> tuple[dict[str, Override | None], dict[str, Override]]:
        """The current values at the keys of an override's target (None: none that stays), and the new values
        with this override."""
        layout, known, parts = self._layout, dict[str, Override | None](), dict[OverrideKey, Override]()
        for key in (weight_override_key(layout, order.target), override_key(layout, order.target)):
            rest = key.removeprefix(layout.overrides)
            value = self._source.overrides.get(rest)
            found = read_overrides({rest: value})[0] if value is not None else {}
            # Values that cannot be read, or have another target, are not deleted.
            if any(each.target == order.target for each in found):
                held = {k: o for k, o in found.items() if o.until is None or o.until > self._clock()}
                parts |= held
                known[key] = merge_parts(held)[0] if held else None
        return known, override_keys(layout, {**parts, **order.parts()})

    async def _lease(self, until: datetime) -> int:
        left = math.ceil((until - self._clock()).total_seconds())
        return await self._asked(self._client.grant_lease(max(left, 1)))

    async def clear_overrides(self, targets: Collection[OverrideTarget]) -> WriteResult:
        """Delete the overrides of these targets. Raises as `save` does."""
        keys = keys_of_targets(self._layout, self._source.overrides, targets)
        revision = 0
        for start in range(0, len(keys), MAX_DELETES_PER_TXN):
            some = keys[start : start + MAX_DELETES_PER_TXN]
            revision = await self._write(some, [Delete(KeyRange(_encoded(key))) for key in some])
        return WriteResult(revision, dict.fromkeys(keys, False))

    def stop_waiting(self) -> None:
        """vipd stops: end every `wait_observed`."""
        self._stopping = True

    async def wait_observed(self, written: WriteResult) -> str:
        """Wait until this host receives a write; returns why it does not, or does not follow it, else
        empty."""
        clock = asyncio.get_running_loop().time
        end = clock() + OBSERVE_TIMEOUT_SECONDS
        while not all(self._known(key, there, written.revision) for key, there in written.keys.items()):
            if self._stopping:
                return "vipd is stopping: this host follows when it has started again"
            if clock() >= end:
                seconds = f"{OBSERVE_TIMEOUT_SECONDS:.0f} s"
                late = f"this host has not heard of revision {written.revision} after {seconds}"
                return "; ".join((late, *self._source.faults()))
            await asyncio.sleep(POLL_SECONDS)
        held = [key for key in self._source.state().held if written.keys.get(key) is False]
        if not held:
            return ""
        what = f"{len(held)} of the removals are held" if len(held) > 1 else "the removal is held"
        return f"{what}: too many services at once; vipctl accept-removal on each host lets go"

    def units(self, written: WriteResult) -> list[str]:
        """Names of the units that were written."""
        return [unit_name(key) for key, there in written.keys.items() if there]

    def _known(self, key: str, there: bool, revision: int) -> bool:
        known = self._source.mod_revision(key)
        overtaken = known > revision or (known == 0 and self._source.last_change > revision)
        return overtaken or (known == revision if there else known == 0)

    def _key(self, name: str) -> str:
        return service_key(self._layout, name)

    def _puts(self, outcome: Outcome) -> list[Put]:
        try:
            return [
                Put(self._key(name).encode(), service_value(self._layout, outcome.stored[name]).encode())
                for name, action in outcome.results.items()
                if action in ("created", "changed")
            ]
        except UnwritableError as error:
            raise RefusedError("invalid", error.what, "", error.hint, error.problems) from None

    async def _write(self, keys: Sequence[str], then: Sequence[Put | Delete]) -> int:
        conditions = [ModRevisionEquals(_encoded(key), self._source.mod_revision(key)) for key in keys]
        revision = await self._asked(self._client.txn(conditions, then))
        if not revision:
            named = printable(keys[0]) if len(keys) == 1 else f"one of {len(keys)} keys"
            what = f"{named} was changed by somebody else meanwhile"
            why = "etcd holds another version than this host knew; nothing was stored"
            raise RefusedError("changed", what, why, "look at it, and say it again")
        return revision

    async def _asked(self, question: Awaitable[Answer]) -> Answer:
        try:
            return await question
        except EtcdError as error:
            raise refused_error(error) from None


def _encoded(key: str) -> bytes:
    """A key in the form of etcd: in keys read from etcd, bytes that are no UTF-8 are lone surrogates."""
    return key.encode(errors="surrogateescape")


def _order_value(order: Override) -> str:
    try:
        return override_value(order)
    except UnwritableError as error:
        raise RefusedError("internal", error.what, "", error.hint) from None


def refused_error(error: EtcdError) -> RefusedError:
    """Why etcd did not carry out the request."""
    why, _, hint = str(error).partition("; hint: ")
    what = "etcd did not take it"
    if isinstance(error, UnreachableError) and any(reason.sent for reason in error.reasons.values()):
        what = "etcd did not answer, and may have taken it or not"
        hint = hint or "look before you say it again"
    elif isinstance(error, RejectedError) and "too many operations" in error.message:
        hint = "change fewer services at once, or start etcd with a higher --max-txn-ops"
    return RefusedError("internal", what, why, hint)
