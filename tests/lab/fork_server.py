"""Starts `python -m MODULE` in a namespace by a fork of a process that has imported vipd already.

Most of the time of a start of vipd goes into imports, and the tests start it and vipctl thousands of times.
The server imports all modules once, and each start is a fork of it with the standard input, output and error,
the environment, directory, namespaces and /proc/PID/cmdline that `ip netns exec NAMESPACE python -m MODULE`
would give it. What differs is the memory of all that was imported. `VIPD_FORK_SERVER=no` does without, as
`tests/run.sh --nightly` does.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import vipd

ROOT = Path(__file__).parents[2]
WANTED = os.environ.get("VIPD_FORK_SERVER") != "no"
"""Whether programs are started this way."""
MODULES = ("vipd", "tests.")
"""Where modules begin that it starts."""
MAX_REQUEST_BYTES = 200_000
EMPTY: Mapping[str, str] = MappingProxyType({})
IMPORTED_LATER = ("pyroute2", "anyio.to_thread", "anyio.abc", "anyio._backends._asyncio")
"""What vipd imports when it needs it, at each start: a fifth of a second of processor time."""
ROOM_FOR_ARGUMENTS = " " * 4000
"""The server's last argument: a forked vipd writes its own command line over it, for ps and /proc."""
_NUMBER = struct.Struct("i")
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
    return WANTED and list(argv[:2]) == [sys.executable, "-m"] and argv[2].startswith(MODULES)


class ForkServer:
    """The server's process, and requests to it. One for each process that runs tests."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            inherited = (other.fileno(), _OWN_NETWORK)
            argv = [sys.executable, "-m", __name__, *map(str, inherited), ROOM_FOR_ARGUMENTS]
            self._process = subprocess.Popen(
                argv, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=ROOT
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
                "environment": {**os.environ, **environment},
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


_starting = threading.Lock()


def fork_server(process: int) -> ForkServer:
    """The server of the process with this ID, the caller's own; started when first asked for, also by several
    threads at once."""
    with _starting:
        return _fork_server(process)


@functools.cache
def _fork_server(_process: int) -> ForkServer:
    return ForkServer()


def _serve(connection: socket.socket) -> list[str]:
    """Fork for each request until nobody is left to ask. Returns, in each forked process that is to run a
    module, its command line."""
    for found in pkgutil.walk_packages(vipd.__path__, "vipd."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for module in IMPORTED_LATER:
        importlib.import_module(module)
    gc.freeze()  # so that collections in the forked processes copy no pages of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that report
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 4)
        if not data:
            raise SystemExit
        if os.fork() == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            return _fork_and_report(json.loads(data), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_and_report(request: dict[str, Any], status: int, *standard: int) -> list[str]:
    """Returns the command line in the process that is to run it. Its parent reports its ID, later its exit
    code, and ends."""
    pid = os.fork()
    if pid:
        for descriptor in standard:
            os.close(descriptor)
        os.write(status, _NUMBER.pack(pid))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, _NUMBER.pack(code))
        os._exit(0)
    os.close(status)
    for number, descriptor in enumerate(standard):
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


if __name__ == "__main__":
    # Who starts it may be in the namespace of a test, whose end ends every process there.
    _call(ctypes.CDLL(None, use_errno=True), "setns", int(sys.argv[2]), CLONE_NEWNET)
    for _descriptor in (int(sys.argv[2]), _OWN_NETWORK):
        os.close(_descriptor)
    _module, *sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    _code = _run(_module)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(_code)  # the interpreter's own end would go through everything that was imported
