"""The event socket at its limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from tests.dataplane.iptables.watch.inside import inside
from tests.dataplane.iptables.watch.recorded import OURS
from tests.dataplane.namespace import Namespace
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.watch.events import RuleEvents, open_socket
from vipd.dataplane.iptables.watch.external_change import ChangeKind, ExternalChange, OwnershipFilter
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.dataplane.iptables.watch.poll import WatchedFamily
from vipd.dataplane.iptables.watch.stream import WatchOptions
from vipd.dataplane.iptables.watch.watcher import RuleWatch
from vipd.model.service import Family


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with Namespace() as made:
        yield made


async def nothing() -> str:
    """A family without rules."""
    return ""


@pytest.mark.root
def test_an_overrun_is_one_disturbance_of_everything(namespace: Namespace) -> None:
    listening = inside(namespace, open_socket)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's smallest: 2 kB
    found: list[ExternalChange] = []

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        scope = OwnershipFilter(Names("VIPD"), frozenset(Family))
        events = RuleEvents(listening, scope, OwnProcesses(loop.time), loop.time)
        many = OURS.replace("COMMIT\n*filter", "-A PREROUTING -j RETURN\n" * 200 + "COMMIT\n*filter")
        finished = await namespace.run(["iptables-nft-restore", "--noflush"], many)
        assert finished.exit_code == 0, finished.stderr
        told = asyncio.Event()

        def tell(disturbance: ExternalChange) -> None:
            found.append(disturbance)
            told.set()

        task = asyncio.create_task(events.run(tell))
        await asyncio.wait_for(told.wait(), 60)
        await asyncio.sleep(0.5)  # for a second one, which must not come
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        events.close()

    asyncio.run(scene())
    assert len(found) == 1
    assert found[0].everything
    assert found[0].kinds >= {ChangeKind.EVENTS_LOST}
    assert found[0].families == frozenset(Family)


def test_a_broken_socket_is_told_to_whoever_waits() -> None:
    """Not taken for silence."""
    ours, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    class Broken(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            raise OSError(5, "Input/output error")

    broken = Broken(fileno=ours.detach())
    others.send(b"x")

    async def scene() -> None:
        watched = WatchedFamily(Family.IPV4, False, nothing, lambda: None)
        own = OwnProcesses(asyncio.get_running_loop().time)
        async with RuleWatch(
            [watched], Names("VIPD"), WatchOptions(own), open_events=lambda: broken
        ) as watch:
            with pytest.raises(OSError, match="Input/output"):
                await asyncio.wait_for(anext(watch), 60.0)

    asyncio.run(scene())
    others.close()
