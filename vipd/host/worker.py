"""The worker: a process beside the daemon that reads what strangers send (answers over TLS, HTTP and DNS).

Whatever they send, it costs the daemon neither time nor memory nor rights: the worker has no privileges and
little memory, it is killed when it hangs, and started again when it has ended. It is started for the first
request, and ended when none has come for a long time. The daemon keeps all state; each request stands alone.

Both ends exchange rows over a socket, by `Channel`: `[number, kind, request]` asks, `[number]` cancels,
`[number, answer]` answers, and `[0]` asks for a sign of life, or is one. The other end is
`vipd/daemon/worker_process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, Protocol

import vipd
from vipd.declaration.bounded_json import read_json
from vipd.host.supervisor import Backoff, LoopState
from vipd.model.text import shortened

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 2**20
"""Of rows sent together. The largest row is a lookup's, with two thousand targets of some hundred bytes."""
BEAT_SECONDS = 1.0
SILENT_BEATS = 3
"""After so many in which it said nothing, although something was asked, the process is killed."""
LATE_BEATS = 30
"""So much later than it should an answer may come: the process makes up for its own stalls."""
IDLE_BEATS = 600
"""After so many without a request it is ended: longer than any pause between two lookups of a name."""
START_SECONDS = 30.0
"""A start takes a third of a second; on a busy machine more."""
ENDED_SECONDS = 2.0
"""How long to wait for the end of a killed process."""
MOST_RESIDENT_BYTES = 96 * 2**20
"""Of memory. A process that has more is ended once nothing is asked, and the next request starts another."""
MOST_LINES = 256
"""Different lines of standard error that are logged, before one may be logged again."""

_FRAME_PART = 16 * 1024
"""Rows are put together up to this size, and read in parts of it: what many answers cause is no long turn of
the event loop."""
_LENGTH = struct.Struct("!I")
_FAILED_TOGETHER = 100
_MOST_LINE = 2000
_IT = "the worker process"
_NOBODY: tuple[Client | None, float] = None, 0.0
_PASSED_ON = ("SSL_CERT_FILE", "SSL_CERT_DIR", "OPENSSL_CONF")
"""Of the environment, which may have passwords."""
_BEGIN = "import sys; sys.path[:] = sys.argv[1:]; from vipd.daemon.worker_process import main; main()"

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
"""linux/prctl.h"""
_CAPABILITY_VERSION = 0x20080522
"""linux/capability.h"""


_logged: set[str] = set()


class WorkerError(OSError):
    """The process ended, hangs, or cannot be started: what it did."""


class Client(Protocol):
    """Who asked. One of the methods is called, once, unless the request is cancelled before."""

    def answered(self, answer: Any) -> None:
        """Take the answer, which is as the process sent it. Raises ValueError if it is none."""

    def failed(self, why: str) -> None:
        """There is no answer, and why: one line."""


class Process(Protocol):
    """A worker process."""

    ended: asyncio.Future[str]
    """How it ended."""

    @property
    def pid(self) -> int:
        """Its number."""

    def kill(self) -> None:
        """End it."""


class Channel(asyncio.BufferedProtocol):
    """One end of the socket. What is sent in one turn of the event loop is written together."""

    def __init__(self, received: Callable[[list[Any]], None], lost: Callable[[str], None]) -> None:
        """`received` gets rows; what it raises ends the channel. `lost` is called once, with the reason."""
        self._handle, self._lost = received, lost
        self._transport: asyncio.Transport | None = None
        self._part = bytearray(_FRAME_PART)
        self._read = bytearray()
        self._unsent: list[bytes] = []

    def send(self, row: list[Any]) -> None:
        """Send a row. Raises ValueError if it is too large."""
        data = json.dumps(row, separators=(",", ":")).encode()
        if len(data) > MAX_FRAME_BYTES - 2 * _FRAME_PART:
            raise ValueError(f"{len(data)} bytes are too much for a row")
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(data)

    def _flush(self) -> None:
        rows, self._unsent = self._unsent, []
        if self._transport is None or self._transport.is_closing():
            return
        frame, size = list[bytes](), 0
        for number, row in enumerate(rows, 1):
            frame.append(row)
            size += len(row)
            if size > _FRAME_PART or number == len(rows):
                data = b"[" + b",".join(frame) + b"]"
                self._transport.write(_LENGTH.pack(len(data)) + data)
                frame, size = [], 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Rows can be sent."""
        self._transport = transport  # type: ignore[assignment]  # of a stream socket

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where to read to."""
        return self._part

    def buffer_updated(self, nbytes: int) -> None:
        """Handle what came."""
        self._read += self._part[:nbytes]
        try:
            while len(self._read) >= _LENGTH.size:
                size = _LENGTH.unpack_from(self._read)[0]
                if size > MAX_FRAME_BYTES:
                    raise ValueError("too much at once")
                end = _LENGTH.size + size
                if len(self._read) < end:
                    return
                frame = bytes(self._read[_LENGTH.size : end])
                del self._read[:end]
                self._handle(rows_of(frame))
        except Exception as error:  # whatever it sends, it ends no more than the channel
            self.close(f"sent garbage: {type(error).__name__}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end has closed it, or has ended."""
        self._report("has ended")

    def close(self, why: str) -> None:
        """Read and send no more."""
        self._report(why)
        if self._transport is not None:
            self._transport.abort()

    def _report(self, why: str) -> None:
        lost, self._lost = self._lost, lambda _: None
        lost(why)


def rows_of(frame: bytes) -> list[Any]:
    """The rows in a frame. Raises ValueError."""
    rows = read_json(frame, MAX_FRAME_BYTES)
    if not isinstance(rows, list) or not all(isinstance(row, list) and row for row in rows):
        raise ValueError("no rows")
    return rows


class WorkerProcess:
    """The real process; a thread starts it, passes on what it says on its standard error, and reaps it.

    Privileges are a thread's own, and a process has those of the thread that starts it: so this one gives up
    its own. It lives as long as the process, which the kernel ends when the thread that started it has ended.
    """

    def __init__(self, theirs: socket.socket) -> None:
        """`theirs` becomes its standard input, and is closed here. Raises RuntimeError if there is no
        thread."""
        self._loop, self._theirs = asyncio.get_running_loop(), theirs
        self._popen: subprocess.Popen[bytes] | None = None
        self.started: asyncio.Future[str] = self._loop.create_future()
        """Why it could not be started; empty: it was."""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        threading.Thread(target=self._live, name="vipd worker", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its number; 0 before it has started."""
        return self._popen.pid if self._popen else 0

    def kill(self) -> None:
        """End it."""
        if self._popen is not None:
            self._popen.kill()

    def _live(self) -> None:
        try:
            with self._theirs:
                _give_up_privileges()
                self._popen = popen = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BEGIN, *_import_path()],
                    stdin=self._theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                    start_new_session=True,
                )
        except Exception as error:
            why = error.strerror if isinstance(error, OSError) else ""
            self._set(self.started, why or str(error))
            return
        self._set(self.started, "")
        last = _pass_on(popen)
        self._set(self.ended, _how_it_ended(popen.wait(), last))

    def _set(self, future: asyncio.Future[str], value: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: vipd has ended
            self._loop.call_soon_threadsafe(_settle, future, value)


async def start_process(channel: Channel) -> Process:
    """A process at the other end of the channel. Raises WorkerError."""
    ours, theirs = socket.socketpair()
    try:
        process = WorkerProcess(theirs)
        if why := await process.started:
            raise OSError(why)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
    except (OSError, RuntimeError) as error:
        ours.close()
        theirs.close()
        raise WorkerError(f"{_IT} cannot be started: {error}") from None
    except BaseException:
        ours.close()  # a process that begins meanwhile ends with it
        raise
    return process


class Worker:
    """Has requests answered by a process, while `run` runs."""

    def __init__(self, start: Callable[[Channel], Awaitable[Process]] | None = None) -> None:
        """`start` starts a process; None: `start_process`."""
        self._start = start
        self.state = LoopState(Backoff(initial=0.25, maximum=5.0))
        """Of the loop `run`."""
        self._numbers = count(1)
        self._waiting: dict[int, tuple[list[Any], Client, float]] = {}
        """Requests that came while there was no process."""
        self._running: dict[int, tuple[Client, float]] = {}
        """Requests that were sent, by their numbers, and the beat at which an answer must have come."""
        self._beats = 0
        self._channel: Channel | None = None
        """None: there is no process that is ready."""
        self._refusal = ""
        """Why no process could be started the last time; empty: one could."""
        self._asked = asyncio.Event()
        self._heard = asyncio.Event()

    def ask(self, kind: str, request: list[Any], client: Client, seconds: float) -> int:
        """Have a request answered that takes at most so many seconds; its number. While the process is being
        started it waits; if that failed the last time, the client hears so before this returns."""
        number = next(self._numbers)
        row = [number, kind, request]
        if self._channel is not None:
            self._send(self._channel, row, client, seconds)
            return number
        self._asked.set()
        if self._refusal:
            client.failed(self._refusal)
        else:
            self._waiting[number] = row, client, seconds
        return number

    def _send(self, channel: Channel, row: list[Any], client: Client, seconds: float) -> None:
        try:
            channel.send(row)
        except ValueError as error:
            client.failed(f"{_IT} cannot be asked: {error}")
        else:
            self._running[row[0]] = client, self._beats + seconds / BEAT_SECONDS + LATE_BEATS

    def cancel(self, number: int) -> None:
        """The client of a request does not want to hear of it any more."""
        self._waiting.pop(number, None)
        if self._running.pop(number, None) is not None and self._channel is not None:
            self._channel.send([number])

    async def run(self) -> NoReturn:
        """Keep a process while anything is asked, for ever. Raises WorkerError when it has ended or hangs;
        run again, it starts another one."""
        while True:
            await self._asked.wait()
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            channel = Channel(self._receive, partial(_settle, lost))
            try:
                await self._run_process(channel, lost)
            except OSError as error:
                if self._channel is None:
                    self._refusal = str(error)
                await self._fail(str(error))
                raise
            finally:
                self._channel = None
                channel.close("")

    async def _run_process(self, channel: Channel, lost: asyncio.Future[str]) -> None:
        """Start a process, and keep it until it is needed no longer."""
        self._heard.clear()
        process = await (self._start or start_process)(channel)
        try:
            await self._until_ready(process, lost)
            self._refusal = ""
            self.state.clear_fault()
            self._channel = channel
            self._asked.clear()
            waiting, self._waiting = self._waiting, {}
            for row, client, seconds in waiting.values():
                self._send(channel, row, client, seconds)
            await self._watch(process, channel, lost)
        finally:
            process.kill()

    async def _until_ready(self, process: Process, lost: asyncio.Future[str]) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                heard = asyncio.ensure_future(self._heard.wait())
                try:
                    await asyncio.wait((heard, lost), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    heard.cancel()
        except TimeoutError:
            raise WorkerError(f"{_IT} did not start within {START_SECONDS:g} s") from None
        if lost.done():
            raise WorkerError(await _end_of(process, lost.result()))

    async def _watch(self, process: Process, channel: Channel, lost: asyncio.Future[str]) -> None:
        """Return when the process is to be ended. Beats are counted, not seconds: the loop may have stood
        still, and has read what came meanwhile before it comes to the next beat."""
        silent = idle = 0
        while True:
            await asyncio.wait((lost,), timeout=BEAT_SECONDS)
            self._beats += 1
            if lost.done():
                raise WorkerError(await _end_of(process, lost.result()))
            idle = 0 if self._running else idle + 1
            silent = 0 if idle or self._heard.is_set() else silent + 1
            self._heard.clear()
            if silent > SILENT_BEATS:
                raise WorkerError(f"{_IT} did not answer for {silent * BEAT_SECONDS:g} s and was killed")
            if silent:
                channel.send([0])
            for number in [number for number, (_, due) in self._running.items() if due < self._beats]:
                client, _ = self._running[number]
                self.cancel(number)
                client.failed(f"{_IT} did not answer")
            if idle and (idle > IDLE_BEATS or _resident_bytes(process.pid) > MOST_RESIDENT_BYTES):
                return

    def _receive(self, rows: list[Any]) -> None:
        """Pass answers on. Raises ValueError for what is none."""
        self._heard.set()
        for number, *rest in rows:
            client, _ = self._running.pop(number, _NOBODY) if type(number) is int else _NOBODY
            if client is not None:
                try:
                    (answer,) = rest
                    client.answered(answer)
                except Exception:
                    client.failed(f"{_IT} sent garbage")
                    raise

    async def _fail(self, why: str) -> None:
        """Let go of all that was asked of the process; of what waits for one only if none can be started."""
        self._channel, running, self._running = None, self._running, {}
        clients = [client for client, _ in running.values()]
        if self._refusal:
            clients += [client for _, client, _ in self._waiting.values()]
            self._waiting = {}
        for number, client in enumerate(clients, 1):
            client.failed(why)
            if not number % _FAILED_TOGETHER:
                await asyncio.sleep(0)


async def _end_of(process: Process, why: str) -> str:
    """How a process ended that has closed its socket, or sent garbage."""
    process.kill()
    if why != "has ended":
        return f"{_IT} {why}, and was killed"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENDED_SECONDS):
            return f"{_IT} {await asyncio.shield(process.ended)}"
    return f"{_IT} {why}"


def _how_it_ended(code: int, last: str) -> str:
    if code >= 0:
        return f"ended with exit code {code}{last and f': {last}'}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}{last and f': {last}'}"
    return f"was killed by signal {-code}"


def _pass_on(popen: subprocess.Popen[bytes]) -> str:
    """Log what a process says until it has ended, but nothing twice: the next process may fail in the same
    way. Returns the last line."""
    last = ""
    with popen.stderr or contextlib.nullcontext() as lines:
        while lines is not None and (line := lines.readline(_MOST_LINE)):
            text = line.decode(errors="replace").rstrip()
            last = shortened(text, 200) or last
            if text not in _logged:
                if len(_logged) >= MOST_LINES:
                    _logged.clear()
                _logged.add(text)
                log.warning("%s: %s", _IT, text)
    return last


def _settle(future: asyncio.Future[str], value: str) -> None:
    if not future.done():
        future.set_result(value)


def _import_path() -> list[str]:
    """Where the process finds modules: where this one does, that of vipd first."""
    root = str(Path(vipd.__file__).resolve().parents[1])
    return list(dict.fromkeys((root, *(path for path in sys.path if path.startswith("/")))))


def _resident_bytes(pid: int) -> int:
    """Its resident memory; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, LookupError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _give_up_privileges() -> None:
    """Of this thread alone, and of what it starts. Whether it has succeeded the process sees itself: what is
    not permitted here is not needed there (a user other than root keeps only ambient capabilities)."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(*arguments: int) -> int:
        return int(libc.prctl(*map(ctypes.c_ulong, (*arguments, *[0] * (5 - len(arguments))))))

    capability = 0
    while prctl(_PR_CAPBSET_DROP, capability) == 0:
        capability += 1
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))
