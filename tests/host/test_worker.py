"""The daemon's end of the worker, with processes that are none: what they send, and when they do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from tests.lab.simulated_time import simulate
from vipd.host.worker import (
    IDLE_BEATS,
    LATE_BEATS,
    MAX_FRAME_BYTES,
    SILENT_BEATS,
    Channel,
    Worker,
    WorkerError,
)

PATIENCE = 3600.0
Running = asyncio.Task[None]


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


class Asked:
    """Keeps what it is answered."""

    def __init__(self) -> None:
        self.answers: list[object] = []
        self.faults: list[str] = []

    def answered(self, answer: Any) -> None:
        if answer == "bad":
            raise ValueError
        self.answers.append(answer)

    def failed(self, why: str) -> None:
        self.faults.append(why)


class Transport:
    """Passes what the daemon writes on to a process."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Nothing is open."""


class FakeProcess:
    """Answers each request with what was asked, unless told otherwise."""

    pid = 1 << 30

    def __init__(self, channel: Channel, silent: bool = False, deaf: bool = False) -> None:
        self.channel, self.silent, self.deaf, self.killed = channel, silent, deaf, False
        self.rows: list[list[Any]] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        channel.connection_made(Transport(self.take))  # type: ignore[arg-type]
        self.say([[0]])

    def take(self, frame: bytes) -> None:
        rows = json.loads(frame[4:])
        self.rows += rows
        if not self.deaf:
            self.say([[0] for row in rows if row == [0]])
            if not self.silent:
                self.say([[number, rest[1]] for number, *rest in rows if len(rest) == 2])

    def say(self, rows: list[list[Any]]) -> None:
        if rows:
            self.send(framed(json.dumps(rows).encode()))

    def send(self, data: bytes) -> None:
        for begin in range(0, len(data), 1000):
            part = data[begin : begin + 1000]
            self.channel.get_buffer(-1)[: len(part)] = part
            self.channel.buffer_updated(len(part))

    def kill(self) -> None:
        self.killed = True
        if not self.ended.done():
            self.ended.set_result("was killed by SIGKILL")


class Host:
    """Starts such processes, and keeps them."""

    def __init__(self, **options: bool) -> None:
        self.processes: list[FakeProcess] = []
        self.options, self.fault = options, ""

    async def start(self, channel: Channel) -> FakeProcess:
        await asyncio.sleep(0.1)
        if self.fault:
            raise WorkerError(self.fault)
        self.processes.append(FakeProcess(channel, **self.options))
        return self.processes[-1]


def run(story: Callable[[Host, Worker, Running], Coroutine[Any, Any, None]], **options: bool) -> None:
    async def told() -> None:
        host = Host(**options)
        starting: Callable[[Channel], Awaitable[Any]] = host.start
        worker = Worker(starting)
        running = asyncio.create_task(worker.run())
        await story(host, worker, running)
        running.cancel()

    simulate(told())


def test_it_is_started_for_the_first_request_and_ended_when_none_comes_any_more() -> None:
    async def story(host: Host, worker: Worker, running: Running) -> None:
        await asyncio.sleep(3600)
        assert host.processes == []
        asked = Asked()
        for number in range(3):
            worker.ask("echo", [number], asked, PATIENCE)
        await asyncio.sleep(1)
        assert asked.answers == [[0], [1], [2]]
        await asyncio.sleep(IDLE_BEATS - 10)
        assert not any(process.killed for process in host.processes)
        await asyncio.sleep(20)
        assert [process.killed for process in host.processes] == [True]
        worker.ask("echo", [3], asked, PATIENCE)
        await asyncio.sleep(1)
        assert (asked.answers[-1], len(host.processes), asked.faults) == ([3], 2, [])

    run(story)


def test_one_that_is_slow_is_waited_for_and_one_that_gives_no_sign_of_life_is_not() -> None:
    async def story(host: Host, worker: Worker, running: Running) -> None:
        asked = Asked()
        worker.ask("echo", [0], asked, PATIENCE)
        await asyncio.sleep(600)
        assert not running.done()
        host.processes[0].deaf = True
        await asyncio.sleep(SILENT_BEATS + 2)
        assert isinstance(running.exception(), WorkerError)
        (fault,) = asked.faults
        assert fault == "the worker process did not answer for 4 s and was killed"
        assert host.processes[0].killed

    run(story, silent=True)


def test_a_request_that_is_too_large_fails_alone() -> None:
    async def story(host: Host, worker: Worker, running: Running) -> None:
        asked = Asked()
        for _ in range(2):
            worker.ask("echo", ["x" * MAX_FRAME_BYTES], asked, PATIENCE)
            worker.ask("echo", ["y" * 900_000], asked, PATIENCE)
            await asyncio.sleep(1)
        assert [len(fault) < 100 for fault in asked.faults] == [True, True]
        assert asked.answers == [["y" * 900_000]] * 2

    run(story)


def test_an_answer_that_never_comes_is_not_waited_for() -> None:
    """While others come."""

    async def story(host: Host, worker: Worker, running: Running) -> None:
        asked = Asked()
        number = worker.ask("echo", [0], asked, 5.0)
        worker.ask("echo", [1], asked, PATIENCE)
        await asyncio.sleep(5 + LATE_BEATS + 3)
        assert asked.faults == ["the worker process did not answer"]
        assert [number] in host.processes[0].rows

    run(story, silent=True)


GARBAGE = [
    b"\xff" * 100,
    framed(b"no rows"),
    framed(b"{}"),
    framed(b"[1]"),
    framed(b"[[]]"),
    framed(b"[[1]]"),
    framed(b'[[1,"bad"]]'),
    framed(b"[" * 1000),
    (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_no_answer_ends_it_and_what_was_asked(garbage: bytes) -> None:
    async def story(host: Host, worker: Worker, running: Running) -> None:
        asked = Asked()
        assert worker.ask("echo", [0], asked, PATIENCE) == 1
        await asyncio.sleep(1)
        host.processes[0].send(garbage)
        await asyncio.sleep(1)
        assert isinstance(running.exception(), WorkerError)
        assert host.processes[0].killed
        (fault,) = asked.faults
        assert "sent garbage" in fault
        assert asked.answers == []

    run(story, silent=True)


def test_while_none_can_be_started_requests_fail_at_once_and_after_an_end_they_wait() -> None:
    async def story(host: Host, worker: Worker, running: Running) -> None:
        asked, host.fault = Asked(), "no memory"
        worker.ask("echo", [0], asked, PATIENCE)
        with pytest.raises(WorkerError, match="no memory"):
            await running
        assert asked.faults == ["no memory"]
        worker.ask("echo", [1], asked, PATIENCE)
        assert asked.faults == ["no memory"] * 2
        host.fault = ""
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(1)
        worker.ask("echo", [2], asked, PATIENCE)
        await asyncio.sleep(1)
        assert asked.answers == [[2]]
        host.processes[0].kill()
        host.processes[0].channel.connection_lost(None)
        await asyncio.sleep(0.1)
        worker.ask("echo", [3], asked, PATIENCE)
        await asyncio.sleep(1)
        assert str(running.exception()) == "the worker process was killed by SIGKILL"
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(1)
        assert asked.answers == [[2], [3]]
        running.cancel()

    run(story)
