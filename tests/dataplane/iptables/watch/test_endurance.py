"""A watch that goes on for months, on a bad day: it dies loudly, says a fault once, and keeps little."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from tests.dataplane.iptables.watch.recorded import datagrams
from tests.lab.simulated_time import simulate
from vipd.dataplane.base import ApplyError
from vipd.dataplane.iptables.names import ChainId, Names
from vipd.dataplane.iptables.plan import Installed
from vipd.dataplane.iptables.watch.debouncer import MAX_OPEN, Debouncer
from vipd.dataplane.iptables.watch.events import RuleEvents
from vipd.dataplane.iptables.watch.external_change import Actor, ChangeKind, ExternalChange, OwnershipFilter
from vipd.dataplane.iptables.watch.messages import Generation, read_messages
from vipd.dataplane.iptables.watch.own_processes import OwnProcesses
from vipd.dataplane.iptables.watch.poll import Expected, WatchedFamily
from vipd.dataplane.iptables.watch.repair_backoff import MAX_OFFENDERS, RepairBackoff
from vipd.dataplane.iptables.watch.stream import MAX_WAITING, MOST_NAMED, ExternalChangeStream, WatchOptions
from vipd.dataplane.iptables.watch.watcher import RuleWatch
from vipd.host.supervisor import Supervisor
from vipd.model.service import Family

NAMES = Names("VIPD")
SCOPE = OwnershipFilter(NAMES, frozenset(Family))
SERVICES = ChainId("nat", "VIPD-SERVICES")
DAY = 24 * 60 * 60
PATIENCE = 60.0


class Stream(ExternalChangeStream):
    """A watch of watchers that a test has made."""

    def __init__(self, *watchers: object) -> None:
        super().__init__(WatchOptions(OwnProcesses(lambda: 0.0)))
        self._made = watchers

    def _begin(self) -> None:
        for watcher in self._made:
            self._start(watcher, "a watcher")  # type: ignore[arg-type]


class Reporting:
    """A watcher that does what a test says."""

    def __init__(self, work: Callable[[Callable[[ExternalChange], None]], object]) -> None:
        self._work = work

    def close(self) -> None:
        """Nothing is open."""

    async def run(self, report: Callable[[ExternalChange], None]) -> None:
        """As the test says."""
        self._work(report)


def kind_of_change(number: int) -> ExternalChange:
    chain = (Family.IPV4, ChainId("nat", f"VIPD-{number}"))
    actor = Actor("iptables", number)
    return ExternalChange(
        frozenset({Family.IPV4}), frozenset({chain}), frozenset({ChangeKind.RULE_DELETED}), (actor,)
    )


def taken(stream: Stream, number: int) -> list[ExternalChange | str]:
    """So many disturbances, or what was wrong instead."""

    async def take() -> list[ExternalChange | str]:
        found: list[ExternalChange | str] = []
        async with stream, asyncio.timeout(PATIENCE):
            for _ in range(number):
                try:
                    found.append(await anext(stream))
                except OSError as error:
                    found.append(str(error))
        return found

    return asyncio.run(take())


def events(receiving: socket.socket, **more: object) -> RuleEvents:
    receiving.setblocking(False)
    own = OwnProcesses(lambda: 0.0)
    clock = asyncio.get_running_loop().time
    return RuleEvents(receiving, SCOPE, own, clock, **more)  # type: ignore[arg-type]


def heard(*sent: bytes, on_message: Callable[[bytes], None] | None = None) -> ExternalChange | Exception:
    """What a watch says of these datagrams first."""

    async def listen() -> ExternalChange | Exception:
        ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with kernels:
            async with Stream(events(ours, on_message=on_message)) as stream, asyncio.timeout(PATIENCE):
                for datagram in sent:
                    kernels.send(datagram)
                try:
                    return await anext(stream)
                except Exception as error:
                    return error

    return asyncio.run(listen())


@pytest.mark.parametrize("garbage", [b"\0" * 9, b"\xff" * 40, datagrams("flush")[0] + b"\0" * 5])
def test_garbage_means_that_everything_is_read(garbage: bytes) -> None:
    found = heard(garbage)
    assert isinstance(found, ExternalChange)
    assert found.everything
    assert found.kinds == {ChangeKind.EVENTS_LOST}


def test_an_overflow_means_that_everything_is_read() -> None:
    class Overflowing:
        """A socket that lost something, then has nothing."""

        def __init__(self, real: socket.socket) -> None:
            self._real, self._faults = real, iter((OSError(errno.ENOBUFS, "no buffer space"),))

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

        def recv(self, size: int) -> bytes:
            """As the kernel's, once too much has come."""
            for fault in self._faults:
                raise fault
            return self._real.recv(size)

    async def listen() -> ExternalChange:
        ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        with kernels:
            watching = events(Overflowing(ours))  # type: ignore[arg-type]
            async with Stream(watching) as stream, asyncio.timeout(PATIENCE):
                kernels.send(datagrams("policy")[0])
                return await anext(stream)

    assert asyncio.run(listen()).everything


@pytest.mark.parametrize("fault", [OSError(errno.EBADF, "bad file"), KeyError("x"), RuntimeError("x")])
def test_a_listener_that_dies_is_heard_of(fault: Exception) -> None:
    """Whatever kills it: else changes would go unseen until somebody looks into the event loop's log."""

    def fail(datagram: bytes) -> None:
        raise fault

    assert heard(datagrams("flush")[0], on_message=fail) is fault


def test_a_watcher_that_just_ends_is_heard_of() -> None:
    assert taken(Stream(Reporting(lambda report: None)), 1) == ["a watcher: it has ended"]


def test_disturbances_that_nobody_takes_become_one() -> None:
    number = 10 * MAX_WAITING

    def work(report: Callable[[ExternalChange], None]) -> None:
        for each in range(number):
            report(kind_of_change(each))

    stream = Stream(Reporting(work))

    async def take() -> list[ExternalChange]:
        found = []
        async with stream, asyncio.timeout(PATIENCE):
            await asyncio.sleep(0.1)
            assert len(stream._found) <= MAX_WAITING + 1
            with contextlib.suppress(OSError):  # in the end
                while True:
                    found.append(await anext(stream))
        return found

    found = asyncio.run(take())
    assert len(found) <= MAX_WAITING
    assert found[0].everything
    assert len(found[0].actors) <= MOST_NAMED


def transactions() -> Iterator[tuple[int, bytes]]:
    """Real changes of ours, each by another sender."""
    for number in range(1, 10 * MAX_OPEN):
        yield number, datagrams("flush")[0]


def test_transactions_without_an_end_are_let_go_of() -> None:
    gathering = Debouncer(SCOPE)
    for port, datagram in transactions():
        for message in read_messages(datagram):
            if not isinstance(message, Generation):
                gathering.change(message._replace(port=port))
        gathering.end(
            Generation(0, 1, "iptables"), Actor("iptables", 1), lambda pid, sender: False, float(port)
        )
        assert len(gathering._open) <= MAX_OPEN + 1
    found = gathering.collect(lambda pid, sender: False)
    assert found is not None
    assert found.everything


def test_a_quarrel_of_a_day_is_kept_in_little_room() -> None:
    peace, now = RepairBackoff(), 0.0
    while now < DAY:
        now = peace.record_change([Actor("iptables", int(now), "puppet", 5)], now) + 0.01
        peace.record_repair(True, now)
    (quarrel,) = peace._offenders.values()
    assert len(quarrel.latest) <= 10
    assert quarrel.repairs > 2000
    (warning,) = peace.warnings(now)
    assert f"puppet (pid 5) has undone vipd's rules {quarrel.repairs} times in " in warning


def test_culprits_by_ever_new_names_are_few() -> None:
    peace = RepairBackoff()
    for number in range(100 * MAX_OFFENDERS):
        peace.record_change([Actor(f"p{number}", number)], 0.001 * number)
        if not number % 3:
            peace.record_repair(True, 0.001 * number)
        assert len(peace._offenders) <= MAX_OFFENDERS + 1
    assert "another program has undone" in " ".join(peace.warnings(10.0))


def test_a_poll_that_fails_is_named_and_ends_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(work: Callable[..., object], *arguments: object) -> object:
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", at_once)  # simulated time does not wait for threads
    broken, installed = {Family.IPV6}, Installed({SERVICES: ()}, {})

    def watched(family: Family) -> WatchedFamily:
        async def read() -> str:
            if family in broken:
                raise ApplyError("cannot read", "no")
            return "*nat\nCOMMIT\n"

        return WatchedFamily(family, False, read, lambda: Expected(1, installed))

    def no_events() -> NoReturn:
        raise OSError(1, "not here")

    async def story() -> None:
        supervisor, own = Supervisor((OSError, ApplyError)), OwnProcesses(lambda: 0.0)
        options = WatchOptions(own, supervisor.run_until_cancelled)
        watch = RuleWatch([watched(family) for family in Family], NAMES, options, open_events=no_events)
        async with watch:
            assert (await anext(watch)).families == {Family.IPV4}
            await asyncio.sleep(3600)
            (warning,) = supervisor.warnings
            assert warning.startswith("polling rules of IPv6 fails: cannot read")
            assert sum("polling rules" in message for message in caplog.messages) == 1
            broken.clear()
            assert (await anext(watch)).families == {Family.IPV6}, "what differed all the while"
            await asyncio.sleep(10)
            assert not list(supervisor.warnings)
            broken.add(Family.IPV6)
            await asyncio.sleep(10)
            assert len(supervisor.warnings) == 1
        assert supervisor.loops == {}, "a watch that is closed is named no more"

    simulate(story())
