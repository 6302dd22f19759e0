"""The database of the state directory: a change cut off anywhere, a damaged file, a neighbour with the lock.

A daemon's system calls in the state directory are recorded, and carried out again one after the other: a kill
leaves all that came before a call, a power cut what was synced, and whatever else the disk had written."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.lab.inside import Kept, kept_in
from tests.lab.waiting import wait_until
from tests.sources.host import Host
from tests.sources.test_store import A2, A, B

pytestmark = pytest.mark.root

MANY = [{**A, "name": f"s{n}", "address": f"10.97.{n // 200}.{n % 200}"} for n in range(1000)]
"""More pages than a transaction keeps in memory."""
SENDING = ("sendto", "sendmsg", "write", "writev")
CALLS = "openat,pwrite64,ftruncate,unlink,unlinkat,rename,renameat,renameat2,link,linkat,fsync,fdatasync"
_LINE = re.compile(r"^\d+ +(\w+)\((.*)")
_QUOTED = re.compile(r'<((?:\\x[0-9a-f]{2})+)>|"((?:\\x[0-9a-f]{2})*)"')


class Call(NamedTuple):
    """A system call: its name, the paths of descriptors and the strings among its arguments, and these."""

    name: str
    paths: list[str]
    strings: list[bytes]
    arguments: str

    @property
    def answers(self) -> bool:
        return self.name in SENDING and any(b"HTTP/1.1 200" in text for text in self.strings)


def _call(line: str) -> Call | None:
    if not (found := _LINE.match(line)):
        return None
    arguments = found[2].partition(") = ")[0].partition(" <unfinished")[0]
    quoted = _QUOTED.findall(arguments)
    paths = [bytes.fromhex(path.replace("\\x", "")).decode() for path, _ in quoted if path]
    strings = [bytes.fromhex(text.replace("\\x", "")) for path, text in quoted if not path]
    return Call(found[1], paths, strings, _QUOTED.sub("", arguments))


@dataclass
class File:
    """What a file has, and what of it is synced."""

    data: bytes = b""
    synced: bytes = b""


@dataclass
class Disk:
    """A directory, to which system calls are done."""

    directory: Path
    names: dict[str, File] = field(default_factory=dict)
    synced: dict[str, File] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.directory.glob("state.db*"):
            self.names[path.name] = File(path.read_bytes(), path.read_bytes())
        self.synced = dict(self.names)

    def do(self, call: Call) -> bool:
        """Whether something has changed, in memory or on disk."""
        file = self.names.get(Path(call.paths[0]).name) if call.paths else None
        if call.name in ("pwrite64", "ftruncate", "fsync", "fdatasync"):
            if file:
                self._do_to(file, call)
            elif call.paths == [str(self.directory)]:
                self.synced = dict(self.names)
            return bool(file) or call.paths == [str(self.directory)]
        match call.name, [self._name(call, text) for text in call.strings]:
            case "openat", [str(name)] if "O_CREAT" in call.arguments:
                self.names.setdefault(name, File())
            case "unlink" | "unlinkat", [str(name)]:
                self.names.pop(name, None)
            case (("link" | "linkat"), [str(old), str(new)]):
                self.names[new] = self.names[old]
            case (("rename" | "renameat" | "renameat2"), [str(old), str(new)]):
                self.names[new] = self.names.pop(old)
            case _:
                return False
        return True

    def _do_to(self, file: File, call: Call) -> None:
        number = int(call.arguments.rpartition(",")[2]) if "," in call.arguments else 0
        if call.name == "pwrite64":
            before, text = file.data.ljust(number, b"\0"), call.strings[0]
            file.data = before[:number] + text + before[number + len(text) :]
        elif call.name == "ftruncate":
            file.data = file.data[:number].ljust(number, b"\0")
        else:
            file.synced = file.data

    def _name(self, call: Call, text: bytes) -> str | None:
        if call.name in SENDING:
            return None
        path = os.path.join(*call.paths[:1], text.decode(errors="replace"))  # noqa: PTH118 (text or path)
        ours = Path(path).parent == self.directory and Path(path).name.startswith("state.db")
        return Path(path).name if ours else None

    def after_a_kill(self) -> dict[str, bytes]:
        return {name: file.data for name, file in self.names.items()}

    def after_a_power_cut(self) -> Iterator[dict[str, bytes]]:
        """What is synced; names or contents that the disk had written nevertheless."""
        yield {name: file.synced for name, file in self.synced.items()}
        yield {name: file.synced for name, file in self.names.items()}
        yield {name: file.data for name, file in self.synced.items()}


@contextmanager
def recorded(host: Host, calls: list[Call]) -> Iterator[None]:
    """Adds the calls of the daemon meanwhile."""
    pid, trace = host.status()["pid"], host.directory / "trace"
    argv = [
        "strace",
        "-f",
        "-y",
        "-xx",
        "-s",
        "2000000",
        "-o",
        str(trace),
        "-e",
        f"trace={','.join([CALLS, *SENDING])}",
    ]
    tracer = subprocess.Popen([*argv, "-p", str(pid)], stderr=subprocess.DEVNULL)
    try:
        tasks = Path(f"/proc/{pid}/task")
        wait_until(
            lambda: all("TracerPid:\t0" not in (task / "status").read_text() for task in tasks.iterdir()),
            lambda: "nobody traces it",
            60,
        )
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(60)
    calls += filter(None, map(_call, trace.read_text().splitlines()))


def cut_off(
    disk: Disk, calls: Sequence[Call], root: Path, copied: bool = False
) -> Iterator[tuple[str, bool, Kept]]:
    """What a store reads after each cut: its place, whether the change was accepted before, and that. It is
    accepted when it is answered, or as soon as it is `copied`."""
    answered, seen = False, set[object]()
    for number, call in enumerate(calls):
        changed = disk.do(call)
        answered = answered or call.answers or (copied and b"last-good" in b"".join(call.strings[:1]))
        if not changed and not call.answers:
            continue
        for kind, files in (("kill", disk.after_a_kill()), *(("cut", f) for f in disk.after_a_power_cut())):
            # What is in the copy counts for nothing as long as the file is good.
            key = (answered, frozenset((name, hash(data)) for name, data in files.items()))
            if key in seen:
                continue
            seen.add(key)
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            for name, data in files.items():
                (root / name).write_bytes(data)
            yield f"{kind} after call {number}, {call.name} {call.paths}", answered, kept_in(root)
    assert answered, "it was seen"


def put(host: Host, *specs: dict[str, Any]) -> None:
    status, answer = host.ask("POST", "apply", {"services": list(specs), "prune": True})
    assert (status, answer["applied"]) == (200, True), answer


CHANGES = {"the first": ([], [A]), "the next": ([A], [A2, B]), "a large one": ([A], [A2, *MANY])}


@pytest.mark.parametrize(
    "name", ["the first", "the next", pytest.param("a large one", marks=pytest.mark.nightly)]
)
def test_a_change_that_is_cut_off_anywhere_is_there_whole_or_not_at_all(
    host: Host, tmp_path: Path, name: str
) -> None:
    before, after = CHANGES[name]
    if before:
        put(host, *before)
    old, disk, calls = kept_in(host.state_dir), Disk(host.state_dir), list[Call]()
    with recorded(host, calls):
        put(host, *after)
    new = kept_in(host.state_dir)
    assert (len(new.services), new.revisions[len(old.revisions) :]) == (len(after), [len(old.revisions) + 1])
    states = {"old": 0, "new": 0}
    for place, answered, kept in cut_off(disk, calls, tmp_path / "cut", copied=True):
        assert kept in ((new,) if answered else (old, new)), (place, answered, kept)
        states["new" if kept == new else "old"] += 1
    assert disk.after_a_kill() == {path.name: path.read_bytes() for path in host.state_dir.glob("state.db*")}
    assert min(states.values()) > 3, "the calls were seen"


def damage(path: Path) -> None:
    """Overwrite the last pages."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))


def test_a_repair_that_is_cut_off_anywhere_loses_nothing(host: Host, tmp_path: Path) -> None:
    put(host, A, B)
    good = kept_in(host.state_dir)
    damage(host.state_dir / "state.db")
    disk, calls = Disk(host.state_dir), list[Call]()
    with recorded(host, calls):
        put(host, A2, B)
    new = kept_in(host.state_dir)
    assert new.revisions == [1, 2]
    repaired = False
    for place, answered, kept in cut_off(disk, calls, tmp_path / "cut"):
        repaired = repaired or not kept.faults
        expected = (new,) if answered else (good, new)
        assert (kept.services, kept.revisions) in [(e.services, e.revisions) for e in expected], place
    assert repaired
    (fault,) = host.problems("store")
    assert re.search(r"state\.db: it is damaged: .*; it is kept as .*\.unreadable; its copy has taken", fault)
    assert host.ask("POST", "reload")[0] == 200
    assert host.problems("store") == []


def test_the_copy_of_a_damaged_file_serves_after_a_start(host: Host) -> None:
    put(host, A, B)
    for spoil in (
        damage,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no database" * 9),
    ):
        host.stop()
        entries = kept_in(host.state_dir)
        spoil(host.state_dir / "state.db")
        host.start()
        (fault,) = host.problems("store")
        assert "state.db: it is " in fault
        assert "its copy has taken its place" in fault
        assert host.names() == {"a", "b"}
        assert kept_in(host.state_dir) == entries
    put(host, A2)
    host.crash()
    assert (host.problems("store"), host.backends()) == ([], {"a": ["10.244.0.7"]})
    assert len(list(host.state_dir.glob("state.db.unreadable*"))) == 3


def test_a_damaged_copy_is_made_anew(host: Host) -> None:
    put(host, A)
    (host.state_dir / "state.db.last-good").write_bytes(b"no database" * 1000)
    put(host, A2, B)
    host.stop()
    damage(host.state_dir / "state.db")
    host.start()
    assert host.backends() == {"a": ["10.244.0.7"], "b": ["10.244.0.6"]}


def test_without_a_good_copy_nothing_else_is_harmed(host: Host) -> None:
    put(host, A)
    host.stop()
    for path in host.state_dir.glob("state.db*"):
        path.write_bytes(b"no database" * 9)
    host.start()
    (fault,) = host.problems("store")
    assert "no good copy of it can be read: it is damaged: file is not a database" in fault
    assert host.names() == set()
    put(host, B)
    host.crash()
    assert host.names() == {"b"}


LOCKING = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("begin exclusive")
print(flush=True)
time.sleep(float(sys.argv[2]))
"""


@contextmanager
def neighbour(host: Host, seconds: float) -> Iterator[None]:
    """Another program that keeps the database locked."""
    argv = [sys.executable, "-c", LOCKING, str(host.state_dir / "state.db"), str(seconds)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        try:
            yield
        finally:
            other.kill()


def test_a_neighbour_that_holds_the_lock_is_waited_for_and_named(host: Host) -> None:
    put(host, A)
    with neighbour(host, 2):
        began = time.monotonic()
        put(host, A2)
        assert time.monotonic() - began > 0.5
    with neighbour(host, 60):
        status, answer = host.ask("POST", "services", {"service": B})
        assert (status, "another program has kept it locked" in str(answer)) == (500, True), answer
        host.crash()
        (fault,) = host.problems("store")
        assert "another program has kept it locked for 5 seconds; its last good copy goes on serving" in fault
        assert host.backends() == {"a": ["10.244.0.7"]}
    assert host.ask("POST", "reload")[0] == 200
    assert host.problems("store") == []
    put(host, A2, B)
    assert kept_in(host.state_dir).revisions == [1, 2, 3]


REPLACED: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "by an older one": lambda path: shutil.copy(path.with_name("older"), path),
    "by garbage": lambda path: path.write_bytes(b"no database" * 1000),
}


@pytest.mark.parametrize("how", REPLACED)
def test_what_serves_counts_when_the_file_is_replaced_under_a_running_vipd(host: Host, how: str) -> None:
    put(host, A)
    shutil.copy(host.state_dir / "state.db", host.state_dir / "older")
    put(host, A, B)
    REPLACED[how](host.state_dir / "state.db")
    assert host.ask("PATCH", "services/a", {"service": {"backends": ["10.244.0.7"]}})[0] == 200
    host.crash()
    assert host.backends() == {"a": ["10.244.0.7"], "b": ["10.244.0.6"]}


def test_what_is_confirmed_stays_though_the_file_was_removed(host: Host) -> None:
    put(host, A)
    assert host.ask("POST", "apply?confirm=600", {"services": [A2, B], "prune": True})[0] == 200
    (host.state_dir / "state.db").unlink()
    assert host.ask("POST", "confirm")[0] == 200
    host.crash()
    assert host.backends() == {"a": ["10.244.0.7"], "b": ["10.244.0.6"]}


def test_content_of_another_form_is_told_and_crashes_nothing(host: Host) -> None:
    put(host, A, B)
    host.stop()
    copy = host.state_dir / "kept"
    shutil.copy(host.state_dir / "state.db", copy)
    for statement in (
        "update change set named = '[1]'",
        "update change set at = 'now'",
        "update change set confirmation = '[]'",
        "update change set actions = x'ff'",
        "update service set text = 7 where name = 'a'",
        "update service set text = '[' where name = 'a'",
        "drop table service",
    ):
        shutil.copy(copy, host.state_dir / "state.db")
        with closing(sqlite3.connect(host.state_dir / "state.db", isolation_level=None)) as database:
            database.execute(statement)
        host.start()
        assert host.problems("store"), statement
        assert "Traceback" not in host.log, statement
        host.stop()
