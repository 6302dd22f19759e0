"""What stands in for the service manager and the journal: datagram sockets that keep what they get; and a
daemon that is started as systemd would start it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.api.daemon_process import ConfiguredHost, host
from tests.lab.node import Node
from tests.lab.waiting import wait_until

PROGRAMS = ("iptables-restore", "ip6tables-restore")
REFUSAL = "is broken by the test"
PATIENCE_SECONDS = 90.0
"""How long what should be quick may take on a machine that is busy with other things."""
_MARK = b"MARK="
_SCRIPT = """\
#!/usr/bin/env bash
# Hands everything to {real}, unless told to fail, to wait or to hang.
here=${{0%/*}}
echo call >>"$here/calls"
env | grep -E '^(NOTIFY_SOCKET|WATCHDOG_)' >>"$here/inherited"
input=$(cat)
if [ -e "$here/broken" ] || {{ [ -s "$here/refused" ] && grep -qFf "$here/refused" <<<"$input"; }}; then
    echo "${{0##*/}}: line 1 {refusal}" >&2
    exit 1
fi
while [ -e "$here/hanging" ]; do sleep 0.05; done
[ ! -s "$here/seconds" ] || sleep "$(<"$here/seconds")"
exec {real} "$@" <<<"$input"
"""
_ONLY_THIS_RUN = """\
mount -t tmpfs none /run && mkdir -p /run/systemd/journal
mount --bind "$0" /run/systemd/journal && exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Notification:
    """One notification, and when it came by the monotonic clock."""

    at: float
    assignments: Mapping[str, str]


class Mailbox:
    """A datagram socket at a path whose letters are read by a thread as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o666)
        self._socket.settimeout(0.1)
        self._marks: set[bytes] = set()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def take(self, letter: bytes) -> None:
        """Called for each letter, in the reader's thread."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """Return once every letter has been read that was sent before: they come in order."""
        mark = _MARK + secrets.token_bytes(8)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(PATIENCE_SECONDS)
            sender.sendto(mark, str(self._path))
        wait_until(lambda: mark in self._marks, "every letter read")

    def close(self) -> None:
        self._closed.set()
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        while not self._closed.is_set():
            with suppress(TimeoutError):
                letter, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 18, 1)
                if letter.startswith(_MARK):
                    self._marks.add(letter)
                    continue
                for descriptor in descriptors:
                    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor)
                        file.seek(0)
                        letter += file.read()
                self.take(letter)


class Manager(Mailbox):
    """The service manager's end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.told: list[Notification] = []
        super().__init__(path)

    def take(self, letter: bytes) -> None:
        """Keep a notification."""
        pairs = [line.partition("=") for line in letter.decode().splitlines()]
        self.told.append(Notification(time.monotonic(), {name: value for name, _, value in pairs}))

    def all(self, name: str) -> list[str]:
        """Every value that was told of one name, in order."""
        return [told.assignments[name] for told in self.told if name in told.assignments]

    def times(self, name: str) -> list[float]:
        """When each of those came."""
        return [told.at for told in self.told if name in told.assignments]


class Journal(Mailbox):
    """The journal's end of its socket."""

    def __init__(self, path: Path) -> None:
        self.entries: list[dict[str, list[str]]] = []
        super().__init__(path)

    def take(self, letter: bytes) -> None:
        """Keep an entry."""
        self.entries.append(read_entry(letter))

    def about(self, name: str, value: str) -> list[dict[str, list[str]]]:
        """The entries with this value of a field: `journalctl NAME=VALUE`."""
        return [entry for entry in self.entries if value in entry.get(name, ())]


def read_entry(data: bytes) -> dict[str, list[str]]:
    """An entry of the journal's protocol, read anew from its description."""
    found: dict[str, list[str]] = {}
    while data:
        line, _, rest = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack("<Q", rest[:8])
            value, rest = rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        found.setdefault(name.decode(), []).append(value.decode("utf-8", "surrogateescape"))
        data = rest
    return found


class Tools:
    """A directory with an iptables-restore of each family, to be first in PATH, that does as it is told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for name in PROGRAMS:
            real = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
            assert real, f"{name} is not installed"
            script = directory / name
            script.write_text(_SCRIPT.format(real=real, refusal=REFUSAL))
            script.chmod(0o755)

    def set(self, what: str, text: str = "yes") -> None:
        """From now on be `broken`, `hanging`, `refused` whatever holds a text, or slower by `seconds`."""
        (self.directory / what).write_text(text)

    def unset(self, what: str) -> None:
        (self.directory / what).unlink()

    def calls(self) -> int:
        path = self.directory / "calls"
        return path.read_text().count("call") if path.exists() else 0

    def inherited(self) -> str:
        """What they saw of the service manager's variables."""
        return (self.directory / "inherited").read_text()


@dataclass
class Unit(ConfiguredHost):
    """A host whose daemon is started as a unit."""

    namespace: str
    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    journal_directory: Path | None = None
    """Is its /run/systemd/journal, in a mount namespace of its own."""

    def __post_init__(self) -> None:
        super().__init__(self.namespace, self.root)
        self.manager = Manager(self.root / "notify")
        self.tools = Tools(self.root / "tools")
        self.environment |= {
            "NOTIFY_SOCKET": str(self.root / "notify"),
            "PATH": f"{self.tools.directory}:{os.environ['PATH']}",
        }
        self._node = Node(self.namespace, "host", "", "", environment=self.environment)

    def argv(self, *arguments: str, module: str = "vipd") -> list[str]:
        entered = super().argv(*arguments, module=module)
        mounts: list[str] = []
        if self.journal_directory is not None:
            mounts = ["unshare", "-m", "sh", "-c", _ONLY_THIS_RUN, str(self.journal_directory)]
        return [*entered[:4], *mounts, *entered[4:]]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)


@contextmanager
def unit(**environment: str) -> Iterator[Unit]:
    """A fresh unit; whatever runs of it ends with the context."""
    with host() as made:
        root = made.root / "unit"
        root.mkdir()
        started = Unit(made.namespace, root, dict(environment))
        try:
            yield started
        finally:
            if started.process is not None:
                started.end(signal.SIGKILL)
            started.manager.close()
