"""A source that follows a real etcd, with as much of the daemon around it as tells it what serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from vipd.control.catalog import merge
from vipd.host.settings.etcd import EtcdSettings
from vipd.host.supervisor import Supervisor
from vipd.model.service import Service
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError
from vipd.sources.etcd.list_watcher import WatchIntervals
from vipd.sources.etcd.source import EtcdSource

FAST = WatchIntervals(probe=0.3, grace=0.3, relist=3600.0, initial_backoff=0.05, max_backoff=0.3)
PREFIX = "/vipd/v1/"


def key(name: str) -> str:
    return f"{PREFIX}services/{name}"


def value(number: int, backend: str = "10.244.0.5") -> str:
    """A service with an address of its own."""
    address = f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}"
    return f"address: {address}\nports: 80\nbackends: [{backend}]\n"


def values(count: int) -> dict[str, str]:
    return {key(f"s{n:03}"): value(n) for n in range(1, count + 1)}


class Following:
    """What the daemon would know."""

    def __init__(self, source: EtcdSource, client: EtcdClient) -> None:
        self.source, self.client = source, client
        self.services: dict[str, Service] = {}
        self.problems: list[str] = []
        self.seen: list[frozenset[tuple[str, str]]] = []
        """Name and first backend of every service after each step."""

    def step(self) -> None:
        merged = merge(self.source.units())
        self.source.save_accepted(merged.chosen)
        self.services = dict(merged.services)
        self.problems = [str(p) for found in merged.problems.values() for p in found]
        self.seen.append(frozenset((n, s.backends[0].address) for n, s in merged.services.items()))

    async def steps(self) -> None:
        async for _ in self.source.changes():
            self.step()

    def names(self) -> set[str]:
        return set(self.services)

    def backend(self, name: str) -> str:
        """The first backend of a service; empty without such a service."""
        return self.services[name].backends[0].address if name in self.services else ""

    async def until(self, true: Callable[[], object], what: str, seconds: float = 90.0) -> None:
        """Wait for something; fail with all that is known."""
        end = asyncio.get_running_loop().time() + seconds
        while not true():
            assert asyncio.get_running_loop().time() < end, f"{what}: {self.source.state()} {self.problems}"
            await asyncio.sleep(0.01)


@asynccontextmanager
async def following(
    urls: tuple[str, ...],
    state_dir: Path,
    times: WatchIntervals = FAST,
    settings: EtcdSettings | None = None,
    timeout: float = 30.0,
) -> AsyncIterator[Following]:
    """A source at work; stopped as the daemon stops it."""
    chosen = settings or EtcdSettings(urls, timeout=timeout)
    client = EtcdClient(chosen, Random(3))
    source = EtcdSource(chosen, state_dir, client, Random(4), times)
    source.load()
    made = Following(source, client)
    made.step()
    supervisor = Supervisor((EtcdError,))
    loops = source.loops().items()
    work: list[asyncio.Task[Any]] = [asyncio.create_task(supervisor.run(*loop)) for loop in loops]
    work.append(asyncio.create_task(made.steps()))
    try:
        yield made
    finally:
        for task in work:
            task.cancel()
        ended = await asyncio.gather(*work, return_exceptions=True)
        source.close()
        await client.close()
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
