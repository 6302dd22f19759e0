"""Starts and ends programs of the operator: a stand-alone program, standard library only, that
`unprivileged.py` runs.

Its standard input is a socket of vipd's, which passes further sockets, each with a byte. For each it forks a
keeper, which reads a command (a line of JSON) from that socket, runs it, and answers with a line. A keeper is
the reaper of all descendants of its program (PR_SET_CHILD_SUBREAPER), so none escapes, whatever session it
creates. The keeper ends all of them, and then itself, when the program has ended or timed out, or vipd has
closed the socket, as it does however vipd ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

MOST_OUTPUT = 64 * 1024
"""Further output of a program is dropped."""
KILLED_SECONDS = 5.0
"""How long to wait for the end of killed processes: without CAP_KILL those of other users do not end."""
_LOOK_SECONDS = 0.005
_PATIENT_SECONDS = 0.5
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4

_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
"""Numbers of system calls, the same on every architecture."""
_LANDLOCK_SCOPES = struct.pack("=3Q", 0, 0, 1 | 2)
"""struct landlock_ruleset_attr of linux/landlock.h: no rules on files or ports; abstract sockets and signals
are scoped."""

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl


def main() -> None:
    """Fork a keeper for each socket received, until vipd closes its own or has ended."""
    _set(_PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=os.dup(0)) as orders:
        keepers: set[int] = set()
        while True:
            _reap(keepers)
            if not select.select([orders], [], [], _PATIENT_SECONDS if keepers else None)[0]:
                continue
            some, sockets, _, _ = socket.recv_fds(orders, 1, 1)
            if not some:
                return
            for descriptor in sockets:
                os.set_inheritable(descriptor, False)
                keepers.add(_forked(descriptor, orders))


def _forked(descriptor: int, orders: socket.socket) -> int:
    """The pid of a new keeper."""
    pid = os.fork()
    if pid:
        os.close(descriptor)
        return pid
    try:
        orders.close()
        os.close(0)  # vipd must see that no process has the other end any more
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        with socket.socket(fileno=descriptor) as vipd:
            _keep(vipd)
    except BaseException as error:
        sys.stderr.write(f"vipd: a keeper of a program failed: {error!r}\n")
    finally:
        os._exit(0)


def _reap(keepers: set[int]) -> None:
    """Reap keepers that have ended; end what a killed one has left."""
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
            keepers.discard(pid)
    for orphan in set(_children()) - keepers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(orphan, signal.SIGKILL)


def _keep(vipd: socket.socket) -> None:
    _set(_PR_SET_CHILD_SUBREAPER, 1)
    answer = _ran(vipd, _request(vipd))
    if not _end_all(KILLED_SECONDS):
        _say(vipd, {"left": True})
        while not _end_all(KILLED_SECONDS):
            pass
        return
    _say(vipd, answer)


def _request(vipd: socket.socket) -> dict[str, Any]:
    vipd.settimeout(KILLED_SECONDS)
    with vipd.makefile("rb") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    return request


def _ran(vipd: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a program: `code`, `told` and `seconds`; `timeout`; or why it did not start, `errno` or
    `failed`. Its descendants may still run."""
    reading, writing = os.pipe()
    failing, failed = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _become(request, writing, failed)
    os.close(writing)
    os.close(failed)
    with open(failing, "rb") as faults:  # noqa: PTH123 (a descriptor): it ends when the program begins
        if fault := faults.read():
            found: dict[str, Any] = json.loads(fault)
            return found
    told, ended = _watch(vipd, (pid, reading), began + request["timeout"])
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # at once, while the pid cannot be reused: it is not reaped
    if not ended:
        return {"timeout": True}
    status = os.waitpid(pid, 0)[1]
    return {
        "code": os.waitstatus_to_exitcode(status),
        "told": told.decode("latin-1"),
        "seconds": time.monotonic() - began,
    }


def _become(request: dict[str, Any], output: int, failed: int) -> None:
    """Be the program, with no privilege, and the kernel's promise to end when the keeper does."""
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if request["stdin"]:
            os.dup2(_file_with(request["stdin"]), 0)
        os.chdir("/")
        os.umask(0o077)
        _set(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
        _set(_PR_SET_NO_NEW_PRIVS, 1)
        _leave_others_alone()
        _leave_others_room(request["processes"])
        os.setgroups([])
        os.setresgid(*[request["gid"]] * 3)
        os.setresuid(*[request["uid"]] * 3)
        _set(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execve(request["command"][0], request["command"], request["environment"])  # noqa: S606
    except OSError as error:
        fault: dict[str, Any] = {"errno": error.errno, "failed": error.strerror or str(error)}
    except BaseException as error:
        fault = {"failed": str(error)}
    os.write(failed, json.dumps(fault).encode())
    os._exit(127)


def _leave_others_alone() -> None:
    """Signal, trace and reach by abstract sockets its own descendants alone: other programs may run as the
    same user. A kernel before Linux 6.12, or without Landlock, does not enforce it."""
    size = ctypes.c_size_t(len(_LANDLOCK_SCOPES))
    rules = _libc.syscall(ctypes.c_long(_LANDLOCK_CREATE_RULESET), _LANDLOCK_SCOPES, size, ctypes.c_uint(0))
    if rules >= 0:
        _libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), ctypes.c_int(rules), ctypes.c_uint(0))
        os.close(rules)


def _leave_others_room(processes: int | None) -> None:
    """Be what the kernel ends first when memory runs out, and let the user of this program have at most so
    many processes and threads. A host that refuses it runs the program all the same."""
    with contextlib.suppress(OSError, ValueError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    if processes is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _file_with(text: str) -> int:
    """A file in memory that contains a text. A pipe holds too little: someone would have to write to it while
    the program runs."""
    descriptor = os.memfd_create("stdin")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _watch(vipd: socket.socket, program: tuple[int, int], deadline: float) -> tuple[bytes, bool]:
    """A program's first output, and whether it has ended; if not, it timed out, or vipd closed the socket.

    The end of the program counts, not of its output: children that it leaves may hold that open.
    """
    pid, output = program
    os.set_blocking(output, False)
    ended = os.pidfd_open(pid)
    poll = select.poll()
    for descriptor in (ended, output, vipd.fileno()):
        poll.register(descriptor, select.POLLIN)
    told = b""
    while (left := deadline - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
        if output in ready:
            more = _read(output)
            told = (told + (more or b""))[:MOST_OUTPUT]
            if more == b"":
                poll.unregister(output)
        if ended in ready:
            return told, True
        if vipd.fileno() in ready:
            break
    return told, False


def _read(output: int) -> bytes | None:
    """Some of the output; empty at its end, None when there is none now."""
    try:
        return os.read(output, MOST_OUTPUT)
    except BlockingIOError:
        return None


def _end_all(seconds: float) -> bool:
    """End every descendant; returns whether all ended in time. Orphans become children of this process."""
    deadline = time.monotonic() + seconds
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] > 0:
                pass
        except ChildProcessError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)


def _children() -> list[int]:
    """The pids of this process's children, including those that /proc hides as other users'; none if the
    kernel does not report them (it is without CONFIG_PROC_CHILDREN)."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _say(vipd: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        vipd.sendall(json.dumps(answer).encode() + b"\n")


def _set(*arguments: int) -> None:
    if _prctl(*map(ctypes.c_ulong, (*arguments, *[0] * (5 - len(arguments))))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"privileges cannot be given up: {os.strerror(number)}")


if __name__ == "__main__":
    main()
