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
from vipd.health.result import Result
from vipd.host.containment import log_once
from vipd.model.check_target import Target

Done = Callable[[Result], None]
"""Called once with the result, unless the attempt was cancelled; possibly before `start` returns."""

OWN_ERRORS = frozenset(
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

    def cancel(self) -> None:
        """End it; `Done` is no longer called."""


class Prober(Protocol):
    """Probes targets of one or more kinds."""

    def start(self, target: Target, done: Done) -> Attempt:
        """Probe once, within the target's timeout. An exception from it is a fault in vipd."""


def failure(error: OSError | int, seconds: float = 0.0) -> Result:
    """The result for a network error, or its number."""
    number = error if isinstance(error, int) else error.errno or 0
    words = _WORDS.get(number) or (os.strerror(number) if number > 0 else str(error))
    words = words[:1].lower() + words[1:]
    return Result.unasked(words) if number in OWN_ERRORS else Result.bad(words, seconds)


def unexpected(target: Target, error: Exception) -> Result:
    """The result for an unexpected exception: a problem of this target alone."""
    return Result.unasked(f"{log_once(error, f'checking {target}')}; {PLEASE_REPORT}")


@dataclass(slots=True)
class Asking:
    """The arguments of a probing coroutine."""

    target: Target
    doing: str = ""
    """The current activity, such as `while connecting`; it is reported with a timeout."""
    silence: Result | None = None
    """The result if nothing arrives in time; None: a timeout, which is a failure."""


Ask = Callable[[Asking], Awaitable[Result]]
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

    def __init__(self, ask: Ask, lag: LoopLag) -> None:
        self._ask, self._lag = ask, lag

    def start(self, target: Target, done: Done) -> Attempt:
        """Probe once."""
        return _Running(self._ask, self._lag, target, done)


class _Running:
    """A coroutine on its way."""

    __slots__ = ("_asking", "_deadline", "_done", "_task")

    def __init__(self, ask: Ask, lag: LoopLag, target: Target, done: Done) -> None:
        loop = asyncio.get_running_loop()
        self._asking, self._done = Asking(target), done
        self._task = loop.create_task(_answer(ask, self._asking), name=f"ask {target}")
        self._task.add_done_callback(self._finished)
        self._deadline = Deadline(loop, lag, target.timing.timeout, self._expire)

    def cancel(self) -> None:
        """End it."""
        self._done = _nobody
        self._task.cancel()

    def _expire(self) -> None:
        self._task.cancel()

    def _finished(self, task: asyncio.Task[Result]) -> None:
        self._deadline.cancel()
        if task.cancelled():
            asking = self._asking
            self._done(asking.silence or Result.timeout(asking.target.timing.timeout, asking.doing))
        else:
            self._done(task.result())


async def _answer(ask: Ask, asking: Asking) -> Result:
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        return await ask(asking)
    except OSError as error:
        return failure(error, loop.time() - began)
    except Exception as error:  # a probe's own fault must end neither the other probes nor the daemon
        return unexpected(asking.target, error)


def _nobody(result: Result) -> None:
    """Receives the result of a cancelled attempt, and drops it."""
