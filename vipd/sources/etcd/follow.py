"""Services declared in etcd, one key each, followed as they change.

vipd lists the keys at a revision, watches from the next one on, and probes a watch that is silent: it may
fail silently (a frozen member, a cut cable, a member that lost its cluster). A probe every 30 seconds detects
that: it is a read that the watched member must answer, and that shows whether keys were written or counted
which the watch has not reported. Everything is listed anew every ten minutes.

Each key is a separate unit: one that cannot be accepted keeps its last good version, and does not block
others. The known state is also on disk, and serves at once after a start, whether etcd is reachable or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from heapq import nsmallest
from random import Random
from typing import NamedTuple

from vipd.declaration.problems import Declaration, printable
from vipd.declaration.unit import Unit
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.supervisor import Backoff, Loop, LoopState, Work, until_first_ends
from vipd.model import limits
from vipd.model.service import RegisteredBackend
from vipd.sources.cache import Cache, Value
from vipd.sources.etcd.client import EtcdClient, Event, Header, KeyValue, Page, Watch, in_thread_if_large
from vipd.sources.etcd.errors import CompactedError, EndpointError, EtcdError, TooLargeError
from vipd.sources.etcd.keys import EtcdKeys, StoreChange, StoredKey
from vipd.sources.etcd.values import REFUSED, FolderBudget, Layout, ParsedValue, read_value, short_key
from vipd.sources.removal_guard import RemovalGuard

log = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
GRACE_SECONDS = 5.0
"""For a watch to report what a probe has seen."""
RELIST_SECONDS = 600.0


_ABOUT_KEY = ""
"""Beside the keys of etcd."""
_GARBAGE = (LookupError, TypeError, ValueError, OverflowError, RecursionError)


class _Known(NamedTuple):
    """What the kept keys are: those of a prefix, at one revision of one store."""

    prefix: str
    cluster: str
    revision: int


class RelistError(EtcdError):
    """The known state cannot be continued: the store is another one, or changes were missed."""


class EtcdSource:
    """The services in etcd. `load` first, then its loops beside the daemon, and `close` after them."""

    name = "etcd"
    writes = False

    def __init__(self, settings: EtcdSettings, cache: Cache, client: EtcdClient, random: Random) -> None:
        self._settings, self._client, self._random = settings, client, random
        self._layout = Layout(settings.prefix)
        self._cached = cache.bucket("etcd", _encode, self._whole)
        guard = RemovalGuard(settings.max_removal, author_of=self._layout.folder)
        self.keys = EtcdKeys(self._layout, guard, self._note)
        """The keys as last known."""
        self._changed, self._listed = asyncio.Event(), asyncio.Event()
        self._positions: dict[str, int] = {}
        """For each followed prefix the revision up to which it is known; empty: list anew."""
        self._lock = asyncio.Lock()
        """Held from the comparison of a change with the keys until it is applied."""
        self._budget = FolderBudget(self._layout)
        self._state = LoopState(Backoff(0.2, 30.0, jitter=0.5), reported_elsewhere=True)
        self._endpoint = ""
        """The watched member; empty while there is none."""
        self._last_contact: float | None = None
        """When the keys were last known to equal the store's, by the loop's clock."""
        self._store_revision = 0
        """The newest revision that any answer has reported."""

    @property
    def location(self) -> str:
        """The endpoints and the prefix."""
        return f"{', '.join(self._settings.endpoints)} {self._settings.prefix}"

    def load(self) -> None:
        """Load the state that an earlier run saved, if it had the same prefix. Blocks."""
        rows = self._cached.load()
        if not rows:
            return
        try:
            about = _Known(*json.loads(rows.pop(_ABOUT_KEY)))
            keys = {key: _decode(text) for key, text in rows.items()}
        except _GARBAGE as error:
            log.warning("the kept keys of etcd cannot be read: %s; etcd is asked for all of them", error)
            self._cached.clear()
            return
        if about.prefix == self._settings.prefix:
            self.keys.restore(about.cluster, about.revision, keys)
        else:
            self._cached.clear()

    def _about(self) -> _Known:
        return _Known(self._settings.prefix, self.keys.cluster, self.keys.revision)

    def _note(self, changes: Mapping[str, StoredKey | None]) -> None:
        self._cached.put({**changes, _ABOUT_KEY: self._about()})

    def _whole(self) -> dict[str, StoredKey | _Known]:
        # A copy in one step: this runs in a thread.
        return {**self.keys.kept.copy(), _ABOUT_KEY: self._about()}

    def loops(self) -> dict[str, Work]:
        """The loop that follows etcd. Its failures are among `faults`."""
        return {"following etcd": Loop(self._follow, self._state)}

    async def changes(self) -> AsyncIterator[None]:
        """Yields whenever the units or the registrations have changed. For one reader."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield

    async def wait_ready(self, timeout: float, *, answer: bool = False) -> bool:
        """Wait until there is a state, from disk or from etcd; False if there is none in time. `answer`: wait
        for that of etcd; one from disk serves if it does not come in time."""
        if answer or not self.keys.cluster:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._listed.wait(), timeout)
        return self._listed.is_set() or bool(self.keys.cluster)

    @property
    def fault(self) -> str:
        """Why etcd cannot be followed; empty while it is."""
        return self._state.fault

    def units(self) -> Mapping[str, Unit]:
        """One unit a key, named `etcd:KEY`."""
        return self.keys.units

    def faults(self) -> tuple[str, ...]:
        """Set while etcd cannot be followed, or removals are held."""
        known = any(unit.accepted.services for unit in self.keys.units.values())
        kept = "the last known services go on serving" if known else "no service of it is known"
        lost = self.fault and f"{self.fault}; {kept}"
        return tuple(filter(None, (lost, self._held())))

    def held(self) -> Mapping[str, str]:
        """The held keys, as owners of services."""
        return {f"etcd:{printable(key)}": "its key is gone" for key in self.keys.held}

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Save these versions as the ones to fall back to."""
        self.keys.accept(chosen)

    def accept_removal(self) -> int:
        """Remove all held keys; returns their number."""
        released = self.keys.accept_removal()
        if released:
            self._changed.set()
        return released

    @property
    def registrations(self) -> Mapping[str, tuple[RegisteredBackend, ...]]:
        """Backends that registered themselves, by the name of their service, each list in order of its keys.

        Unchanged lists are the same object.
        """
        return self.keys.registrations

    def status(self) -> dict[str, object]:
        """The part of the API's Status.

        `endpoint`: the watched member; empty while there is none. `applied_revision`: the store's revision up
        to which everything is known; 0: none in this run. `lag`: seconds since the keys were last known to
        equal the store's; None: never in this run. `rejected`: keys of services whose current value does not
        serve. `held`: keys that are gone from the store and continue to serve.
        """
        last = self._last_contact
        return {
            "endpoint": self._endpoint,
            "connected": bool(self._endpoint) and not self.fault,
            "applied_revision": max(self._positions.values(), default=0),
            "store_revision": self._store_revision,
            "last_change": self.keys.last_change,
            "lag": None if last is None else round(asyncio.get_running_loop().time() - last, 1),
            "keys": len(self.keys.kept),
            "rejected": tuple(map(printable, sorted(self.keys.rejected))),
            "held": tuple(map(printable, sorted(self.keys.held))),
            "fault": self.fault,
            "prefix": self._settings.prefix,
        }

    def _held(self) -> str:
        held = self.keys.held
        if not held:
            return ""
        names = ", ".join(map(printable, nsmallest(3, held))) + (", ..." if len(held) > 3 else "")
        why = f"more than {self._settings.max_removal}% of the services of their folder at once"
        if self.keys.store_replaced:
            why = "the store is another one than before, or an older state of it"
        return (
            f"{len(held)} keys are gone from etcd and go on serving: {why} ({names}); "
            "hint: write them again, or vipctl accept-removal"
        )

    async def _follow(self) -> None:
        """Follow until that fails. Raises EtcdError; run it again then."""
        try:
            if not self._positions:
                await self._list()
            async with contextlib.AsyncExitStack() as stack:
                watches = {
                    prefix: await stack.enter_async_context(self._client.watch(prefix, position + 1))
                    for prefix, position in self._positions.items()
                }
                # If one watch has another member than the rest, the first probe detects it.
                self._endpoint = next(iter(watches.values())).endpoint
                work = [asyncio.create_task(self._probe_periodically([*watches.values()]))]
                work += [asyncio.create_task(self._read(*item)) for item in watches.items()]
                await until_first_ends(work)
        except (CompactedError, RelistError, TooLargeError):
            self._positions.clear()
            raise
        except EndpointError:
            self._client.mark_failed(self._endpoint)
            raise
        finally:
            self._endpoint = ""

    async def _read(self, prefix: str, watch: Watch) -> None:
        async for revision, events in watch.events:
            self._store_revision = max(self._store_revision, revision)
            await self._on_events(prefix, events)

    async def _on_events(self, prefix: str, events: Sequence[Event]) -> None:
        """Apply the changes that a watch reports, of several revisions only the outcome."""
        async with self._lock:
            fresh = [event for event in events if event.kv.mod_revision > self._positions[prefix]]
            if not fresh:
                return
            first = {short_key(event.kv.key): event for event in reversed(fresh)}
            last = {short_key(event.kv.key): event for event in fresh}
            existed = {
                key: event.deleted or event.kv.create_revision < event.kv.mod_revision
                for key, event in first.items()
            }
            removed = frozenset(key for key, event in last.items() if event.deleted)
            for key in removed:  # first: they make room
                self._budget.remove(key, self.keys.stored(key), existed[key])
            shortened = [
                self._budget.shortened(event.kv, self.keys.stored(key), existed[key])
                for key, event in last.items()
                if not event.deleted
            ]
            written = [kv for kv in shortened if kv is not None]
            if self._budget.size > limits.ETCD_BYTES or len(self.keys.kept) > limits.ETCD_KEYS:
                # A listing reports the problem.
                raise RelistError("the keys together are larger than what is followed")
            revision = max(event.kv.mod_revision for event in fresh)
            await self._apply(Header(self.keys.cluster, revision), written, removed)
            self._positions[prefix] = revision

    async def _probe_periodically(self, watches: Sequence[Watch]) -> None:
        """Probe at once, because a watch of a future revision is silent, and then from time to time."""
        clock = asyncio.get_running_loop().time
        listed = clock()
        while True:
            behind = await self._lagging(watches)
            if behind:
                await asyncio.sleep(GRACE_SECONDS)
                if behind.items() & (await self._lagging(watches)).items():
                    self._client.mark_failed(self._endpoint)
                    raise RelistError(f"a watch at {self._endpoint} does not tell what is written")
            self._state.clear_fault()
            await asyncio.sleep(PROBE_SECONDS * self._random.uniform(0.8, 1.0))
            if clock() - listed >= RELIST_SECONDS:
                await self._list()
                listed = clock()

    async def _lagging(self, watches: Sequence[Watch]) -> dict[str, int]:
        """The prefixes that differ from what was reported, each with the last reported revision."""
        oldest, newest = min(self._positions.values()), max(self._positions.values())
        # In a wiped store that has grown past its former revision, only what is known tells the difference.
        sample = next(reversed(self.keys.kept), "")
        *pages, of_sample = await self._client.changed_since(self._layout.followed, oldest, sample)
        header = of_sample.header
        if header.cluster != self.keys.cluster:
            raise RelistError(f"cluster {header.cluster} answers, and not {self.keys.cluster}")
        if header.revision < newest:
            raise RelistError(f"the store went back from revision {newest} to {header.revision}")
        for watch in watches:
            if watch.endpoint != self._client.endpoint:
                raise EndpointError(f"{watch.endpoint} does not answer")
        behind = {}
        async with self._lock:
            for prefix, page in zip(self._layout.followed, pages, strict=True):
                position = self._positions[prefix]
                if self._lags(prefix, page) or (
                    sample.startswith(prefix) and self._disagrees(sample, of_sample)
                ):
                    behind[prefix] = position
                else:
                    # Keys that were added and deleted in between make no difference, and are skipped when
                    # reported.
                    self._positions[prefix] = max(position, header.revision)
        if not behind:
            self._contact(header)
        return behind

    def _lags(self, prefix: str, page: Page) -> bool:
        known = self.keys.count(prefix) + self._budget.left_out(prefix)
        newer = any(kv.mod_revision > self._positions[prefix] for kv in page.kvs)
        return newer or page.count != known

    def _disagrees(self, key: str, page: Page) -> bool:
        revisions = [kv.mod_revision for kv in page.kvs] or [0]
        return "\0" not in key and revisions != [self.keys.mod_revision(key)]

    async def _list(self) -> None:
        """Read the whole store at one revision."""
        positions = dict(self._positions)
        before = max(positions.values(), default=self.keys.revision)
        known = [key for key, stored in self.keys.kept.items() if not stored.held]
        budget = await asyncio.to_thread(FolderBudget, self._layout, known)
        listing = await self._client.list_keys(self._layout.followed, budget.shortened)
        header = listing.header
        replaced = bool(self.keys.cluster) and header.cluster != self.keys.cluster
        replaced = replaced or header.revision < before
        async with self._lock:
            if not replaced and header.revision < max(self._positions.values(), default=0):
                return  # the watch has reported more in the meantime
            written, removed = await self._difference(listing.kvs)
            if replaced or await self._has_other_history(written, removed):
                replaced, written = True, listing.kvs
            await self._apply(header, written, removed, replaced)
            self._positions = dict.fromkeys(self._layout.followed, header.revision)
            budget.listed(removed)
            self._budget = budget
        missed = [kv.key for kv in written if kv.mod_revision <= min(positions.values(), default=0)]
        if missed and not replaced:
            log.warning("the watch of etcd had missed %d keys, such as %s", len(missed), printable(missed[0]))
        self._listed.set()
        self._contact(header)

    async def _difference(self, listed: Sequence[KeyValue]) -> tuple[Sequence[KeyValue], frozenset[str]]:
        """The listed keys that differ from the known ones, and the known ones that are gone."""
        kept = dict(self.keys.kept)  # removals may be accepted concurrently

        def compare() -> tuple[list[KeyValue], frozenset[str]]:
            written = [kv for kv in listed if _differs(kept.get(kv.key), kv)]
            gone = kept.keys() - {kv.key for kv in listed}
            return written, frozenset(key for key in gone if not kept[key].held)

        return await in_thread_if_large(len(listed) * 1000, compare)

    async def _has_other_history(self, written: Sequence[KeyValue], removed: Collection[str]) -> bool:
        """Whether the store has another history than the known one: a backup was restored, and then written
        past its former revision. Raises EtcdError.

        Existing keys are compared with their known state; of the deleted ones the newest is read
        at the revision at which it was written. If that was compacted, its history is unknown.
        """
        revision_of = self.keys.mod_revision
        if any(kv.mod_revision < revision_of(kv.key) for kv in written):
            return True
        # A shortened key is in no store.
        newest = max((key for key in removed if "\0" not in key), key=revision_of, default="")
        revision = revision_of(newest)
        try:
            kv = await self._client.get(newest, revision) if newest else None
        except CompactedError:
            return False
        return bool(newest) and (kv is None or kv.mod_revision != revision)

    async def _apply(
        self, header: Header, written: Sequence[KeyValue], removed: frozenset[str], replaced: bool = False
    ) -> None:
        """Apply a change up to a revision; its values are read in a thread if they are many."""
        layout = self._layout

        def read() -> dict[KeyValue, ParsedValue]:
            return {kv: read_value(layout, kv.key, kv.value) for kv in written}

        # YAML takes six times as long to read as JSON does.
        size = sum(2500 + 6 * len(kv.value) for kv in written)
        parsed = await in_thread_if_large(size, read)
        change = StoreChange(header.cluster, header.revision, parsed, removed, replaced)
        if self.keys.apply(change, asyncio.get_running_loop().time()):
            self._changed.set()

    def _contact(self, header: Header) -> None:
        self._store_revision = header.revision
        self._last_contact = asyncio.get_running_loop().time()


def _encode(value: StoredKey | _Known) -> str:
    if isinstance(value, StoredKey):
        fields = (value.value, value.mod_revision, value.accepted, value.held, value.create_revision)
        return json.dumps(fields, separators=(",", ":"))
    return json.dumps(value)


def _decode(text: Value) -> StoredKey:
    """Raises one of _GARBAGE."""
    value, mod_revision, accepted, held, create_revision = json.loads(text)
    if not isinstance(value, str) or not isinstance(accepted, str | None):
        raise TypeError("a value is no text")
    return StoredKey(value, int(mod_revision), accepted, bool(held), int(create_revision))


def _differs(known: StoredKey | None, kv: KeyValue) -> bool:
    """Whether a listed key differs from its known state."""
    if known is None or known.held:
        return True
    if (known.mod_revision, known.create_revision) != (kv.mod_revision, kv.create_revision):
        return True
    return known.value.startswith(REFUSED) and known.value != kv.value
