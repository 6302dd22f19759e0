"""Schedules deletions from the connection tracking table."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from vipd.dataplane.conntrack.checkpoint import GARBAGE, SavedTarget, SavedTargets, decode, encode, key_of
from vipd.dataplane.conntrack.cleaner import CleanupResult, Connect, clean
from vipd.dataplane.conntrack.entries import SocketAddress
from vipd.dataplane.conntrack.netlink import open_socket
from vipd.dataplane.conntrack.stale import (
    Destination,
    FlowTarget,
    FlowTargets,
    TablePart,
    TargetOf,
    default_target,
    destinations,
    table_part_of,
)
from vipd.host.observer import Observer
from vipd.model.forwarding import Forwarding, ForwardingKey
from vipd.model.service import Family, Protocol
from vipd.sources.cache import Cache

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 60.0
"""Between runs without a change."""
UNHURRIED_SECONDS = 5.0
"""From a change after which no flow should have to end to the next run: to read the kernel's table takes
milliseconds even if it is empty, several times what the change itself takes."""
KEEP_REMOVED_SECONDS = 60.0
"""How long flows to a removed frontend are searched for, counted from the write of the rules without it.
No new ones can begin then; this covers packets in transit, and a run that missed an entry."""

RESET_SECONDS = 600.0
"""How long packets of TCP flows to a removed frontend get a reset, counted from the same moment."""
MAX_RESETS = 10_000
"""Maximum number of removed frontends with resets; beyond it the earliest removed ones are dropped."""

MAX_REMOVED = 50_000
"""Removed destinations whose flows must still be ended. There may be more only while runs fail;
then the flows of the oldest are left to end by themselves."""
MAX_FORMER_BACKENDS = 10_000
"""Backends that a destination had since the last good run."""


class ConntrackScheduler(Observer):
    """Follows the forwardings and cleans after them.

    The caller calls `services_changed` whenever the dataplane is given the same, `applied` once the kernel's
    rules are as requested, and `clean` when `due`. Nothing is due between a change and `applied`: until then
    the old rules make the very flows that a run would end. A failed run stays due; when to try again is the
    caller's.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        interval: float = INTERVAL_SECONDS,
        connect: Connect = open_socket,
        target_of: TargetOf = default_target,
        cache: Cache | None = None,
    ) -> None:
        """`clock` returns monotonic seconds; `interval` is in seconds. The `cache` keeps the destinations and
        their backends for the next process."""
        self._clock, self._interval = clock, interval
        self._connect, self._target_of = connect, target_of
        self._bucket = cache.bucket("flow_target", encode, self._whole) if cache else None
        self._unsaved = set[Destination]()
        """Destinations whose flows may have to end, or had to, and which have changed."""
        self._destinations: dict[ForwardingKey, list[Destination]] = {}
        self._owners: dict[Destination, ForwardingKey] = {}
        self._targets: dict[Destination, FlowTarget] = {}
        self._kinds: Counter[TablePart] = Counter()
        """Number of targets by the part of the table in which their flows may have to end."""
        self._former: dict[Destination, frozenset[SocketAddress]] = {}
        """Backends that a destination had since the last good run."""
        self._removed: dict[Destination, float | None] = {}
        """When the rules without it were written; None: not yet."""
        self._resets: dict[Destination, float | None] = {}
        """The same for those whose clients get a reset."""
        self._host_addresses: frozenset[str] = frozenset()
        self._applied: frozenset[Family] = frozenset()
        """The address families whose rules match the updates."""
        self._told: set[Family] = set()
        """Those of which anything has changed since they were applied."""
        self._urgent: set[Family] = set()
        """Those of them in which flows may have to end for it."""
        self._changed = False
        self._next_run = clock()

    @property
    def flow_targets(self) -> FlowTargets:
        """The input for judging flows, of families whose rules are written. Later updates change its
        mapping."""
        parts = tuple(part for part in self._kinds if part.family in self._applied)
        return FlowTargets(self._targets, self._host_addresses, parts)

    def owner(self, destination: Destination) -> ForwardingKey | None:
        """The forwarding that has a destination; None if none has."""
        return self._owners.get(destination)

    def resets(self) -> tuple[Destination, ...]:
        """Removed TCP frontends of services with `on_remove: reset`. Their flows have been ended here, and
        without a rule a client that continues to send gets no answer."""
        return tuple(self._resets)

    @property
    def due(self) -> bool:
        """Whether `clean` should be called now."""
        written = self._applied.issuperset(Family) or any(p.family in self._applied for p in self._kinds)
        return written and (self._changed or self._clock() >= self._next_run)

    def services_changed(self, changes: Mapping[ForwardingKey, Forwarding | None]) -> None:
        """Add new forwardings, and remove those that are None: the same input as the dataplane's `update`."""
        if not changes:
            return
        self._applied -= {key.family for key in changes}
        self._told.update(key.family for key in changes)
        new = {key: destinations(f) for key, f in changes.items() if f is not None}
        # A run in progress reads the targets: one that stays must not be missing for a moment.
        staying = {place for places in new.values() for place in places}
        for key in changes:
            for place in self._destinations.pop(key, ()):
                if place not in staying and self._owners[place] == key:
                    self._remove(place)
        for key, forwarding in changes.items():
            if forwarding is not None:
                self._destinations[key] = new[key]
                self._add(key, self._target_of(forwarding))
        self._save()

    def host_changed(self, addresses: frozenset[str]) -> None:
        """This host's own addresses are these from now on."""
        if addresses != self._host_addresses:
            self._host_addresses, self._applied = addresses, frozenset()
            self._urgent.update(Family)

    async def load(self) -> None:
        """Read what an earlier process has kept. Called before the first update, so that rules of that which
        answer its clients are never missing."""
        rows, former = await asyncio.to_thread(self._bucket.load) if self._bucket else {}, SavedTargets()
        for key, text in rows.items():
            try:
                destination, saved = decode(key, text)
            except GARBAGE as error:
                log.warning("flows of a removed service may go on: %s", error)
                continue
            former[destination] = saved
        self._restore(former)

    def _restore(self, former: SavedTargets) -> None:
        """Schedule the cleaning of an earlier process's destinations, except those in use."""
        now = self._clock()
        self._urgent.update(place.family for place in former)
        for place, left in former.items():
            since = now if place.family in self._applied else None
            if place in self._targets:
                continue
            # A time in the future: the machine was restarted since.
            if place.protocol is Protocol.TCP and (left.since is None or now - left.since >= 0):
                self._reset(place, since if left.since is None else left.since)
            if left.backends:
                self._set_target(
                    place, FlowTarget(frozenset(), end_stale_flows=True, former_backends=left.backends)
                )
                self._former[place], self._removed[place] = left.backends, since
        self._expire_resets(now)
        self._save()

    def applied(self, wrote: bool, families: Collection[Family] = tuple(Family)) -> None:
        """The kernel's rules of these address families match the updates. Call it after every step.

        `wrote`: rules had to be written. If they were missing, flows from that time are not translated.
        """
        if self._applied.issuperset(families) and not wrote:
            return
        self._applied = self._applied.union(families)
        now = self._clock()
        # Written without a change: somebody had removed rules, and flows of that time are not translated.
        if not self._urgent.isdisjoint(families) or self._told.isdisjoint(families):
            self._changed = True
        else:
            self._next_run = min(self._next_run, now + UNHURRIED_SECONDS)
        self._told.difference_update(families)
        self._urgent.difference_update(families)
        for since in (self._removed, self._resets):
            for place in [place for place, at in since.items() if at is None and place.family in families]:
                since[place] = now
                if since is self._resets:
                    self._unsaved.add(place)
        self._save()

    async def clean(self) -> CleanupResult:
        """End flows that must end. Raises ConntrackError, and is then due again, as after a cancellation."""
        began, self._changed = self._clock(), False
        try:
            cleaned = await clean(self.flow_targets, self._connect)
        except BaseException:
            self._changed = True
            raise
        self._changed = self._changed or not cleaned.complete
        self._next_run = self._clock() + self._interval
        if cleaned.complete:
            self._expire(began)
        return cleaned

    def _save(self) -> None:
        """Keep what has changed for the next process."""
        if self._bucket is not None:
            self._bucket.put({key_of(place): self._saved_target(place) for place in self._unsaved})
        self._unsaved.clear()

    def _whole(self) -> dict[str, SavedTarget]:
        places = {**self._targets.copy(), **dict.fromkeys(self._resets.copy())}
        saved = ((place, self._saved_target(place)) for place in places)
        return {key_of(place): target for place, target in saved if target is not None}

    def _saved_target(self, place: Destination) -> SavedTarget | None:
        target, since = self._targets.get(place), self._resets.get(place)
        if target is not None and target.end_stale_flows:
            backends = frozenset(target.serving) | (target.former_backends or frozenset())
            if backends:
                return SavedTarget(backends, since)
        return SavedTarget(frozenset(), since) if target is None and place in self._resets else None

    def _add(self, key: ForwardingKey, target: FlowTarget) -> None:
        for place in self._destinations[key]:
            self._keep_former(place)
            if not _goes_on(self._targets.get(place), target):
                self._urgent.add(place.family)
            self._set_target(place, target)
            self._owners[place] = key
            self._removed.pop(place, None)
            if self._resets.pop(place, self) is not self:
                self._unsaved.add(place)

    def _remove(self, place: Destination) -> None:
        self._keep_former(place)
        self._owners.pop(place, None)
        ends_flows = self._targets[place].end_stale_flows
        if ends_flows:
            self._urgent.add(place.family)
        if ends_flows and self._former[place] and place.protocol is Protocol.TCP:
            self._reset(place, None)
        self._set_target(place, FlowTarget(frozenset(), ends_flows, self._former[place]))
        self._removed.pop(place, None)
        self._removed[place] = None
        while len(self._removed) > MAX_REMOVED:
            self._drop(next(iter(self._removed)))

    def _reset(self, place: Destination, since: float | None) -> None:
        """The clients of a removed destination get a reset."""
        self._resets.pop(place, None)
        self._resets[place] = since
        self._unsaved.add(place)
        if len(self._resets) > MAX_RESETS:
            oldest = next(iter(self._resets))
            del self._resets[oldest]
            self._unsaved.add(oldest)

    def _expire_resets(self, now: float) -> None:
        ended = [p for p, since in self._resets.items() if since is not None and now >= since + RESET_SECONDS]
        for place in ended:
            del self._resets[place]
        self._unsaved.update(ended)

    def _set_target(self, place: Destination, target: FlowTarget | None) -> None:
        """Set the target for flows to a destination; None: they no longer belong to vipd."""
        before = self._targets.get(place)
        if before != target and any(each is not None and each.end_stale_flows for each in (before, target)):
            self._unsaved.add(place)
        if before is not None and (kind := table_part_of(place, before)):
            self._kinds[kind] -= 1
            if not self._kinds[kind]:
                del self._kinds[kind]
        if target is None:
            del self._targets[place]
            return
        self._targets[place] = target
        if kind := table_part_of(place, target):
            self._kinds[kind] += 1

    def _keep_former(self, place: Destination) -> None:
        before = self._targets.get(place)
        if before is not None:
            known = self._former.get(place, frozenset())
            last = frozenset(before.serving) | (before.former_backends or frozenset())
            # The older ones are dropped if no run has succeeded for that long.
            self._former[place] = last if len(known | last) > MAX_FORMER_BACKENDS else known | last

    def _expire(self, began: float) -> None:
        """Drop what a successful run, begun then, has made unnecessary."""
        if self._applied and not self._changed:
            self._former = {
                place: former
                for place, former in self._former.items()
                if place in self._removed or place.family not in self._applied
            }
        self._expire_resets(began)
        for place, since in list(self._removed.items()):
            if since is not None and began >= since + KEEP_REMOVED_SECONDS:
                self._drop(place)
        self._save()

    def _drop(self, place: Destination) -> None:
        """A destination is not vipd's any more."""
        self._set_target(place, None)
        del self._removed[place], self._former[place]


def _goes_on(before: FlowTarget | None, after: FlowTarget) -> bool:
    """Whether no flow to a destination has to end for this change: it was served already, so that its flows
    are translated, and they may stay with their backends."""
    if before is None or before.former_backends is not None or not before.serving:
        return False
    lost = frozenset(before.serving) - frozenset(after.serving)
    same = before.end_stale_flows and before.allowed == after.allowed and not lost
    return same or not after.end_stale_flows
