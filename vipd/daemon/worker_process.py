"""The worker process: asks backends and name servers for the daemon (`vipd/host/worker.py`), and reads what
they answer. It has no privileges, little memory, and no way to change a file or to reach another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import faulthandler
import logging
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from vipd.health.probes.base import Attempt
from vipd.health.probes.remote import ProbeServer
from vipd.host.descriptors import raise_limit
from vipd.host.gc_control import freeze_objects, return_freed_memory, use_one_heap
from vipd.host.systemd.journal import LineFormatter
from vipd.host.worker import Channel
from vipd.resolver.worker_lookups import start_lookup

log = logging.getLogger(__name__)

MOST_MEMORY_BYTES = 256 * 2**20
"""Of private memory that can be written, stacks of threads included."""
STACK_BYTES = 512 * 1024
"""Of a thread."""
RECEIVE_BYTES = 16 * 1024
"""What is read at once from a connection. asyncio reads 256 KiB, and has a buffer of that size for each TLS
connection: a thousand backends that hang would take all memory."""
REST_SECONDS = 10.0
STARTS_PER_TURN = 32
"""Requests that are begun in one turn of the event loop."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_OOM_SCORE = 500
"""The kernel ends it before the daemon, when there is no memory."""

_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
"""Numbers of system calls, the same on every architecture."""
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
_LANDLOCK_VERSIONS = ((16, 3), (16, 0), (15, 0), (14, 0), (13, 0))
"""linux/landlock.h, newest first: the number of rights on files, and what is scoped (abstract sockets and
signals)."""

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 41, (59, 322, 62, 200, 424, 129, 302, 425)),
    "aarch64": (0xC00000B7, 198, (221, 281, 129, 130, 424, 138, 261, 425)),
}
"""Of a machine: its number (linux/audit.h), that of socket, and those of execve, execveat, kill, tkill,
pidfd_send_signal, rt_sigqueueinfo, prlimit64 and io_uring_setup."""
_OTHER_TABLE = 1 << 30
"""From here on x86-64 has the system calls of another ABI."""
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
_NUMBER, _MACHINE, _ARGUMENT = 0, 4, 16  # struct seccomp_data of linux/seccomp.h
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM

Handler = Callable[[Any, Callable[[Any], None]], Attempt]
"""Begins what a request asks for. The callback takes the answer, later."""


def main() -> None:
    """Serve until the daemon closes the socket, which is the standard input, or ends."""
    faulthandler.enable()
    use_one_heap()
    handler = logging.StreamHandler()  # to the standard error, which the daemon logs
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    confine()
    with socket.socket(fileno=os.dup(0)) as connection:
        connection.setblocking(False)
        for name, reader in (("selector_events", "_SelectorTransport"), ("sslproto", "SSLProtocol")):
            getattr(getattr(asyncio, name), reader).max_size = RECEIVE_BYTES
        freeze_objects()
        asyncio.run(serve(connection))
    os._exit(0)  # threads may wait for what never comes


def confine() -> None:
    """Give up all that it does not need. Raises OSError if it still has a privilege; what a kernel does not
    know is left out."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    held = {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines() if line[:3] == "Cap"}
    if held.get("CapPrm:") or held.get("CapEff:"):
        raise OSError("its privileges cannot be given up")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(ctypes.c_ulong(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    libc.prctl(ctypes.c_ulong(_PR_SET_NAME), ctypes.c_char_p(b"vipd-worker"), 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    raise_limit()
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    _change_no_files(libc)
    _reach_no_processes(libc)


def _change_no_files(libc: ctypes.CDLL) -> None:
    """From now on it can change no file, start no program and signal no other process."""
    for rights, scoped in _LANDLOCK_VERSIONS:
        files = ((1 << rights) - 1) & ~(_LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR)
        # A kernel takes no more numbers than it knows: rights on files, rights on ports, scopes.
        attributes = struct.pack("=3Q", files, 0, scoped) if scoped else struct.pack("=Q", files)
        size = ctypes.c_size_t(len(attributes))
        rules = libc.syscall(ctypes.c_long(_LANDLOCK_CREATE_RULESET), attributes, size, ctypes.c_uint(0))
        if rules >= 0:
            libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT_SELF), ctypes.c_int(rules), ctypes.c_uint(0))
            os.close(rules)
            return


def _reach_no_processes(libc: ctypes.CDLL) -> None:
    """From now on it opens sockets of IP alone: not the daemon's, which takes orders from its own user. Nor
    does it start programs, or signal or limit other processes."""
    machine, socket_, refused = _SYSTEM_CALLS.get(os.uname().machine, (0, 0, ()))
    if not machine:
        return
    tests = [(_AT_LEAST, _OTHER_TABLE), *((_EQUAL, number) for number in refused)]
    end = 3 + len(tests) + 4
    program = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 0, end - 1, machine), (_LOAD, 0, 0, _NUMBER)]
    program += [(code, end - n, 0, value) for n, (code, value) in enumerate(tests, 3)]
    program += [(_EQUAL, 0, 3, socket_), (_LOAD, 0, 0, _ARGUMENT)]
    program += [(_EQUAL, 1, 0, socket.AF_INET), (_EQUAL, 0, 1, socket.AF_INET6)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(packed, len(packed))
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(instructions))
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    libc.prctl(ctypes.c_ulong(_PR_SET_SECCOMP), mode, ctypes.c_char_p(filter_), 0, 0)


async def serve(connection: socket.socket) -> None:
    """Answer requests until the other end closes the connection."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_handle_exception)
    lost: asyncio.Future[str] = loop.create_future()
    probes = ProbeServer(loop)
    requests = Requests({"probe": probes.start, "lookup": start_lookup})
    channel = requests.channel = Channel(requests.receive, lost.set_result)
    await loop.create_unix_connection(lambda: channel, sock=connection)
    channel.send([0])
    while not lost.done():
        await asyncio.wait((lost,), timeout=REST_SECONDS)
        return_freed_memory()
        if requests.idle:
            probes.rest()


class Requests:
    """What the daemon has asked and has no answer to yet."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._waiting: dict[int, list[Any]] = {}
        self._running: dict[int, Attempt] = {}
        self.channel: Channel | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to answer."""
        return not self._waiting and not self._running

    def receive(self, rows: list[Any]) -> None:
        """Begin or cancel what rows ask for."""
        for number, *rest in rows:
            if not number:
                self._send([0])
            elif rest:
                if not self._waiting:
                    asyncio.get_running_loop().call_soon(self._begin_some)
                self._waiting[number] = rest
            elif number in self._running:
                self._running.pop(number).cancel()
            else:
                self._waiting.pop(number, None)

    def _begin_some(self) -> None:
        """Not all at once: after a start thousands may come together, and the daemon wants a sign of life."""
        if len(self._waiting) > STARTS_PER_TURN:
            asyncio.get_running_loop().call_soon(self._begin_some)
        for number in tuple(islice(self._waiting, STARTS_PER_TURN)):
            kind, request = self._waiting.pop(number)
            self._running[number] = self._handlers[kind](request, partial(self._answer, number))

    def _answer(self, number: int, answer: Any) -> None:
        self._running.pop(number, None)
        self._send([number, answer])

    def _send(self, row: list[Any]) -> None:
        if self.channel is not None:
            self.channel.send(row)


def _handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Without memory nobody knows which tasks go on: the daemon starts another process."""
    if isinstance(context.get("exception"), MemoryError):
        os.write(sys.stderr.fileno(), b"out of memory\n")
        os._exit(1)
    loop.default_exception_handler(context)
