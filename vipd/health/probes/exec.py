"""Whether a program says that a backend is fit: it ends with 0 in time.

Each run has a thread of its own pool. Privileges, and the flag that no program may gain any, belong to a
thread in Linux: these threads have given up theirs, so the programs are born without, while vipd keeps its
own. (A change of user alone would not do when vipd runs without root but with ambient capabilities.)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import pwd
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TypedDict, cast

from vipd.accounts import CHECK_USER, CheckUsers, UserRefusedError
from vipd.checks import ExecProbe
from vipd.health.probes.base import Attempt, Done, unexpected
from vipd.health.result import Result, one_line
from vipd.health.targets import Target

PROGRAMS_AT_ONCE = 32
KILLED_SECONDS = 5.0
"""How long to wait for the end of what was killed: without CAP_KILL nothing of another user's is."""
_MAY_KILL = "hint: give vipd CAP_KILL, as exec-checks.conf does"
MOST_OUTPUT = 64 * 1024
"""What a program says beyond is thrown away."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4  # linux/prctl.h


class ExecProber:
    """Runs programs, so many at once; others wait for their turn. Use it as a context manager."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, users: CheckUsers, at_once: int = PROGRAMS_AT_ONCE
    ) -> None:
        self._loop, self._users, self._left = loop, users, _Left()
        self._threads = ThreadPoolExecutor(at_once, "vipd exec check")
        self._runs: set[_Run] = set()

    def __enter__(self) -> ExecProber:
        return self

    def __exit__(self, *_: object) -> None:
        for run in tuple(self._runs):
            run.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def start(self, target: Target, done: Done) -> Attempt:
        """Ask once; the timeout begins when the program does."""
        run = _Run(target, self._users, self._left)
        try:
            future = self._loop.run_in_executor(self._threads, run.to_end)
        except RuntimeError as error:
            done(Result.unasked(f"no thread for it: {error}; hint: raise TasksMax of the unit"))
            return run
        self._runs.add(run)

        def finished(future: asyncio.Future[Result]) -> None:
            self._runs.discard(run)
            if future.cancelled() or run.cancelled.is_set():
                return
            error = future.exception()
            done(unexpected(target, error) if isinstance(error, Exception) else future.result())

        future.add_done_callback(finished)
        return run


class _Left:
    """Programs that run on, since vipd may not end them. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """One more."""
        with self._lock:
            self._running.append(process)

    def require_few(self) -> None:
        """Raises NotEndedError while there are so many that there should not be another."""
        with self._lock:
            self._running = [process for process in self._running if process.poll() is None]
            if len(self._running) >= PROGRAMS_AT_ONCE:
                raise NotEndedError(
                    f"{len(self._running)} programs that should have ended run on; {_MAY_KILL}"
                )


class _Run:
    """One run of a program. `to_end` belongs to a thread of the pool, `cancel` to the loop's."""

    def __init__(self, target: Target, users: CheckUsers, left: _Left) -> None:
        self._target, self._probe = target, cast("ExecProbe", target.probe)
        self._users, self._left = users, left
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._group: int | None = None
        """The process group to end: while its leader is not reaped, nobody else's can have the number."""

    def cancel(self) -> None:
        """End it if it runs; never let it start if it does not."""
        self.cancelled.set()
        self._kill()

    def to_end(self) -> Result:
        """Run the program."""
        if self.cancelled.is_set():
            return Result.unasked("stopped")
        if not self._probe.command:
            return Result.unasked("it has no command")
        began = time.monotonic()
        try:
            self._left.require_few()
            _give_up_privileges()
            with self._started() as process:
                told = self._watch(process, began + self._target.timing.timeout)
        except (OSError, subprocess.SubprocessError, UserRefusedError, KeyError, ValueError) as error:
            return Result.unasked(trouble(self._probe, error))
        if told is None:
            return Result.timeout(self._target.timing.timeout)
        return _judged(process.returncode, told, time.monotonic() - began)

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The program running; afterwards it is dead and reaped, with all of its group."""
        # Asked again: since the declaration was looked at, the account may have become another one.
        process = subprocess.Popen(
            self._probe.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd="/",
            env=environment(self._target),
            start_new_session=True,
            umask=0o077,
            **_identity(self._users.account(self._probe.user)),
        )
        with self._lock:
            self._group = process.pid
        try:
            if self.cancelled.is_set():
                self._kill()
            yield process
        finally:
            self._kill()
            ended = _ends_within(process, KILLED_SECONDS)
            with self._lock:
                # From here on the number may be that of another group.
                self._group = None
                if ended:
                    process.wait()
            if process.stdout is not None:
                process.stdout.close()
            if not ended:
                self._left.add(process)
                raise NotEndedError(f"{self._probe.command[0]} cannot be ended; {_MAY_KILL}")

    def _watch(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """What the program says first, once it has ended; None when its time is up.

        Its end is what counts, not that of its output: children that it leaves may hold that open.
        """
        output = cast("IO[bytes]", process.stdout).fileno()
        os.set_blocking(output, False)
        ended = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.register(output, select.POLLIN)
            told = b""
            while (left := deadline - time.monotonic()) > 0:
                ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
                more = _read(output) if output in ready else None
                told = (told + (more or b""))[:MOST_OUTPUT]
                if ended in ready:
                    return told
                if more == b"":
                    poll.unregister(output)
            return None
        finally:
            os.close(ended)

    def _kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._group is not None:
                os.killpg(self._group, signal.SIGKILL)


def environment(target: Target) -> dict[str, str]:
    """All that a program is told."""
    return {
        "PATH": PATH,
        "VIPD_ADDRESS": target.address,
        "VIPD_PORT": str(target.port),
        "VIPD_PROTOCOL": str(target.protocol),
    }


def trouble(probe: ExecProbe, error: Exception) -> str:
    """Why a program could not be started: what; hint."""
    if isinstance(error, KeyError):
        return f"there is no user {probe.user or CHECK_USER}"
    if isinstance(error, UserRefusedError | NotEndedError):
        return str(error)
    program = probe.command[0] if probe.command else "no program"
    # Refused: the change of user, or the program itself, if that user may not run it.
    if isinstance(error, PermissionError) and error.errno == errno.EPERM:
        hint = "it needs CAP_SETUID, CAP_SETGID and CAP_KILL"
        return f"vipd may not become {probe.user or CHECK_USER}; hint: {hint}"
    why = error.strerror if isinstance(error, OSError) else str(error)
    return f"{program}: {(why or str(error)).lower()}"


class NotEndedError(subprocess.SubprocessError):
    """A program that runs on: which, why; hint."""


class _Identity(TypedDict, total=False):
    """Popen's arguments for running as another user."""

    user: int
    group: int
    extra_groups: tuple[int, ...]


def _identity(entry: pwd.struct_passwd) -> _Identity:
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": ()}


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ends in time. It is not reaped."""
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def _read(output: int) -> bytes | None:
    """Some of what was said; empty at its end, None when there is nothing now."""
    try:
        return os.read(output, MOST_OUTPUT)
    except BlockingIOError:
        return None


def _judged(code: int, told: bytes, seconds: float) -> Result:
    first = one_line(told.decode(errors="replace").strip().partition("\n")[0])
    if code == 0:
        return Result.answered(seconds, note=first)
    how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    return Result.bad(f"{how}{first and f': {first}'}", seconds)


def _signal_name(number: int) -> str:
    """Python has names of those that are not for real-time use."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _give_up_privileges() -> None:
    """Give up what programs of this thread could inherit or gain. Raises SubprocessError."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in (
        (_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0),
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
    ):
        if prctl(*map(ctypes.c_ulong, arguments)) != 0:
            number = ctypes.get_errno()
            raise subprocess.SubprocessError(f"privileges cannot be given up: {os.strerror(number)}")
