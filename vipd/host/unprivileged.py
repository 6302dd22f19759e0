"""Runs programs of the operator, of checks or for events, as a user without privileges.

A separate process (`program_runner.py`) runs the programs, and ends all their descendants, also when vipd is
killed. It is small, so that it forks fast, and runs as vipd's user: a program of another user cannot
harm it. Threads here look users up and wait for answers; nothing here may be called on the event loop but
`ProgramRun.cancel`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vipd.host import program_runner
from vipd.host.accounts import CHECK_USER, CheckUsers, UserRefusedError

MAX_UNENDED = 32
"""While so many programs run on that vipd may not end, no other one is started."""
PATIENCE_SECONDS = 2 * program_runner.KILLED_SECONDS
"""A runner that has not answered so long after the timeout does not work."""
AUTHOR_PROCESSES = 128
"""Processes and threads that a user without an account may have: a quarter of the TasksMax of the package's
service, so that one author's programs leave vipd enough."""
MOST_ANSWER = 8 * program_runner.MOST_OUTPUT
_MAY_KILL = "hint: give vipd CAP_KILL, as exec-checks.conf does"

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run, without a shell."""

    command: tuple[str, ...]
    """Its absolute path and its arguments."""
    timeout: float
    """Seconds after which it is killed, with all its descendants."""
    user: str = ""
    """User that runs it; empty: the default user (vipd/host/accounts.py)."""
    uid: int | None = None
    """Number of the user that runs it, with the group of `user`; None: that of `user`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """All that it is given beside PATH."""
    stdin: str = ""
    """Its standard input; empty: /dev/null."""


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """How a program ended."""

    exit_code: int | None
    """Negative: the signal that killed it. None: it did not end in time, and was killed."""
    output: str = ""
    """The beginning of what it wrote to stdout and stderr."""
    seconds: float = 0.0

    @property
    def first_line(self) -> str:
        """The first line of its output that is not empty; it may have control characters."""
        return self.output.strip().partition("\n")[0]

    @property
    def failure(self) -> str:
        """`exit code 3: too slow`, `killed by SIGSEGV`; empty if it ended with 0 or did not end."""
        if not self.exit_code:
            return ""
        code, first = self.exit_code, self.first_line
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        return f"{how}{first and f': {first}'}"


class ProgramError(Exception):
    """A program could not be run: what; hint."""


class NotEndedError(subprocess.SubprocessError):
    """A program that does not end: which, why; hint."""


class ProgramRunners:
    """Starts runners, one for each program. Safe for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._left: list[socket.socket] = []
        """Sockets of runners whose programs continue, since vipd may not end them."""

    def start(self, request: dict[str, Any]) -> socket.socket:
        """The socket on which a runner answers. Raises OSError."""
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
        argv = [sys.executable, "-I", "-S", str(program_runner.__file__)]
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
                self._process.wait(program_runner.KILLED_SECONDS)
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
            if len(self._left) >= MAX_UNENDED:
                raise NotEndedError(f"{len(self._left)} programs that should have ended run on; {_MAY_KILL}")

    def close(self) -> None:
        """End the remaining programs, as far as possible."""
        with self._lock:
            for each in self._left:
                each.close()
            self._left.clear()
            self._end()


class ProgramRun:
    """One run of a program. `to_end` belongs to a thread, `cancel` to any other, also the event loop's."""

    def __init__(self, program: Program, users: CheckUsers, runners: ProgramRunners) -> None:
        self._program, self._users, self._runners = program, users, runners
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

    def to_end(self) -> ProgramOutcome:
        """Run the program. Raises ProgramError when it could not be run."""
        program = self._program
        if self.cancelled.is_set():
            raise ProgramError("stopped")
        if not program.command:
            raise ProgramError("it has no command")
        try:
            self._runners.require_few_left()
            # Looked up again: the account may have changed since the command was checked.
            account = self._users.account(program.user)
            answer = self._answer(
                {
                    "command": program.command,
                    "environment": {"PATH": PATH, **program.environment},
                    "uid": account.pw_uid if program.uid is None else program.uid,
                    "gid": account.pw_gid,
                    "processes": None if program.uid is None else AUTHOR_PROCESSES,
                    "timeout": program.timeout,
                    "stdin": program.stdin,
                }
            )
            if "failed" in answer:
                raise _failure(answer)
        except (OSError, subprocess.SubprocessError, UserRefusedError, KeyError, ValueError) as error:
            raise ProgramError(start_failure(program, error)) from None
        if "timeout" in answer:
            return ProgramOutcome(None, seconds=program.timeout)
        output = answer["told"].encode("latin-1").decode(errors="replace")
        return ProgramOutcome(answer["code"], output, answer["seconds"])

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A runner's answer, once the program and all its descendants have ended. Raises OSError,
        NotEndedError, ValueError."""
        connection = self._runners.start(request)
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
                self._runners.add_left(connection)
            else:
                connection.close()
        if left:
            raise NotEndedError(f"{self._program.command[0]} cannot be ended; {_MAY_KILL}")
        return answer


def _failure(answer: dict[str, Any]) -> Exception:
    """Recreates the exception of a program that could not be started."""
    number = answer.get("errno")
    return OSError(number, answer["failed"]) if number else ValueError(answer["failed"])


def start_failure(program: Program, error: Exception) -> str:
    """Why a program could not be started: what; hint."""
    if isinstance(error, KeyError):
        return f"there is no user {program.user or CHECK_USER}"
    if isinstance(error, UserRefusedError | NotEndedError):
        return str(error)
    name = program.command[0] if program.command else "no program"
    # Refused: the change of user, or the program itself, if that user may not run it.
    if isinstance(error, PermissionError) and error.errno == errno.EPERM:
        hint = "it needs CAP_SETUID, CAP_SETGID and CAP_KILL, which the drop-in exec-checks.conf gives"
        return f"vipd may not become {program.user or CHECK_USER}; hint: {hint}"
    why = error.strerror if isinstance(error, OSError) else str(error)
    return f"{name}: {(why or str(error)).lower()}"


def _signal_name(number: int) -> str:
    """Python has names of those that are not for real-time use."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
