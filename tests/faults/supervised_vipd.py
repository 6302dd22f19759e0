"""vipd of which the meetings with the outside are seen, and fail on command.

`python -m tests.faults.supervised_vipd --config FILE`. A filter of seccomp has the kernel ask a supervisor
before each system call that opens a file, runs a program, starts a thread, makes a socket, binds, connects
or sends; if there is a file `calls`, before those that it names. The supervisor is a process of its own.
Beside the settings it reads the file `faults`: a line for
each fault, `ERROR PATTERN`, where ERROR is the name of an errno, or `stall`: the call waits until the line
is gone. It writes each thing touched once to the file `touched`. PATTERN is a regular expression for that:

    vipd open /etc/passwd                    comm of the process, and what it touches
    vipd write /var/lib/vipd/state.db        opened for writing, made, or renamed to that
    vipd exec /usr/sbin/nft
    vipd start thread                        or process
    vipd socket netlink 0                    family, and type or protocol
    vipd connect inet 10.0.0.1:80
    vipd bind unix /run/vipd/vipd.sock
    vipd send netlink 0 22                   protocol and kind
    vipd send netlink 12 1                   of netfilter its subsystem: 1 is conntrack, 10 nf_tables
    vipd send unix /run/systemd/notify
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import runpy
import select
import socket
import struct
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

CALLS = {
    "x86_64": "2 open 41 socket 42 connect 44 sendto 49 bind 56 clone 58 vfork 59 execve 82 rename "
    "257 openat",
    "aarch64": "38 renameat 56 openat 198 socket 200 bind 203 connect 206 sendto 220 clone 221 execve",
}[platform.machine()].split()
NAMES = dict(zip(map(int, CALLS[::2]), CALLS[1::2], strict=True)) | {435: "clone3"}
"""Of system calls, by number."""
SECCOMP = {"x86_64": 317, "aarch64": 277}[platform.machine()]
FAMILIES: dict[int, str] = {
    socket.AF_UNIX: "unix",
    socket.AF_INET: "inet",
    socket.AF_INET6: "inet6",
    socket.AF_NETLINK: "netlink",
}
TYPES = {1: "stream", 2: "dgram", 3: "raw", 5: "seqpacket"}
AT_FDCWD, CLONE_THREAD = 2**32 - 100, 0x10000
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ASK, _ALLOW = 0x7FC00000, 0x7FFF0000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")


class Call(NamedTuple):
    number: int
    thread: int
    name: str
    arguments: tuple[int, ...]

    def text(self) -> str:
        """What is touched, as the description of this module says; empty: nothing of the kind."""
        return _TEXTS[self.name](self, *self.arguments)

    def read(self, address: int, size: int) -> bytes:
        with open(f"/proc/{self.thread}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(address)
            return memory.read(size)

    def path(self, address: int, directory: int = AT_FDCWD) -> str:
        path = self.read(address, 4096).partition(b"\0")[0].decode(errors="replace")
        if path.startswith("/"):
            return path
        beside = "cwd" if directory & 0xFFFFFFFF == AT_FDCWD else f"fd/{directory}"
        return os.path.normpath(f"{os.readlink(f'/proc/{self.thread}/{beside}')}/{path}")  # noqa: PTH115

    @staticmethod
    def opened(path: str, flags: int) -> str:
        return f"{'write' if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else 'open'} {path}"

    def address(self, verb: str, address: int, size: int) -> str:
        data = self.read(address, size)
        family = FAMILIES.get(struct.unpack_from("=H", data)[0], "")
        if family == "unix":
            path = data[2:] if data[2:3] == b"\0" else data[2:].partition(b"\0")[0]
            place = path.replace(b"\0", b"@").decode(errors="replace")
        elif family == "netlink":
            place = self.protocol(self.arguments[0])
        elif not family:
            return ""
        else:
            host = data[4:8] if family == "inet" else data[8:24]
            kind = socket.AF_INET if family == "inet" else socket.AF_INET6
            place = f"{socket.inet_ntop(kind, host)}:{struct.unpack_from('!H', data, 2)[0]}"
        return f"{verb} {family} {place}"

    def sent(self, descriptor: int, address: int) -> str:
        if not (protocol := self.protocol(descriptor)):
            return self.address("send", *self.arguments[4:]) if self.arguments[4] else ""
        kind = struct.unpack("=H", self.read(address + 4, 2))[0]
        return f"send netlink {protocol} {kind >> 8 if protocol == '12' and kind != 16 else kind}"

    def protocol(self, descriptor: int) -> str:
        """The protocol of a netlink socket; empty for all others."""
        inode = os.readlink(f"/proc/{self.thread}/fd/{descriptor}").partition("[")[2].rstrip("]")  # noqa: PTH115
        lines = Path(f"/proc/{self.thread}/net/netlink").read_text().splitlines()
        return next((fields[1] for line in lines if (fields := line.split())[-1] == inode), "")


def _socket(_: Call, family: int, kind: int, protocol: int, *__: int) -> str:
    name = FAMILIES.get(family, str(family))
    return f"socket {name} {protocol if name == 'netlink' else TYPES.get(kind & 15, kind & 15)}"


def _started(flags: int) -> str:
    return f"start {'thread' if flags & CLONE_THREAD else 'process'}"


_TEXTS: dict[str, Callable[..., str]] = {
    "open": lambda call, path, flags, *_: call.opened(call.path(path), flags),
    "openat": lambda call, beside, path, flags, *_: call.opened(call.path(path, beside), flags),
    "rename": lambda call, _, path, *__: f"write {call.path(path)}",
    "renameat": lambda call, _, __, beside, path, *___: f"write {call.path(path, beside)}",
    "execve": lambda call, path, *_: f"exec {call.path(path)}",
    "socket": _socket,
    "vfork": lambda *_: _started(0),
    "clone": lambda call, flags, *_: _started(flags),
    "clone3": lambda call, place, *_: _started(struct.unpack("=Q", call.read(place, 8))[0]),
    "connect": lambda call, _, place, size, *__: call.address("connect", place, size),
    "bind": lambda call, _, place, size, *__: call.address("bind", place, size),
    "sendto": lambda call, descriptor, data, *_: call.sent(descriptor, data),
}


class Supervisor:
    def __init__(self, listener: int, directory: Path) -> None:
        self._listener = listener
        self._faults = directory / "faults"
        self._touched = directory / "touched"
        self._seen: set[str] = set()
        self._waiting: list[tuple[Call, str]] = []

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while True:
            for _, event in poll.poll(50 if self._waiting else None):
                if not event & select.POLLIN:
                    return
                with contextlib.suppress(OSError):  # its thread has been killed meanwhile
                    self._ask()
            waiting, self._waiting = self._waiting, []
            for call, text in waiting:
                self._answer(call, text)

    def _ask(self) -> None:
        notification = bytearray(_NOTIFICATION.size)
        fcntl.ioctl(self._listener, _RECEIVE, notification)
        number, thread, _, name, _, _, *arguments = _NOTIFICATION.unpack(notification)
        call, text = Call(number, thread, NAMES[name], tuple(arguments)), ""
        with contextlib.suppress(
            OSError, struct.error, ValueError
        ):  # it has ended, or its arguments are none
            if touched := call.text():
                text = f"{Path(f'/proc/{thread}/comm').read_text().strip()} {touched}"
        if text and text not in self._seen:
            self._seen.add(text)
            with self._touched.open("a") as file:
                file.write(f"{text}\n")
        self._answer(call, text)

    def _answer(self, call: Call, text: str) -> None:
        fault = self._fault(text) if text else ""
        if fault == "stall":
            self._waiting.append((call, text))
            return
        error = -getattr(errno, fault) if fault else 0
        answer = _ANSWER.pack(call.number, 0, error, 0 if error else _CONTINUE)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._listener, _SEND, answer)

    def _fault(self, text: str) -> str:
        try:
            lines = self._faults.read_text().splitlines()
        except FileNotFoundError:
            return ""
        faults = (line.partition(" ") for line in lines)
        return next((error for error, _, pattern in faults if re.fullmatch(pattern, text)), "")


def filtered(calls: Collection[str]) -> int:
    """Have the kernel ask, from now on, also for all that this process starts; returns where to answer."""
    numbers = sorted(number for number, name in NAMES.items() if name in calls)
    program = [(_LOAD, 0, 0, 0)]
    program += [(_JUMP_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ASK)]
    data = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(data)
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(held))
    listener = ctypes.CDLL(None, use_errno=True).syscall(SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, filter_)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)


def main() -> None:
    """Start the supervisor, which is no child of vipd, and become vipd."""
    directory = Path(sys.argv[sys.argv.index("--config") + 1]).parent
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            ours.close()
            os.setsid()
            listener = socket.recv_fds(theirs, 1, 1)[1][0]
            theirs.close()
            os.closerange(0, 3)
            Supervisor(listener, directory).run()
        os._exit(0)
    os.waitpid(child, 0)
    theirs.close()
    named = directory / "calls"
    listener = filtered(named.read_text().split() if named.exists() else NAMES.values())
    socket.send_fds(ours, [b"1"], [listener])
    os.close(listener)
    ours.close()
    runpy.run_module("vipd", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
