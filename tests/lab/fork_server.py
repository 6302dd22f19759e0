"""Starts `python -m MODULE` in a namespace by a fork of a process that has imported vipd already.

Most of the time of a start of vipd goes into imports, and the tests start it and vipctl thousands of times.
A server imports all modules once, and each start is a fork of it with the standard input, output and error,
the environment, directory, namespaces and /proc/PID/cmdline that `ip netns exec NAMESPACE python -m MODULE`
would give it. What differs is the memory of all that was imported. All processes of a test run share two of
them: one for vipd, and a small one for servers and clients, since a fork takes the longer the more its
process has imported. `VIPD_FORK_SERVER=no` does without, as `tests/run.sh --nightly` does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

import vipd

ROOT = Path(__file__).parents[2]
WANTED = os.environ.get("VIPD_FORK_SERVER") != "no"
"""Whether programs are started this way."""
PROGRAMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Besides all of vipd what it imports when it needs it, at each start: a fifth of a second.
        "vipd": ("pyroute2", "anyio.to_thread", "anyio.abc", "anyio._backends._asyncio"),
        "lab": ("tests.lab.client", "tests.lab.server"),
    }
)
"""What each server imports: `lab` is for programs of the tests that import nothing of vipd."""
WITHOUT_VIPD = ("tests.lab.", "tests.observe.explain.")
"""How their names begin."""
START_SECONDS = 60.0
MAX_REQUEST_BYTES = 200_000
EMPTY: Mapping[str, str] = MappingProxyType({})
ROOM_FOR_ARGUMENTS = " " * 4000
"""The server's last argument: a forked vipd writes its own command line over it, for ps and /proc."""
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
"""The name of this test run. Its threads may be in other network namespaces, and so a server has a path."""
_NUMBER = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED gives them."""
_OWN_NETWORK = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
"""The namespace of the process that imports this, before any of its threads enters another one."""
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_REC, MS_SLAVE, MNT_DETACH = 16384, 1 << 19, 2


class ForkedProcess(subprocess.Popen[str]):
    """A process started by the server. It is no child of this process: its exit code comes by a pipe."""

    def __init__(
        self, argv: Sequence[str], status: int, stdin: IO[str] | None, stdout: IO[str] | None
    ) -> None:  # not Popen's: that would start a program
        self.args = list(argv)
        self.stdin, self.stdout, self.stderr = stdin, stdout, None
        self.returncode: int | None = None
        self._status = os.fdopen(status, "rb", buffering=0)
        (self.pid,) = _NUMBER.unpack(self._status.read(_NUMBER.size))

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._read_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            return self._read_code()
        return self.returncode

    def _read_code(self) -> int:
        (code,) = _NUMBER.unpack(self._status.read(_NUMBER.size))
        self._status.close()
        self.returncode = int(code)
        return self.returncode


def can_fork(argv: Sequence[str]) -> bool:
    """Whether the server may start a command line: `python -m` with a module of vipd or of the tests."""
    return WANTED and list(argv[:2]) == [sys.executable, "-m"] and argv[2].startswith(("vipd", "tests."))


class ForkServer:
    """A connection of this process to the server of its test run, which it starts if there is none."""

    def __init__(self, programs: str) -> None:
        """`programs`: a key of PROGRAMS. Raises TimeoutError when the server does not start."""
        self._address = f"{tempfile.gettempdir()}/vipd-tests-{RUN}-{programs}.sock"
        self._process: subprocess.Popen[bytes] | None = None
        end = time.monotonic() + START_SECONDS
        while (connected := self._connect()) is None:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start_server(programs)
            if time.monotonic() > end:
                raise TimeoutError(f"the fork server for {programs} does not start")
            time.sleep(0.01)
        self._socket = connected

    def _connect(self) -> socket.socket | None:
        """A connection that the server has accepted; None when none listens or it is about to end."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(START_SECONDS)
        try:
            connection.connect(self._address)
            if connection.recv(1) and _is_own_user(connection):
                connection.settimeout(None)
                return connection
        except OSError:
            pass
        connection.close()
        return None

    def _start_server(self, programs: str) -> subprocess.Popen[bytes]:
        """Another process may do so at the same time: all servers but one end at once."""
        argv = [sys.executable, "-m", __name__, self._address, programs, str(_OWN_NETWORK)]
        return subprocess.Popen(
            [*argv, ROOM_FOR_ARGUMENTS],
            pass_fds=[_OWN_NETWORK],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
        )

    def start(
        self,
        namespace: str,
        argv: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int = 2,
        environment: Mapping[str, str] = EMPTY,
    ) -> ForkedProcess:
        """Start `python -m MODULE ARGUMENTS...` in a network namespace ("": that of this process when it
        began), with these descriptors as its standard input, output and error; None is a pipe, and STDOUT has
        the errors go where the output goes. Its environment is this process's own and what is given."""
        pipes: list[IO[str] | None] = [None, None]
        status, report = os.pipe()
        theirs = [report]
        try:
            if stdin is None:
                stdin, writing = os.pipe()
                theirs.append(stdin)
                pipes[0] = os.fdopen(writing, "w", buffering=1)
            if stdout is None:
                reading, stdout = os.pipe()
                theirs.append(stdout)
                pipes[1] = os.fdopen(reading)
            request = {
                "namespace": namespace,
                "argv": argv[2:],
                "directory": str(Path.cwd()),
                "environment": {**own_environment(), **environment},
            }
            data = json.dumps(request).encode()
            errors = stdout if stderr == subprocess.STDOUT else stderr
            socket.send_fds(self._socket, [data], [report, stdin, stdout, errors])
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        return ForkedProcess(argv, status, *pipes)

    def run(
        self,
        namespace: str,
        argv: Sequence[str],
        text: str | None,
        timeout: float,
        environment: Mapping[str, str],
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run with captured output: `text` is the standard input, else it is this process's
        own. TimeoutExpired after `timeout` seconds, when it has ended it."""
        with contextlib.ExitStack() as files:
            given, stdout, stderr = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            given.write(text or "")
            given.seek(0)
            process = self.start(
                namespace,
                argv,
                stdin=0 if text is None else given.fileno(),
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
                environment=environment,
            )
            try:
                code = process.wait(timeout)
            except BaseException:
                process.kill()
                process.wait()
                raise
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(argv, code, stdout.read(), stderr.read())


def own_environment() -> dict[str, str]:
    """A copy of this process's environment. Meanwhile another thread may take names out of it, as pytest does
    with that of the test that runs: `{**os.environ}` may then end in KeyError."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


_starting = threading.Lock()


def fork_server(module: str) -> ForkServer:
    """The server for a module; connected to when first asked for, also by several threads at once."""
    with _starting:
        return _fork_server("lab" if module.startswith(WITHOUT_VIPD) else "vipd")


@functools.cache
def _fork_server(programs: str) -> ForkServer:
    return ForkServer(programs)


def _is_own_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to the user of this process: others may have taken the path."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


@dataclass
class _Request:
    """A program that is asked for: JSON, where to report, and its standard input, output and error."""

    data: bytes
    report: int
    standard: Sequence[int]


class _Server:
    """What the server has open."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: dict[int, socket.socket] = {}
        self._running: dict[int, tuple[int, int]] = {}
        """By the file descriptor of a process: its ID, and where to report its end."""
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self) -> list[str]:
        """Fork for each request, and report the ID of the process and later its exit code, until nobody is
        left to ask. Returns, in each forked process, the command line that it is to run."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the tests
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._running:
                    self._report_end(descriptor)
                elif descriptor == self._listener.fileno():
                    self._accept()
                elif request := self._receive(self._connections[descriptor]):
                    pid = os.fork()
                    if pid == 0:
                        self._close_all()
                        signal.signal(signal.SIGINT, signal.default_int_handler)
                        return _become(request)
                    self._remember(pid, request)

    def _accept(self) -> None:
        connection = self._listener.accept()[0]
        connection.send(b"1")
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _receive(self, connection: socket.socket) -> _Request | None:
        data, passed, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 4)
        if data:
            return _Request(data, passed[0], passed[1:])
        self._poll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()
        if not self._connections:
            os.unlink(self._listener.getsockname())  # noqa: PTH108
            raise SystemExit
        return None

    def _remember(self, pid: int, request: _Request) -> None:
        for descriptor in request.standard:
            os.close(descriptor)
        _report(request.report, pid)
        process = os.pidfd_open(pid)
        self._running[process] = pid, request.report
        self._poll.register(process, select.POLLIN)

    def _report_end(self, process: int) -> None:
        pid, report = self._running.pop(process)
        _report(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        self._poll.unregister(process)
        os.close(process)
        os.close(report)

    def _close_all(self) -> None:
        for each in (self._listener, *self._connections.values()):
            each.close()
        for process, (_, report) in self._running.items():
            os.close(process)
            os.close(report)


def _report(to: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(to, _NUMBER.pack(number))


def _become(asked: _Request) -> list[str]:
    """Make this process the one that was asked for; returns its command line."""
    request = json.loads(asked.data)
    os.close(asked.report)
    for number, descriptor in enumerate(asked.standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # As a new interpreter opens them: those of the server were opened for other files.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    if namespace := request["namespace"]:
        _enter(namespace, ctypes.CDLL(None, use_errno=True))
    argv: list[str] = request["argv"]
    _show_as([sys.executable, "-m", *argv])
    return argv


def _call(libc: ctypes.CDLL, function: str, *arguments: object) -> None:
    if getattr(libc, function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


def _enter(namespace: str, libc: ctypes.CDLL) -> None:
    """As `ip netns exec` does: the network namespace, and mounts of our own with its /sys."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _call(libc, "setns", descriptor, CLONE_NEWNET)
    os.close(descriptor)
    _call(libc, "unshare", CLONE_NEWNS)
    _call(libc, "mount", b"", b"/", b"none", ctypes.c_ulong(MS_SLAVE | MS_REC), None)
    _call(libc, "umount2", b"/sys", MNT_DETACH)
    _call(libc, "mount", namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None)


def _show_as(argv: list[str]) -> None:
    """Have /proc/PID/cmdline hold this: vipctl and doctor recognise a running vipd by it. It is written where
    the server's own command line stood, which is long enough."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = b"".join(word.encode() + b"\0" for word in argv)[: end - begin]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _run(module: str) -> int:
    """Run a module as `python -m` does; its exit code."""
    sys.modules.pop(module, None)  # runpy warns of a module that is there already
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def import_all(programs: str) -> None:
    """Import what these programs may ever need, see `PROGRAMS`."""
    gc.disable()
    if programs == "vipd":
        for found in pkgutil.walk_packages(vipd.__path__, "vipd."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    for module in PROGRAMS[programs]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that collections in the forked processes copy no pages of it
    gc.enable()


if __name__ == "__main__":
    _address, _programs, _network = sys.argv[1:4]
    # Who starts it may be in the namespace of a test, whose end ends every process there.
    _call(ctypes.CDLL(None, use_errno=True), "setns", int(_network), CLONE_NEWNET)
    for _descriptor in (int(_network), _OWN_NETWORK):
        os.close(_descriptor)
    _listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _umask = os.umask(0o077)  # nobody else may connect
    try:
        _listener.bind(_address)
    except OSError:
        sys.exit()  # another one serves
    os.umask(_umask)
    _listener.listen()
    import_all(_programs)
    _module, *sys.argv[1:] = _Server(_listener).serve()
    _code = _run(_module)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(_code)  # the interpreter's own end would go through everything that was imported
