"""Services declared in etcd, one key each, followed as they change.

Each key is a separate unit: one that cannot be accepted keeps its last good version, and does not block
others. The known state is also on disk, and serves at once after a start, whether etcd is reachable or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from random import Random

from vipd.declaration.problems import Declaration, printable
from vipd.declaration.unit import Unit
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.supervisor import Loop, Work
from vipd.model.service import RegisteredBackend
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.keys import EtcdKeys
from vipd.sources.etcd.list_watcher import ListWatcher, WatchIntervals
from vipd.sources.etcd.snapshot_file import SnapshotFile, SnapshotState
from vipd.sources.etcd.values import Layout
from vipd.sources.removal_guard import RemovalGuard

SNAPSHOT = Path("etcd") / "snapshot"


@dataclass(frozen=True, slots=True)
class EtcdState:
    """The state of the source for status."""

    endpoint: str
    """The watched member; empty while there is none."""
    connected: bool
    applied_revision: int
    """The revision up to which the store is known; 0: none in this run."""
    store_revision: int
    """The newest known revision."""
    last_change: int
    """Revision of the newest change of a followed key."""
    lag: float | None
    """Seconds since the keys were last known to equal the store's; None: never in this run."""
    keys: int
    rejected: tuple[str, ...]
    """Keys of services whose current value does not serve."""
    held: tuple[str, ...]
    """Keys that are gone from the store and continue to serve."""
    fault: str


class EtcdSource:
    """The services in etcd. `load` first, then its loops beside the daemon, and `close` after them."""

    name = "etcd"
    writes = False

    def __init__(
        self,
        settings: EtcdSettings,
        state_dir: Path,
        client: EtcdClient,
        random: Random,
        times: WatchIntervals | None = None,
    ) -> None:
        self._settings = settings
        layout = Layout(settings.prefix)
        self._snapshot = SnapshotFile(state_dir / SNAPSHOT, settings.prefix, self._state_on_disk)
        guard = RemovalGuard(settings.max_removal, author_of=layout.folder)
        self._keys = EtcdKeys(layout, guard, self._snapshot.enqueue)
        self._follower = ListWatcher(
            client, self._keys, layout, self._wake, random, times or WatchIntervals()
        )
        self._changed = asyncio.Event()

    @property
    def location(self) -> str:
        """The endpoints and the prefix."""
        return f"{', '.join(self._settings.endpoints)} {self._settings.prefix}"

    def load(self) -> None:
        """Load the state that an earlier run saved."""
        self._keys.restore(self._snapshot.load())

    def loops(self) -> dict[str, Work]:
        """The loops that follow etcd and save its state. Their failures are among `faults`."""
        return {
            "keeping etcd's keys": Loop(self._snapshot.run, self._snapshot.loop_state),
            "following etcd": Loop(self._follower.run, self._follower.loop_state),
        }

    def close(self) -> None:
        """Save what is not yet on disk. Blocks."""
        self._snapshot.close()

    async def changes(self) -> AsyncIterator[None]:
        """Yields whenever the units or the registrations have changed. For one reader."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield

    async def wait_ready(self, timeout: float) -> bool:
        """Wait until there is a state, from disk or from etcd; False if there is none in time."""
        if self._keys.cluster:
            return True
        try:
            await asyncio.wait_for(self._follower.listed.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def units(self) -> Mapping[str, Unit]:
        """One unit a key, named `etcd:KEY`."""
        return self._keys.units

    def faults(self) -> tuple[str, ...]:
        """Set while etcd cannot be followed, removals are held, or the disk cannot be written."""
        fault = self._follower.loop_state.fault
        known = any(unit.accepted.services for unit in self._keys.units.values())
        kept = "the last known services go on serving" if known else "no service of it is known"
        lost = fault and f"{fault}; {kept}"
        return tuple(filter(None, (lost, self._held(), self._snapshot.loop_state.fault)))

    def held(self) -> Mapping[str, str]:
        """The held keys, as owners of services."""
        return {f"etcd:{printable(key)}": "its key is gone" for key in self._keys.held}

    def save_accepted(self, chosen: Mapping[str, Declaration]) -> None:
        """Save these versions as the ones to fall back to."""
        self._keys.accept(chosen)

    def accept_removal(self) -> int:
        """Remove all held keys; returns their number."""
        released = self._keys.accept_removal()
        if released:
            self._wake()
        return released

    @property
    def registrations(self) -> Mapping[str, tuple[RegisteredBackend, ...]]:
        """Backends that registered themselves, by the name of their service, each list in order of its keys.

        Unchanged lists are the same object.
        """
        return self._keys.registrations

    def take_changed(self) -> set[str]:
        """The services whose declaration or registrations changed since the last call."""
        return self._keys.take_changed()

    @property
    def overrides(self) -> Mapping[str, str]:
        """Values below `overrides/` by the rest of their key, unread."""
        return self._keys.overrides()

    def mod_revision(self, key: str) -> int:
        """Revision at which a key was last written, as far as is known; 0: it is not in the store."""
        kept = self._keys.kept.get(key)
        return 0 if kept is None or kept.held else kept.mod_revision

    @property
    def connected(self) -> bool:
        """Whether etcd is followed now, as far as is known."""
        return bool(self._follower.endpoint) and not self._follower.loop_state.fault

    @property
    def applied_revision(self) -> int:
        """The store's revision up to which everything is known; 0: none in this run."""
        return self._follower.applied_revision

    @property
    def last_change(self) -> int:
        """Revision of the newest known change; keys that are not followed do not affect it."""
        return self._keys.last_change

    @property
    def lag(self) -> float | None:
        """Seconds since the keys were last known to equal the store's; None: never in this run."""
        last = self._follower.last_contact
        return None if last is None else asyncio.get_running_loop().time() - last

    def state(self) -> EtcdState:
        """Everything that status shows."""
        return EtcdState(
            self._follower.endpoint,
            self.connected,
            self.applied_revision,
            self._follower.store_revision,
            self.last_change,
            self.lag,
            len(self._keys.kept),
            tuple(map(printable, sorted(self._keys.rejected))),
            tuple(map(printable, sorted(self._keys.held))),
            self._follower.loop_state.fault,
        )

    def _held(self) -> str:
        held = self._keys.held
        if not held:
            return ""
        names = ", ".join(map(printable, nsmallest(3, held))) + (", ..." if len(held) > 3 else "")
        why = f"more than {self._settings.max_removal}% of the services of their folder at once"
        if self._keys.store_replaced:
            why = "the store is another one than before, or an older state of it"
        return (
            f"{len(held)} keys are gone from etcd and go on serving: {why} ({names}); "
            "hint: write them again, or vipctl accept-removal"
        )

    def _state_on_disk(self) -> SnapshotState:
        return self._keys.state()

    def _wake(self) -> None:
        self._changed.set()
