"""Runs a program: exit code 0 in time means that the backend is healthy.

A separate process (`keeper.py`) runs the programs, and ends all their descendants, also when vipd is
killed. It is small, so that it forks fast, and runs as vipd's user: a program of another user cannot
harm it. Threads here look users up and wait for answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from vipd.health.probes import program_runner as keeper
from vipd.health.probes.base import Attempt, ProbeCallback, internal_error_result
from vipd.health.result import ProbeResult, one_line
from vipd.host.accounts import CHECK_USER, CheckUsers, UserRefusedError
from vipd.model.check import ExecProbe
from vipd.model.check_target import CheckTarget

PROGRAMS_AT_ONCE = 32
PATIENCE_SECONDS = 2 * keeper.KILLED_SECONDS
"""A keeper that has not answered so long after the timeout does not work."""
MOST_ANSWER = 8 * keeper.MOST_OUTPUT
_MAY_KILL = "hint: give vipd CAP_KILL, as exec-checks.conf does"

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ExecProber:
    """Runs programs, so many at once; others wait for their turn. Use it as a context manager."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, users: CheckUsers, at_once: int = PROGRAMS_AT_ONCE
    ) -> None:
        self._loop, self._users, self._keepers = loop, users, _Keepers()
        self._threads = ThreadPoolExecutor(at_once, "vipd exec check")
        self._runs: set[_Run] = set()

    def __enter__(self) -> ExecProber:
        return self

    def __exit__(self, *_: object) -> None:
        for run in tuple(self._runs):
            run.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._keepers.close()

    def start(self, target: CheckTarget, done: ProbeCallback) -> Attempt:
        """Probe once; the timeout begins when the program starts."""
        run = _Run(target, self._users, self._keepers)
        try:
            future = self._loop.run_in_executor(self._threads, run.to_end)
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


class _Keepers:
    """Runs programs, each by a keeper. Safe for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._left: list[socket.socket] = []
        """Sockets of keepers whose programs continue, since vipd may not end them."""

    def start(self, request: dict[str, Any]) -> socket.socket:
        """The socket on which a keeper answers. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._send(theirs)
                ours.settimeout(PATIENCE_SECONDS)
                ours.sendall(json.dumps(request).encode() + b"\n")
            except OSError:
                ours.close()
                raise
        return ours

    def _send(self, theirs: socket.socket) -> None:
        with self._lock:
            for _ in range(2):
                orders = self._orders or self._begin()
                try:
                    socket.send_fds(orders, [b"+"], [theirs.fileno()])
                    return
                except (BrokenPipeError, ConnectionError):
                    self._end()
        raise OSError(errno.EPIPE, "what runs it ends at once")

    def _begin(self) -> socket.socket:
        self._orders, theirs = socket.socketpair()
        argv = [sys.executable, "-I", "-S", str(keeper.__file__)]
        with theirs:
            try:
                self._process = subprocess.Popen(argv, stdin=theirs.fileno(), start_new_session=True, cwd="/")
            except OSError:
                self._end()
                raise
        return self._orders

    def _end(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(keeper.KILLED_SECONDS)
        self._orders = self._process = None

    def add_left(self, connection: socket.socket) -> None:
        """Add the socket of one whose program continues."""
        with self._lock:
            self._left.append(connection)

    def require_few_left(self) -> None:
        """Raises NotEndedError while there are so many that there should not be another."""
        with self._lock:
            if self._left:
                poll = select.poll()
                for each in self._left:
                    poll.register(each, select.POLLIN)
                ended = {descriptor for descriptor, _ in poll.poll(0)}
                for each in [each for each in self._left if each.fileno() in ended]:
                    self._left.remove(each)
                    each.close()
            if len(self._left) >= PROGRAMS_AT_ONCE:
                raise NotEndedError(f"{len(self._left)} programs that should have ended run on; {_MAY_KILL}")

    def close(self) -> None:
        """End the remaining programs, as far as possible."""
        with self._lock:
            for each in self._left:
                each.close()
            self._left.clear()
            self._end()


class _Run:
    """One run of a program. `to_end` belongs to a thread of the pool, `cancel` to the loop's."""

    def __init__(self, target: CheckTarget, users: CheckUsers, keepers: _Keepers) -> None:
        self._target, self._probe = target, cast("ExecProbe", target.probe)
        self._users, self._keepers = users, keepers
        self.cancelled = threading.Event()
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    def cancel(self) -> None:
        """End it if it runs; else prevent its start."""
        self.cancelled.set()
        self._notify()

    def _notify(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_WR)

    def to_end(self) -> ProbeResult:
        """Run the program."""
        if self.cancelled.is_set():
            return ProbeResult.not_probed("stopped")
        if not self._probe.command:
            return ProbeResult.not_probed("it has no command")
        timeout = self._target.timing.timeout
        try:
            self._keepers.require_few_left()
            # Looked up again: the account may have changed since the declaration was checked.
            account = self._users.account(self._probe.user)
            answer = self._kept(
                {
                    "command": self._probe.command,
                    "environment": environment(self._target),
                    "uid": account.pw_uid,
                    "gid": account.pw_gid,
                    "timeout": timeout,
                }
            )
            if "failed" in answer:
                raise _failure(answer)
        except (OSError, subprocess.SubprocessError, UserRefusedError, KeyError, ValueError) as error:
            return ProbeResult.not_probed(trouble(self._probe, error))
        if "timeout" in answer:
            return ProbeResult.timeout(timeout)
        return _judged(answer["code"], answer["told"].encode("latin-1"), answer["seconds"])

    def _kept(self, request: dict[str, Any]) -> dict[str, Any]:
        """A keeper's answer, once the program and all its descendants have ended. Raises OSError,
        NotEndedError, ValueError."""
        connection = self._keepers.start(request)
        with self._lock:
            self._connection = connection
        if self.cancelled.is_set():
            self._notify()
        left = False
        try:
            connection.settimeout(request["timeout"] + PATIENCE_SECONDS)
            with connection.makefile("rb") as lines:
                line = lines.readline(MOST_ANSWER)
            if not line:
                raise OSError(errno.EPIPE, "what ran it has ended")
            answer: dict[str, Any] = json.loads(line)
            left = "left" in answer
        finally:
            with self._lock:
                self._connection = None
            if left:
                self._keepers.add_left(connection)
            else:
                connection.close()
        if left:
            raise NotEndedError(f"{self._probe.command[0]} cannot be ended; {_MAY_KILL}")
        return answer


def _failure(answer: dict[str, Any]) -> Exception:
    """Recreates the exception of a program that could not be started."""
    number = answer.get("errno")
    return OSError(number, answer["failed"]) if number else ValueError(answer["failed"])


def environment(target: CheckTarget) -> dict[str, str]:
    """All that a program is given."""
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
    """A program that does not end: which, why; hint."""


def _judged(code: int, told: bytes, seconds: float) -> ProbeResult:
    first = one_line(told.decode(errors="replace").strip().partition("\n")[0])
    if code == 0:
        return ProbeResult.success(seconds, note=first)
    how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    return ProbeResult.failure(f"{how}{first and f': {first}'}", seconds)


def _signal_name(number: int) -> str:
    """Python has names of those that are not for real-time use."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
