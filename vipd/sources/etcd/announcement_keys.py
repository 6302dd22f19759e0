"""The keys by which hosts agree on who answers for addresses of a LAN, followed and written.

`PREFIXannounce/addresses/ADDRESS` names the holder, `PREFIXannounce/hosts/NAME` what a host could hold. Both
have the lease of the host that they name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Collection
from ipaddress import ip_address
from typing import Any

from vipd.declaration.bounded_json import read_json
from vipd.declaration.problems import printable
from vipd.host.supervisor import Backoff, LoopState
from vipd.sources.etcd.client import EtcdClient, KeyValue
from vipd.sources.etcd.election import Candidate, Holding, View

RELIST_SECONDS = 10.0
"""A watch can fall silent without an error; the keys are few."""
MAX_HOLDER_BYTES = 2048
MAX_CANDIDATE_BYTES = 2**18
MAX_ADDRESSES = 5_000
"""Of one host: some 100 kB."""
MAX_OTHERS = 100
"""Hardware addresses, and own addresses, of one host."""
_MAX_NAME = 253
_HARDWARE = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


class AnnouncementKeys:
    """All hosts' candidacies and holdings. `changed` is called after each difference."""

    def __init__(self, client: EtcdClient, prefix: str, changed: Callable[[], None]) -> None:
        self._client, self._changed = client, changed
        self._prefix = f"{prefix}announce/"
        self._addresses, self._hosts = f"{self._prefix}addresses/", f"{self._prefix}hosts/"
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
                    self._client.watch(self._prefix, revision + 1) as watch,
                ):
                    async for events in watch:
                        for event in events:
                            self._put(event.kv, event.deleted)
                        if events:
                            self._changed()

    async def claim(self, address: str, value: str, lease: int, mod_revision: int) -> None:
        """Become the holder if the key is still at this revision; 0: if it does not exist. Raises
        EtcdError."""
        await self._hold(address, {self._key(address): mod_revision}, value, lease)

    async def hand_over(self, address: str, held: Holding, to: Candidate, value: str) -> bool:
        """Make a candidate the holder, under its own lease, if both keys are unchanged. Raises EtcdError."""
        unchanged = {
            self._key(address): held.mod_revision,
            f"{self._hosts}{to.host}": to.mod_revision,
        }
        return await self._hold(address, unchanged, value, to.lease)

    async def release(self, address: str, held: Holding) -> bool:
        """Delete the key of an address, if it is unchanged. Raises EtcdError."""
        key = self._key(address)
        done = await self._client.txn({key: held.mod_revision}, deletes=[key])
        if done:
            self._holders.pop(address, None)
        return bool(done)

    async def refresh(self, addresses: Collection[str]) -> None:
        """Read the keys of these addresses now. Raises EtcdError."""
        for address in sorted(addresses):
            kv = await self._client.get(self._key(address))
            if kv is None:
                self._holders.pop(address, None)
            else:
                self._put(kv)

    async def publish(self, host: str, value: str, lease: int) -> None:
        """Write the candidacy of this host. Raises EtcdError."""
        await self._client.put(f"{self._hosts}{host}", value, lease)

    async def _hold(self, address: str, unchanged: dict[str, int], value: str, lease: int) -> bool:
        key = self._key(address)
        revision = await self._client.txn(unchanged, {key: (value, lease)})
        if revision:
            self._put(KeyValue(key, value, revision, lease=lease))
        return bool(revision)

    async def _list(self) -> int:
        listing = await self._client.list_keys([self._prefix])
        before = self._holders, self._candidates
        self._holders, self._candidates = {}, {}
        for kv in listing.kvs:
            self._put(kv)
        first, self.listed = not self.listed, True
        if first or before != (self._holders, self._candidates):
            self._changed()
        return listing.header.revision

    def _put(self, kv: KeyValue, deleted: bool = False) -> None:
        if kv.key.startswith(self._hosts):
            host = printable(kv.key.removeprefix(self._hosts))
            self._candidates.pop(host, None)
            if not deleted:
                self._candidates[host] = read_candidate(host, kv)
            return
        try:
            address = str(ip_address(kv.key.removeprefix(self._addresses)))
        except ValueError:
            return
        known = self._holders.get(address)
        if self._key(address) != kv.key or (known is not None and known.mod_revision > kv.mod_revision):
            return  # another way to write it, or written by this host meanwhile
        self._holders.pop(address, None)
        if not deleted:
            self._holders[address] = read_holder(kv)

    def _key(self, address: str) -> str:
        return f"{self._addresses}{address}"


def holder_value(host: str, instance: str, since: str, previous: str = "") -> str:
    """The value of an address's key."""
    value = {"host": host, "since": since, "instance": instance}
    return json.dumps({**value, **({"previous": previous} if previous else {})})


def read_holder(kv: KeyValue) -> Holding:
    """A value that cannot be read is a holder without a name: the key is there, so nobody may take the
    address."""
    try:
        value = read_json(kv.value, MAX_HOLDER_BYTES)
        host, since, previous, instance = (
            _short(value.get(name, "")) for name in ("host", "since", "previous", "instance")
        )
    except (ValueError, AttributeError):
        host = since = previous = instance = ""
    return Holding(host, kv.lease, kv.mod_revision, since, previous, instance)


def candidate_value(
    addresses: Collection[str], hardware: Collection[str], own: Collection[str], instance: str
) -> str:
    """The value of a host's key."""
    listed = sorted(addresses)[:MAX_ADDRESSES]
    return json.dumps(
        {"addresses": listed, "hardware": sorted(hardware), "own": list(own), "instance": instance}
    )


def read_candidate(host: str, kv: KeyValue) -> Candidate:
    """What a host published; one that cannot be read is a candidate for nothing."""
    try:
        value = read_json(kv.value, MAX_CANDIDATE_BYTES)
        addresses = frozenset(str(ip_address(a)) for a in _texts(value, "addresses", MAX_ADDRESSES))
        hardware = frozenset(h for h in _texts(value, "hardware", MAX_OTHERS) if _HARDWARE.fullmatch(h))
        own = tuple(str(ip_address(a)) for a in _texts(value, "own", MAX_OTHERS))
        instance = _short(value.get("instance", ""))
    except (ValueError, AttributeError) as error:
        return Candidate(host, kv.lease, kv.mod_revision, frozenset(), fault=printable(str(error)))
    return Candidate(host, kv.lease, kv.mod_revision, addresses, hardware, own, instance)


def _texts(value: dict[str, Any], name: str, most: int) -> list[str]:
    texts = value.get(name, [])
    if not isinstance(texts, list) or len(texts) > most or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is no list of at most {most} texts")
    return texts


def _short(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_NAME or not value.isprintable():
        raise ValueError("a name is too long, or no text")
    return value
