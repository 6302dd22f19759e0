"""The common part of all kinds of probes: how they are started, and how long they may take."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from vipd.declaration.problems import PLEASE_REPORT
from vipd.health.lag import LoopLag
from vipd.health.result import ProbeResult
from vipd.host.containment import log_once
from vipd.model.check_target import CheckTarget

ProbeCallback = Callable[[ProbeResult], None]
"""Called once with the result, unless the attempt was cancelled; possibly before `start` returns."""

LOCAL_ERRORS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC, errno.EADDRNOTAVAIL}
)
"""Errors that show that this host cannot probe. They have no meaning for the backend."""

_WORDS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EHOSTUNREACH: "no route to host",
    errno.ENETUNREACH: "network unreachable",
    errno.EPERM: "not permitted by this host's packet filter",
    errno.EPIPE: "connection closed",
}


class Attempt(Protocol):
    """A probe on its way."""

    def cancel(self) -> object:
        """End it; its callback is no longer called."""


class Prober(Protocol):
    """Probes targets of one or more kinds."""

    def start(self, target: CheckTarget, done: ProbeCallback) -> Attempt:
        """Probe once, within the target's timeout. An exception from it is a fault in vipd."""


def error_result(error: OSError | int, seconds: float = 0.0) -> ProbeResult:
    """The result for a network error, or its number."""
    number = error if isinstance(error, int) else error.errno or 0
    words = _WORDS.get(number) or (os.strerror(number) if number > 0 else str(error))
    words = words[:1].lower() + words[1:]
    return ProbeResult.not_probed(words) if number in LOCAL_ERRORS else ProbeResult.failure(words, seconds)


def internal_error_result(target: CheckTarget, error: Exception) -> ProbeResult:
    """The result for an unexpected exception: a problem of this target alone."""
    return ProbeResult.not_probed(f"{log_once(error, f'checking {target}')}; {PLEASE_REPORT}")


@dataclass(slots=True)
class ProbeContext:
    """The arguments of a probing coroutine."""

    target: CheckTarget
    doing: str = ""
    """The current activity, such as `while connecting`; it is reported with a timeout."""
    timeout_result: ProbeResult | None = None
    """The result if nothing arrives in time; None: a timeout, which is a failure."""


ProbeFunction = Callable[[ProbeContext], Awaitable[ProbeResult]]
"""Probes once. Raises OSError for a network error; need not enforce the timeout."""


class Deadline:
    """Calls `expired` after some seconds, not counting stalls of the event loop."""

    __slots__ = ("_at", "_expired", "_lag", "_loop", "_seen", "_timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, lag: LoopLag, seconds: float, expired: Callable[[], None]
    ) -> None:
        self._loop, self._lag, self._expired = loop, lag, expired
        self._seen = lag.stalled
        self._at = loop.time() + seconds
        self._timer = loop.call_at(self._at, self._fire)

    def cancel(self) -> None:
        """Never call."""
        self._timer.cancel()

    def _fire(self) -> None:
        stalled = self._lag.reading()
        if stalled > self._seen:
            # Not the remaining time alone: an answer that arrived during the stall is read only after this.
            self._at = max(self._at + stalled - self._seen, self._loop.time())
            self._seen = stalled
            self._timer = self._loop.call_at(self._at, self._fire)
        else:
            self._expired()


class CoroutineProber:
    """Runs a coroutine for each probe."""

    def __init__(self, ask: ProbeFunction, lag: LoopLag) -> None:
        self._ask, self._lag = ask, lag

    def start(self, target: CheckTarget, done: ProbeCallback) -> Attempt:
        """Probe once."""
        return _Running(self._ask, self._lag, target, done)


class _Running:
    """A coroutine on its way."""

    __slots__ = ("_asking", "_deadline", "_done", "_task")

    def __init__(self, ask: ProbeFunction, lag: LoopLag, target: CheckTarget, done: ProbeCallback) -> None:
        loop = asyncio.get_running_loop()
        self._asking, self._done = ProbeContext(target), done
        self._task = loop.create_task(_answer(ask, self._asking), name=f"ask {target}")
        self._task.add_done_callback(self._finished)
        self._deadline = Deadline(loop, lag, target.timing.timeout, self._expire)

    def cancel(self) -> None:
        """End it."""
        self._done = _ignore_result
        self._task.cancel()

    def _expire(self) -> None:
        self._task.cancel()

    def _finished(self, task: asyncio.Task[ProbeResult]) -> None:
        self._deadline.cancel()
        if task.cancelled():
            asking = self._asking
            self._done(
                asking.timeout_result or ProbeResult.timeout(asking.target.timing.timeout, asking.doing)
            )
        else:
            self._done(task.result())


async def _answer(ask: ProbeFunction, asking: ProbeContext) -> ProbeResult:
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        return await ask(asking)
    except OSError as error:
        return error_result(error, loop.time() - began)
    except Exception as error:  # a probe's own fault must end neither the other probes nor the daemon
        return internal_error_result(asking.target, error)


def _ignore_result(result: ProbeResult) -> None:
    """Receives the result of a cancelled attempt, and drops it."""
