"""A watch that goes on for months, on a bad day: it dies loudly, says a fault once, and keeps little."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any, NoReturn, cast

import pytest

from tests.dataplane.iptables.watch.recorded import datagrams
from tests.lab.simulated_time import simulate
from vipd.control.background_tasks import watch_rules
from vipd.control.progress import Progress
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import Names
from vipd.dataplane.iptables.saved_rules import read_saved
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.dataplane.iptables.watch.poll import Expected, WatchedFamily
from vipd.dataplane.iptables.watch.repair_backoff import RepairBackoff
from vipd.dataplane.iptables.watch.stream import WatchOptions
from vipd.dataplane.iptables.watch.watcher import RuleWatch
from vipd.host.supervisor import Supervisor
from vipd.model.service import Family

NAMES = Names("VIPD")
PATIENCE = 60.0
LOST = "somebody: events were lost in ipv4, ipv6"


async def nothing() -> str:
    """A family without rules."""
    return ""


def watch(listening: socket.socket, **options: Any) -> RuleWatch:
    """A watch of both families by the events that come by this socket."""
    listening.setblocking(False)
    watched = [WatchedFamily(family, False, nothing, lambda: None) for family in Family]
    own = OwnProcesses(asyncio.get_running_loop().time)
    return RuleWatch(watched, NAMES, WatchOptions(own, **options), open_events=lambda: listening)


class Faulty(socket.socket):
    """A socket whose first readings fail."""

    def __init__(self, real: socket.socket, *faults: OSError) -> None:
        super().__init__(fileno=real.detach())
        self._faults = list(faults)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Fail, or receive."""
        if self._faults:
            raise self._faults.pop(0)
        return super().recv(size, flags)


def heard(*sent: bytes, faults: tuple[OSError, ...] = (), **options: Any) -> str | Exception:
    """What a watch says of these datagrams first."""

    async def listen() -> str | Exception:
        ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with kernels:
            async with watch(Faulty(ours, *faults), **options) as watching, asyncio.timeout(PATIENCE):
                for datagram in sent:
                    kernels.send(datagram)
                try:
                    return str(await anext(watching))
                except Exception as error:
                    return error

    return asyncio.run(listen())


def test_what_is_not_understood_or_lost_means_that_everything_is_read() -> None:
    for garbage in (b"\0" * 9, b"\xff" * 40, datagrams("flush")[0] + b"\0" * 5):
        assert heard(garbage) == LOST
    assert heard(datagrams("policy")[0], faults=(OSError(errno.ENOBUFS, "no buffer space"),)) == LOST


def test_a_listener_that_dies_is_heard_of() -> None:
    """Whatever kills it: else changes would go unseen until somebody looks into the event loop's log."""
    for fault in (OSError(errno.EBADF, "bad file"), KeyError("x"), RuntimeError("x")):

        def fail(datagram: bytes, fault: Exception = fault) -> None:
            raise fault

        assert heard(datagrams("flush")[0], on_message=fail) is fault
    broken = heard(b"x", faults=(OSError(errno.EIO, "Input/output error"),))
    assert "Input/output" in str(broken)


def test_reports_that_nobody_takes_become_one() -> None:
    async def story() -> list[str]:
        ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        kernels.setblocking(False)
        loop, found = asyncio.get_running_loop(), list[str]()
        with kernels:
            async with watch(ours) as watching:
                for _ in range(1000):
                    for datagram in datagrams("delete-jump"):
                        await loop.sock_sendall(kernels, datagram)
                    await asyncio.sleep(0.4)  # longer than a burst is
                with contextlib.suppress(TimeoutError):
                    while True:
                        found.append(str(await asyncio.wait_for(anext(watching), 1.0)))
        return found

    first, *rest = simulate(story())
    assert len(rest) < 300
    assert first.endswith("rule deleted in ipv4"), "everything of the family"
    assert len(first) < 10_000


def test_a_poll_that_fails_is_named_and_ends_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(work: Callable[..., object], *arguments: object) -> object:
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)  # simulated time does not wait for threads
    broken = {Family.IPV6}
    believed = read_saved("*nat\n:VIPD-SERVICES - [0:0]\nCOMMIT\n", NAMES)

    def watched(family: Family) -> WatchedFamily:
        async def read() -> str:
            if family in broken:
                raise ApplyError("cannot read", "no")
            return "*nat\nCOMMIT\n"

        return WatchedFamily(family, False, read, lambda: Expected(1, believed))

    def no_events() -> NoReturn:
        raise OSError(1, "not here")

    async def story() -> None:
        supervisor, own = Supervisor((OSError, ApplyError)), OwnProcesses(lambda: 0.0)
        options = WatchOptions(own, supervisor.run_until_cancelled)
        watching = RuleWatch([watched(family) for family in Family], NAMES, options, open_events=no_events)
        async with watching:
            assert set(watching.ways.values()) == {"poll: [Errno 1] not here"}
            assert (await anext(watching)).families == {Family.IPV4}
            await asyncio.sleep(3600)
            (warning,) = supervisor.warnings
            assert warning.startswith("polling rules of IPv6 fails: cannot read")
            assert sum("polling rules" in message for message in caplog.messages) == 1
            broken.clear()
            assert (await anext(watching)).families == {Family.IPV6}, "what differed all the while"
            await asyncio.sleep(10)
            assert not list(supervisor.warnings)
            broken.add(Family.IPV6)
            await asyncio.sleep(10)
            assert len(supervisor.warnings) == 1
        assert supervisor.loops == {}, "a watch that is closed is named no more"

    simulate(story())


class Beside:
    """Notes what is asked of dataplane and reconciler, in its order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.progress = Progress(attempted=1)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.asked.append(name)


def test_a_watch_that_is_opened_again_doubts_everything() -> None:
    """What others did while nothing was watched was not seen."""
    beside = Beside()

    def dying() -> RuleWatch:
        ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        kernels.send(b"x")
        kernels.close()
        return watch(Faulty(ours, OSError(errno.EIO, "dead")))

    async def story() -> None:
        for _ in range(3):  # as the supervisor of loops does
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await watch_rules(dying, RepairBackoff(), cast(Any, beside), cast(Any, beside))

    asyncio.run(story())
    assert beside.asked == ["invalidate_all", "request_sync"] * 3
