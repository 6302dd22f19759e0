"""Root's tools in a state directory of another user, who has planted there what may do harm.

The daemon's user owns that directory, and a check that it runs, or a hole in vipd, may be somebody else.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dataplane.namespace import Namespace
from tests.lab.node import Node
from tests.model.samples import service
from vipd.control.catalog import merge
from vipd.control.host import FORWARDING, LIBERAL, restore_sysctls
from vipd.dataplane.chosen import ChosenDataplane
from vipd.dataplane.conntrack.checkpoint import Checkpoint
from vipd.host.durable import (
    make_directory,
    move_aside,
    names_in,
    open_own,
    read_own,
    read_regular,
    remove_own,
    write_durably,
)
from vipd.host.host_changes import FILE_NAME, PROXY_NDP, SYSCTLS, HostChanges
from vipd.host.preflight import StartError, state_lock
from vipd.host.settings.settings import Settings
from vipd.observe.events.event_log import EventLog
from vipd.sources.files import FileSource
from vipd.sources.store import StoreSource

pytestmark = pytest.mark.root

NOBODY = 65534
SECRET = "root's own\n"
STATE_FILES = (
    *("lock", "services.yaml", "services.yaml.last-good", "overrides.json", "dataplane", FILE_NAME),
    *("health.json", "counters.json", "flow-targets.json", "events.jsonl", "events.1.jsonl"),
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory that belongs to another user."""
    path = tmp_path / "state"
    path.mkdir(mode=0o750)
    os.chown(path, NOBODY, NOBODY)
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text(SECRET)
    return path


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def pipe(path: Path) -> None:
    os.mkfifo(path)
    os.chown(path, NOBODY, NOBODY)


def test_a_link_where_a_file_is_written_aside_is_replaced(state: Path, victim: Path) -> None:
    for name in ("a", ".a.new"):
        link(state / name, victim)
    write_durably(state / "a", b"new")
    assert victim.read_text() == SECRET
    assert (state / "a").read_text() == "new"
    assert not (state / "a").is_symlink()
    assert (state / "a").stat().st_uid == NOBODY, "the daemon must be able to read what root has written"


@pytest.mark.parametrize("name", ["missing", "there"])
def test_no_lock_is_made_or_truncated_behind_a_link(state: Path, victim: Path, name: str) -> None:
    victim = victim if name == "there" else victim.with_name(name)
    link(state / "lock", victim)
    with pytest.raises(StartError), state_lock(Settings(state_dir=state, chain_prefix="PLANTED")):
        pass
    assert victim.exists() == (name == "there")
    assert name == "missing" or victim.read_text() == SECRET


def test_a_second_name_of_a_file_of_roots_is_not_opened(state: Path, victim: Path) -> None:
    (state / "lock").hardlink_to(victim)
    (state / "events.jsonl").hardlink_to(victim)
    with pytest.raises(StartError, match="hard link"), state_lock(Settings(state_dir=state)):
        pass
    with pytest.raises(OSError, match="hard link"):
        EventLog(state).append(b"line\n")
    assert victim.read_text() == SECRET


def test_events_are_not_written_behind_a_link(state: Path, victim: Path) -> None:
    link(state / "events.jsonl", victim)
    with pytest.raises(OSError, match="symbolic links"):
        EventLog(state).append(b"line\n")
    assert victim.read_text() == SECRET


def test_copies_of_files_are_not_kept_in_another_directory(state: Path, tmp_path: Path) -> None:
    elsewhere, services = tmp_path / "cron.d", tmp_path / "services.d"
    elsewhere.mkdir()
    services.mkdir()
    declared = (
        "apiVersion: vipd/v1\nservices: [{name: a, address: 10.0.0.1, ports: [80], backends: [10.1.0.1]}]\n"
    )
    (services / "a.yaml").write_text(declared)
    link(state / "accepted", elsewhere)
    source = FileSource(services, state / "accepted")
    source.scan()
    merged = merge(source.units())
    source.save_accepted({name: unit.candidate for name, unit in source.units().items()})
    assert len(merged.services) == 1
    assert list(elsewhere.iterdir()) == []
    assert "symbolic link of another user" in source.faults()[0]


def test_nothing_is_removed_renamed_or_listed_in_another_directory(state: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a").write_text(SECRET)
    link(state / "sub", elsewhere)
    for meddle in (
        lambda: remove_own(state / "sub" / "a"),
        lambda: names_in(state / "sub"),
        lambda: read_own(state / "sub" / "a"),
        lambda: make_directory(state / "sub" / "new"),
        lambda: StoreSource(state / "sub" / "services.yaml").save({"a": service("a", "10.0.0.1")}),
    ):
        with pytest.raises(Exception, match="symbolic link of another user"):
            meddle()
    assert "cannot be kept aside" in move_aside(state / "sub" / "a")
    assert [path.name for path in elsewhere.iterdir()] == ["a"]


def test_links_of_root_lead_where_they_lead(state: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").symlink_to("state")
    make_directory(tmp_path / "moved" / "deep" / "er")
    write_durably(tmp_path / "moved" / "deep" / "er" / "a", b"1")
    assert read_own(state / "deep" / "er" / "a") == b"1"
    assert (state / "deep").stat().st_uid == NOBODY
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        read_own(tmp_path / "round" / "a")


RECORDS: dict[str, dict[str, object]] = {
    "absolute": {"sysctls": {"/VICTIM": {"was": "changed", "set": SECRET.strip()}}},
    "upwards": {"sysctls": {"../victim": {"was": "changed", "set": SECRET.strip()}}},
    "another setting": {"sysctls": {"kernel/core_pattern": {"was": "|/tmp/x", "set": "core"}}},
    "another value": {"sysctls": {"net/ipv4/ip_forward": {"was": "7", "set": "1"}}},
    "commands for nft": {"tables": ['ipv4 x;include"/etc/shadow"']},
    "one word for two": {"tables": ["nat"]},
    "no prefix": {"prefixes": ["-"]},
    "no device": {"devices": {"../../x": "made"}},
    "no state of a device": {"devices": {"vipd0": "gone"}},
}


@pytest.mark.parametrize("planted", RECORDS)
def test_a_record_names_nothing_but_what_vipd_does(state: Path, victim: Path, planted: str) -> None:
    root = victim.parent / "sys"
    (root / "kernel").mkdir(parents=True)
    (root / "kernel/core_pattern").write_text("core\n")
    record: dict[str, object] = {"sysctls": {}, "tables": [], "prefixes": [], **RECORDS[planted]}
    text = json.dumps(record).replace("/VICTIM", str(victim))
    (state / FILE_NAME).write_text(text)
    assert restore_sysctls(HostChanges(state), root) == []
    assert victim.read_text() == SECRET
    assert (root / "kernel/core_pattern").read_text() == "core\n"
    assert HostChanges(state).read().tables == []
    (warning,) = HostChanges(state).warnings()
    assert "which vipd never does" in warning


def test_only_these_settings_are_changed_and_put_back(tmp_path: Path) -> None:
    assert {*FORWARDING.values(), LIBERAL, PROXY_NDP} == SYSCTLS
    HostChanges(tmp_path).record_sysctl("net/ipv4/neigh/eth0/proxy_delay", "80", "0")
    for name, was, now in (("net/ipv4/neigh/../proxy_delay", "80", "0"), (LIBERAL, "2", "0")):
        with pytest.raises(ValueError, match="would not be undone"):
            HostChanges(tmp_path).record_sysctl(name, was, now)
    with pytest.raises(ValueError, match="would not be undone"):
        HostChanges(tmp_path).record_sysctl("net/ipv4/conf/all/route_localnet", "0", "1")


READERS: dict[str, Callable[[Path], object]] = {
    FILE_NAME: lambda state: HostChanges(state).warnings(),
    "services.yaml": lambda state: StoreSource(state / "services.yaml").load(),
    "dataplane": lambda state: ChosenDataplane(state).read(),
    "flow-targets.json": lambda state: Checkpoint(state).read(),
    "events.jsonl": lambda state: EventLog(state).repair(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_huge_file_is_not_read(state: Path, name: str) -> None:
    with (state / name).open("wb") as file:
        file.truncate(20 * 2**30)
    READERS[name](state)


@pytest.mark.parametrize("depth", [100_000])
def test_a_record_that_is_nested_deeply_is_damaged(state: Path, depth: int) -> None:
    (state / FILE_NAME).write_text("[" * depth)
    assert "nested too deeply" in HostChanges(state).warnings()[0]


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    pipe(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"is not a regular file|is a directory"):
            read_regular(path)
        with pytest.raises(OSError, match=r"is not a regular file|is a directory"):
            open_own(path, os.O_RDONLY)


WRITES = frozenset(
    ("write_text", "write_bytes", "unlink", "rename", "mkdir", "symlink_to", "hardlink_to", "chmod")
)
NOT_OF_THE_STATE = {
    "vipd.host.durable": "it is what the others use",
    "vipd.control.host": "kernel settings of a fixed list",
    "vipd.host.lan.interfaces": "kernel settings of a fixed list",
    "vipd.host.vip_routes": "kernel settings of vipd's device",
    "vipd.observe.live_trace.legacy": "a kernel setting",
    "vipd.api.peers": "the socket",
    "vipd.daemon.daemon": "the socket",
    "vipd.host.program_runner": "its own score for when the kernel is out of memory",
    "vipd.daemon.worker_process": "its own score for when the kernel is out of memory",
    "vipd.cli.edit": "a temporary file of its own, made by tempfile",
    "vipd.cli.manual.__main__": "a tool of the build",
    "vipd.observe.bench.namespace": "a directory of its own",
    "vipd.observe.bench.usage": "a kernel setting",
    "vipd.observe.bench.connections": "a kernel setting",
}


def test_files_are_written_and_removed_in_one_place_alone() -> None:
    root, found, words = Path(__file__).parents[2], set(), {*WRITES, "O_CREAT"}
    for path in (root / "vipd").rglob("*.py"):
        text = path.read_text()
        if not any(word in text for word in words):
            continue  # parsing all takes seconds
        if any(isinstance(n, ast.Attribute) and n.attr in words for n in ast.walk(ast.parse(text))):
            found.add(".".join(path.relative_to(root).with_suffix("").parts))
    assert found - NOT_OF_THE_STATE.keys() <= {"vipd.host.preflight", "vipd.observe.events.event_log"}, (
        "both by open_own"
    )


def vipd(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of vipd's in a network namespace of its own."""
    with Namespace() as namespace:
        node = Node(namespace.name, "host", "", "")
        return node.run(sys.executable, "-m", module, *arguments, check=False, timeout=120)


@pytest.mark.parametrize("plant", ["pipe", "link"])
def test_root_cleans_up_and_applies_where_everything_is_planted(
    state: Path, victim: Path, tmp_path: Path, plant: str
) -> None:
    services = tmp_path / "services.d"
    services.mkdir()
    for name in STATE_FILES:
        for each in (name, f".{name}.new"):
            pipe(state / each) if plant == "pipe" else link(state / each, victim)
    link(state / "accepted", tmp_path)
    flags = ("--state-dir", str(state), "--services-dir", str(services), "--socket", str(tmp_path / "s"))
    once = vipd("vipd", *flags, "--once")
    assert "lock: " in once.stderr, once.stderr
    (state / "lock").unlink()
    once = vipd("vipd", *flags, "--once")
    assert "Traceback" not in once.stderr
    cleaned = vipd("vipd.cli.main", "cleanup", "--state-dir", str(state))
    assert "Traceback" not in cleaned.stderr
    assert victim.read_text() == SECRET
    assert {path.name for path in tmp_path.iterdir()} <= {"state", "victim", "services.d"}
