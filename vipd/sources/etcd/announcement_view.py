"""The keys by which hosts agree on who answers for addresses of a LAN, followed and written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from vipd.host.supervisor import Backoff, LoopState
from vipd.sources.etcd.announcement_keys import AnnouncementKeys, read_candidate, read_holder
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.election import Candidate, Holding, View
from vipd.sources.etcd.messages import Delete, KeyRange, KeyValue, ModRevisionEquals, Put

RELIST_SECONDS = 10.0
"""A watch can fall silent without an error; the keys are few."""


class AnnouncementView:
    """All hosts' candidacies and holdings. `changed` is called after each difference."""

    def __init__(self, client: EtcdClient, prefix: str, changed: Callable[[], None]) -> None:
        self.keys = AnnouncementKeys(prefix)
        self._client, self._changed = client, changed
        self._holders: dict[str, Holding] = {}
        self._candidates: dict[str, Candidate] = {}
        self.listed = False
        """The keys were listed in this run of the daemon."""
        self.loop_state = LoopState(Backoff(0.2, 2.0, jitter=0.5), reported_elsewhere=True)
        """How the loop is run, and its state."""

    @property
    def view(self) -> View:
        """The keys as last known."""
        return View(dict(self._holders), dict(self._candidates))

    async def run(self) -> None:
        """Follow until that fails. Raises EtcdError; run it again then, with `loop_state`."""
        while True:
            revision = await self._list()
            self.loop_state.clear_fault()
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(RELIST_SECONDS),
                    self._client.watch(self.keys.all, revision + 1) as watch,
                ):
                    async for batch in watch:
                        for event in batch.events:
                            self._put(event.kv, event.deleted)
                        if batch.events:
                            self._changed()

    async def claim(self, address: str, value: bytes, lease: int, mod_revision: int) -> bool:
        """Become the holder if the key is still at this revision; 0: if it does not exist. Raises
        EtcdError."""
        key = self.keys.address(address)
        done = await self._client.txn([ModRevisionEquals(key, mod_revision)], [Put(key, value, lease)])
        if done:
            self._put(KeyValue(key, value, done, lease=lease))
        return bool(done)

    async def hand_over(self, address: str, held: Holding, to: Candidate, value: bytes) -> bool:
        """Make a candidate the holder, under its own lease, if both keys are unchanged. Raises EtcdError."""
        key = self.keys.address(address)
        conditions = [
            ModRevisionEquals(key, held.mod_revision),
            ModRevisionEquals(self.keys.host(to.host), to.mod_revision),
        ]
        done = await self._client.txn(conditions, [Put(key, value, to.lease)])
        if done:
            self._put(KeyValue(key, value, done, lease=to.lease))
        return bool(done)

    async def release(self, address: str, held: Holding) -> bool:
        """Delete the key of an address, if it is unchanged. Raises EtcdError."""
        key = self.keys.address(address)
        done = await self._client.txn([ModRevisionEquals(key, held.mod_revision)], [Delete(KeyRange(key))])
        if done:
            self._holders.pop(address, None)
        return bool(done)

    async def refresh(self, addresses: Collection[str]) -> None:
        """Read the keys of these addresses now. Raises EtcdError."""
        for address in sorted(addresses):
            found = await self._client.get(self.keys.address(address))
            if found is None:
                self._holders.pop(address, None)
            else:
                self._put(found)

    async def publish(self, host: str, value: bytes, lease: int) -> None:
        """Write the candidacy of this host. Raises EtcdError."""
        await self._client.put(self.keys.host(host), value, lease)

    async def _list(self) -> int:
        found = await self._client.list([self.keys.all])
        before = self._holders, self._candidates
        self._holders, self._candidates = {}, {}
        for kv in found.kvs:
            self._put(kv)
        first, self.listed = not self.listed, True
        if first or before != (self._holders, self._candidates):
            self._changed()
        return found.header.revision

    def _put(self, kv: KeyValue, deleted: bool = False) -> None:
        if kv.key.startswith(self.keys.hosts.encode()):
            candidate = read_candidate(self.keys, kv)
            if deleted:
                self._candidates.pop(candidate.host, None)
            else:
                self._candidates[candidate.host] = candidate
        elif found := read_holder(self.keys, kv):
            address, holding = found
            known = self._holders.get(address)
            if known is not None and known.mod_revision > kv.mod_revision:
                return  # written by this host meanwhile
            if deleted:
                self._holders.pop(address, None)
            else:
                self._holders[address] = holding
