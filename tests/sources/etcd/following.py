"""A vipd in this process that follows an etcd, as a test asks what it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.lab.inside import Vipd, running

PREFIX = "/vipd/v1/"
T = TypeVar("T")


def key(name: str) -> str:
    return f"{PREFIX}services/{name}"


def value(number: int, backend: str = "10.244.0.5") -> str:
    """A service with an address of its own."""
    address = f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}"
    return f"address: {address}\nports: 80\nbackends: [{backend}]\n"


def values(count: int) -> dict[str, str]:
    return {key(f"s{n:03}"): value(n) for n in range(1, count + 1)}


def follow(
    urls: Sequence[str],
    story: Callable[[Follower], Awaitable[T]],
    root: Path | None = None,
    *,
    prepare: Callable[[Vipd], object] = lambda vipd: None,
    settings: dict[str, Any] | None = None,
    **etcd: Any,
) -> T:
    """Run a story beside a vipd that follows these endpoints. `etcd`: more keys of that setting. With the
    `root` of an earlier story it is that vipd, started again."""

    async def told(vipd: Vipd) -> T:
        return await story(Follower(vipd))

    if root:
        root.mkdir(exist_ok=True)
    etcd = {"endpoints": list(urls), "timeout": "30s", "report_interval": 1, **etcd}
    return running(told, prepare, root, etcd=etcd, **(settings or {}))


class Follower:
    """What such a vipd knows."""

    def __init__(self, vipd: Vipd) -> None:
        self.vipd = vipd

    def names(self) -> set[str]:
        """The services that serve."""
        return self.vipd.kernel.names()

    def serving(self) -> dict[str, set[str]]:
        """The backends of each service that get flows."""
        found: dict[str, set[str]] = {name: set() for name in self.names()}
        for forwarding, shares in self.vipd.kernel.serving().items():
            found[forwarding.split()[0]].update(shares)
        return found

    def backend(self, name: str) -> str:
        """The address of the backend of a service that has one."""
        return next(iter(self.serving().get(name, ())), "").rpartition(":")[0]

    async def etcd(self) -> dict[str, Any]:
        """What the status says of etcd."""
        return dict((await self.vipd.status())["etcd"])

    async def source(self, name: str = "etcd") -> dict[str, Any]:
        """What the status says of a source."""
        (found,) = (s for s in (await self.vipd.status())["sources"] if s["name"] == name)
        return dict(found)

    async def problems(self) -> str:
        """What is wrong with etcd or its keys."""
        return "\n".join((await self.source())["problems"])

    async def accept_removal(self) -> list[str]:
        """`vipctl accept-removal`: the keys that were held."""
        answer = await self.vipd.ask("POST", "/v1/accept-removal")
        assert answer.status == 200, answer
        return list(answer.body["keys"])

    async def until(self, true: Callable[[], object], what: str = "", seconds: float = 90.0) -> None:
        """Wait for something; fail with all that is known. It may be awaitable."""
        end, pause = asyncio.get_running_loop().time() + seconds, 0.01
        while True:
            seen = true()
            if await seen if isinstance(seen, Awaitable) else seen:
                return
            assert asyncio.get_running_loop().time() < end, (
                f"{what}: {self.serving()} {await self.etcd()} {await self.problems()}"
            )
            await asyncio.sleep(pause)
            pause = min(1.25 * pause, 0.1)

    async def until_problem(self, words: str) -> None:
        """Wait for a problem of etcd, or a warning, with these words."""

        async def told() -> bool:
            return words in await self.problems() or words in str((await self.vipd.status())["warnings"])

        await self.until(told, words)

    async def until_well(self) -> None:
        """Wait until etcd is followed and nothing is wrong with it."""

        async def well() -> bool:
            return bool((await self.etcd())["connected"]) and not await self.problems()

        await self.until(well, "well")

    async def until_held(self, *names: str) -> None:
        """Wait until just these keys are held."""

        async def held() -> bool:
            return set((await self.etcd())["held"]) == set(names)

        await self.until(held, f"held: {names}")
