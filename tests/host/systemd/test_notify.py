"""Notifications: the protocol, and what a reporter makes of a reconciler."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.control.reconciling import DNS, WEB, Heartbeats, IsolatedReconciler, run_story
from tests.dataplane.fake_dataplane import broken_tool
from vipd.daemon.status_reporter import StatusReporter, heartbeat_seconds, program_seconds
from vipd.host.observer import Observers
from vipd.host.systemd.notify import Notifier, one_line


class Ear:
    """A datagram socket, asked when wanted."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """What has come since the last time."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(1 << 16).decode())
            except BlockingIOError:
                return found

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def ear(address: str) -> Iterator[Ear]:
    made = Ear(address)
    yield made
    made.close()


@pytest.fixture
def notifier(ear: Ear, address: str) -> Iterator[Notifier]:
    made = Notifier(address)
    yield made
    made.close()


def test_assignments_go_to_a_path_as_lines(ear: Ear, notifier: Notifier) -> None:
    assert notifier.send("READY=1", "STATUS=all is well")
    assert ear.heard() == ["READY=1\nSTATUS=all is well"]


def test_an_at_sign_means_an_abstract_name() -> None:
    name = f"vipd-test-{os.getpid()}"
    ear, notifier = Ear(f"\0{name}"), Notifier(f"@{name}")
    assert notifier.send("READY=1")
    assert ear.heard() == ["READY=1"]
    ear.close()
    notifier.close()


def test_nobody_there_is_no_error_but_known(address: str) -> None:
    notifier = Notifier(address)
    assert not notifier.send("READY=1")
    notifier.close()
    assert Notifier().send("READY=1")


def test_a_full_socket_holds_up_nothing(ear: Ear, notifier: Notifier) -> None:
    taken = [notifier.send("WATCHDOG=1") for _ in range(2000)]
    assert taken[0]
    assert not taken[-1]
    ear.heard()
    assert notifier.send("WATCHDOG=1")


def test_the_variables_are_taken_out_of_the_environment() -> None:
    environment = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier.from_environment(environment)
    assert environment == {}
    assert notifier.watchdog_seconds == 30
    notifier.close()


@pytest.mark.parametrize(
    ("microseconds", "pid"), [("30000000", "1"), ("0", ""), ("", ""), ("soon", ""), ("-5", "")]
)
def test_a_watchdog_of_others_or_none(microseconds: str, pid: str) -> None:
    told = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": microseconds, "WATCHDOG_PID": pid}
    notifier = Notifier.from_environment(told)
    assert notifier.watchdog_seconds is None
    notifier.close()


def test_children_do_not_inherit_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "@x")
    Notifier.from_environment(os.environ).close()
    code = "import os; print('NOTIFY_SOCKET' in os.environ)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert said.stdout == "False\n"


def test_a_value_is_one_short_line() -> None:
    assert one_line("a\n b\tc") == "a b c"
    assert len(one_line("x" * 1000)) == 240


@pytest.mark.parametrize(
    ("watchdog", "beat", "program"),
    [(None, 60.0, 60.0), (30.0, 15.0, 25.0), (2.0, 1.0, 20.0), (300.0, 150.0, 60.0)],
)
def test_times_follow_from_the_watchdog(watchdog: float | None, beat: float, program: float) -> None:
    notifier = Notifier("", watchdog)
    assert (heartbeat_seconds(notifier), program_seconds(notifier)) == (beat, program)


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def passes(self, seconds: float) -> None:
        """Let time pass, and whatever was to be done at the end of it be done."""
        self.now += seconds
        for _ in range(5):
            await asyncio.sleep(0)


def stepping(story: Callable[[IsolatedReconciler], Awaitable[None]], clock: Clock | None = None) -> None:
    """Run a story in which the test itself makes each step; by a clock if one is given, timers too."""

    async def run() -> None:
        await story(IsolatedReconciler(DNS))

    def made_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        if clock is not None:
            loop.time = clock  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=made_loop) as runner:
        runner.run(run())


def test_ready_comes_after_the_first_good_step_and_once(ear: Ear, notifier: Notifier) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        clock = Clock()
        StatusReporter(notifier, isolated.reconciler, clock)
        isolated.dataplane.failures = [broken_tool()]
        isolated.reconciler.request_sync()
        await isolated.reconciler.step()
        assert [text for text in ear.heard() if "READY" in text] == []
        for _ in range(2):
            clock.now += 10
            await isolated.reconciler.step()
        ready = [text for text in ear.heard() if "READY" in text]
        assert ready == ["READY=1\nSTATUS=1 service, 1/1 backends ready, 1 unchecked, in sync"]

    stepping(story)


def test_ready_that_was_not_taken_is_told_again(address: str) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        notifier = Notifier(address)
        StatusReporter(notifier, isolated.reconciler, Clock())
        isolated.reconciler.request_sync()
        await isolated.reconciler.step()
        ear = Ear(address)
        isolated.reconciler.observers.heartbeat()
        assert any(text.startswith("READY=1") for text in ear.heard())
        ear.close()
        notifier.close()

    stepping(story)


def test_a_status_is_told_when_it_differs_and_not_too_often(ear: Ear, notifier: Notifier) -> None:
    clock = Clock()

    async def story(isolated: IsolatedReconciler) -> None:
        reporter = StatusReporter(notifier, isolated.reconciler, clock)
        isolated.reconciler.request_sync()
        await isolated.reconciler.step()
        ear.heard()
        for _ in range(3):
            await clock.passes(5)
            reporter.stepped()
        assert ear.heard() == [], "nothing is different"
        await clock.passes(5)  # the look that was put off is over
        clock.now += 5
        for refused in (1, 0, 1):
            isolated.dataplane.refused = dict.fromkeys(list(isolated.dataplane.kernel)[:refused], "no")
            await isolated.reconciler.step()
        quarantined = "STATUS=1 service, 1/1 backends ready, 1 unchecked, 1 quarantined"
        assert ear.heard() == [quarantined], "the two that followed at once"
        isolated.dataplane.refused = {}
        await isolated.reconciler.step()
        assert ear.heard() == []
        await clock.passes(0.9)
        assert ear.heard() == [], "too early"
        await clock.passes(0.2)
        assert ear.heard() == ["STATUS=1 service, 1/1 backends ready, 1 unchecked, in sync"], (
            "the last one comes by itself"
        )
        reporter.stopping()
        assert ear.heard()[-1].startswith("STOPPING=1")

    stepping(story, clock)


def test_a_failed_step_is_in_the_status(ear: Ear, notifier: Notifier) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        clock = Clock()
        StatusReporter(notifier, isolated.reconciler, clock)
        isolated.reconciler.request_sync()
        await isolated.reconciler.step()
        clock.now += 5
        isolated.dataplane.kernel = {}
        isolated.dataplane.failures = [broken_tool()]
        isolated.reconciler.request_sync()
        await isolated.reconciler.step()
        assert "1 service, 1/1 backends ready, 1 unchecked, failed: " in ear.heard()[-1]

    stepping(story)


def test_a_start_that_failed_is_not_prolonged(ear: Ear, notifier: Notifier) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        clock = Clock()
        StatusReporter(notifier, isolated.reconciler, clock)
        isolated.reconciler.observers.heartbeat()
        assert any("EXTEND_TIMEOUT_USEC=60000000" in text for text in ear.heard())
        isolated.dataplane.failures = [broken_tool()]
        isolated.reconciler.request_sync()
        await isolated.reconciler.step()
        clock.now += 10
        isolated.reconciler.observers.heartbeat()
        assert not any("EXTEND" in text for text in ear.heard())

    stepping(story)


def test_a_reload_before_the_first_good_step_does_not_say_ready(ear: Ear, notifier: Notifier) -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        reporter = StatusReporter(notifier, isolated.reconciler, Clock())
        async with reporter.reloading():
            pass
        assert ear.heard() == []

    stepping(story)


def test_the_loop_beats_while_it_waits_and_not_while_it_hangs() -> None:
    async def story(isolated: IsolatedReconciler) -> None:
        observers, heartbeats = isolated.reconciler.observers, Heartbeats()
        observers.add(heartbeats)
        await isolated.fulfilled(isolated.reconciler.request_sync())
        observers.heartbeat_seconds = 0.02
        isolated.reconciler.request_sync()
        await beaten(observers, 5)
        isolated.dataplane.gate = asyncio.Event()
        isolated.source.candidate = type(isolated.source.candidate)((DNS, WEB))
        isolated.dataplane.entered.clear()
        wish = isolated.reconciler.request_sync()
        await isolated.dataplane.entered.wait()
        hung = heartbeats.count
        await asyncio.sleep(0.2)
        assert heartbeats.count == hung
        isolated.dataplane.gate.set()
        await isolated.fulfilled(wish)
        await beaten(observers, 3)

    run_story(story, DNS)


async def beaten(observers: Observers, times: int) -> None:
    """Return after so many more heartbeats."""
    reached = asyncio.Event()

    class Counting(Heartbeats):
        def heartbeat(self) -> None:
            super().heartbeat()
            if self.count >= times:
                reached.set()

    observers.add(Counting())
    await asyncio.wait_for(reached.wait(), 10)


def test_heartbeats_are_told_to_observers() -> None:
    observers, both = Observers(), (Heartbeats(), Heartbeats())
    for heartbeats in both:
        observers.add(heartbeats)
    observers.heartbeat()
    assert [heartbeats.count for heartbeats in both] == [1, 1]
    observers.heartbeat()
    assert [heartbeats.count for heartbeats in both] == [2, 2]
