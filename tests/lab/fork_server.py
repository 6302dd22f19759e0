"""Starts `python -m MODULE` in a namespace by a fork of a process that has imported vipd.

tests/README.md says why.

A started program has the standard input, output and error, the environment, directory, namespaces and
/proc/PID/cmdline that `ip netns exec NAMESPACE python -m MODULE` would give it. What differs is the memory of
all that was imported.
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
from typing import IO

import vipd

ROOT = Path(__file__).parents[2]
WANTED = os.environ.get("VIPD_FORK_SERVER") != "no"
PROGRAMS = {
    # Besides all of vipd what it imports when it needs it, at each start: a fifth of a second.
    "vipd": ("pyroute2", "anyio.to_thread", "anyio.abc", "anyio._backends._asyncio"),
    "lab": ("tests.lab.client", "tests.lab.server"),
}
"""What each server imports. A fork takes the longer the more its process has imported: `lab` is for programs
of the tests that import nothing of vipd."""
WITHOUT_VIPD = ("tests.lab.", "tests.observe.explain.")
MAX_REQUEST_BYTES = 200_000
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; raises TimeoutExpired after `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            (self.returncode,) = _NUMBER.unpack(self._status.read(_NUMBER.size))
            self._status.close()
        return self.returncode


def can_fork(argv: Sequence[str]) -> bool:
    """Whether the server may start a command line: `python -m` with a module of vipd or of the tests."""
    return WANTED and list(argv[:2]) == [sys.executable, "-m"] and argv[2].startswith(("vipd", "tests."))


class ForkServer:
    """A server of this process, which ends with it."""

    def __init__(self, programs: str) -> None:
        """`programs`: a key of PROGRAMS."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            passed = (theirs.fileno(), _OWN_NETWORK)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, programs, *map(str, passed), ROOM_FOR_ARGUMENTS],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
            )

    def start(
        self,
        namespace: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int = 2,
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
            request = (namespace, argv[2:], str(Path.cwd()), {**own_environment(), **environment})
            errors = stdout if stderr == subprocess.STDOUT else stderr
            socket.send_fds(self._socket, [json.dumps(request).encode()], [report, stdin, stdout, errors])
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
            stdin, stdout, stderr = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
            stdin.write(text or "")
            stdin.seek(0)
            process = self.start(
                namespace,
                argv,
                environment,
                stdin=0 if text is None else stdin.fileno(),
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
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
    """The server for a module; started when first asked for, also by several threads at once."""
    with _starting:
        return _fork_server("lab" if module.startswith(WITHOUT_VIPD) else "vipd")


@functools.cache
def _fork_server(programs: str) -> ForkServer:
    return ForkServer(programs)


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request, and report the ID of the process and later its exit code, until nobody is left
    to ask. Returns, in each forked process, the command line that it is to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the tests
    running: dict[int, tuple[int, int]] = {}  # by the descriptor of a process: its ID, and where to report
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                pid, report = running.pop(descriptor)
                poll.unregister(descriptor)
                _report(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(descriptor)
                os.close(report)
                continue
            data, passed, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 4)
            if not data:
                raise SystemExit
            report, *standard = passed
            if (pid := os.fork()) == 0:
                reports = (each for _, each in running.values())
                for each in (requests.detach(), report, *running, *reports):
                    os.close(each)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                return _become(data, standard)
            for each in standard:
                os.close(each)
            _report(report, pid)
            process = os.pidfd_open(pid)
            running[process] = pid, report
            poll.register(process, select.POLLIN)


def _report(to: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(to, _NUMBER.pack(number))


def _become(data: bytes, standard: Sequence[int]) -> list[str]:
    """Make this process the one that was asked for; returns its command line."""
    namespace, argv, directory, environment = json.loads(data)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # As a new interpreter opens them: those of the server were opened for other files.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    if namespace:
        _enter(namespace, ctypes.CDLL(None, use_errno=True))
    _show_as([sys.executable, "-m", *argv])
    return list(argv)


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
    _programs, _requests, _network = sys.argv[1:4]
    # Who starts it may be in the namespace of a test, whose end ends every process there.
    _call(ctypes.CDLL(None, use_errno=True), "setns", int(_network), CLONE_NEWNET)
    for _descriptor in (int(_network), _OWN_NETWORK):
        os.close(_descriptor)
    import_all(_programs)
    _module, *sys.argv[1:] = _serve(socket.socket(fileno=int(_requests)))
    _code = _run(_module)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(_code)  # the interpreter's own end would go through everything that was imported
