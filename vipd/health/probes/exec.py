"""Runs a program: exit code 0 in time means that the backend is healthy.

A check that names no user, or the default one, runs as a user of its author, with the default user's group.
`vipd/host/unprivileged.py` runs it, in a thread of the pool here.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from vipd.health.probes.base import Attempt, ProbeCallback, internal_error_result
from vipd.health.result import ProbeResult, one_line
from vipd.host.accounts import CHECK_USER, AuthorUids, CheckUsers
from vipd.host.unprivileged import Program, ProgramError, ProgramOutcome, ProgramRun, ProgramRunners
from vipd.model.check import ExecProbe
from vipd.model.check_target import CheckTarget

PROGRAMS_AT_ONCE = 64
"""One author takes at most half of them (`vipd/model/fair_queue.py`)."""


class ExecProber:
    """Runs programs, so many at once; others wait for their turn. Use it as a context manager."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, users: CheckUsers, at_once: int = PROGRAMS_AT_ONCE
    ) -> None:
        self._loop, self._users, self._runners = loop, users, ProgramRunners()
        self._uids = AuthorUids(users.author_uids)
        self._threads = ThreadPoolExecutor(at_once, "vipd exec check")
        self._runs: set[ProgramRun] = set()

    def __enter__(self) -> ExecProber:
        return self

    def __exit__(self, *_: object) -> None:
        for run in tuple(self._runs):
            run.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._runners.close()

    def start(self, target: CheckTarget, done: ProbeCallback) -> Attempt:
        """Probe once; the timeout begins when the program starts."""
        run = ProgramRun(self._program(target), self._users, self._runners)
        try:
            future = self._loop.run_in_executor(self._threads, _probe, run, target)
        except RuntimeError as error:
            done(ProbeResult.not_probed(f"no thread for it: {error}; hint: raise TasksMax of the unit"))
            return run
        self._runs.add(run)

        def finished(future: asyncio.Future[ProbeResult]) -> None:
            self._runs.discard(run)
            if future.cancelled() or run.cancelled.is_set():
                return
            error = future.exception()
            done(internal_error_result(target, error) if isinstance(error, Exception) else future.result())

        future.add_done_callback(finished)
        return run

    def _program(self, target: CheckTarget) -> Program:
        probe = cast("ExecProbe", target.probe)
        uid = self._uids.of(target.author) if target.author and probe.user in ("", CHECK_USER) else None
        return Program(probe.command, target.timing.timeout, probe.user, uid, environment(target))


def _probe(run: ProgramRun, target: CheckTarget) -> ProbeResult:
    """The result of a check's program; blocks until it has ended."""
    try:
        return _judged(run.to_end(), target)
    except ProgramError as error:
        return ProbeResult.not_probed(str(error))


def environment(target: CheckTarget) -> dict[str, str]:
    """All that a program is given beside PATH."""
    return {
        "VIPD_ADDRESS": target.address,
        "VIPD_PORT": str(target.port),
        "VIPD_PROTOCOL": str(target.protocol),
    }


def _judged(outcome: ProgramOutcome, target: CheckTarget) -> ProbeResult:
    if outcome.exit_code is None:
        return ProbeResult.timeout(target.timing.timeout)
    if outcome.exit_code == 0:
        return ProbeResult.success(outcome.seconds, note=one_line(outcome.first_line))
    return ProbeResult.failure(one_line(outcome.failure), outcome.seconds)
