"""Each kind of file that vipd writes into its state directory is in the newest folder, and documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import vipd
from tests.upgrade.folder import folders, state_files

ROOT = Path(__file__).parents[2]
WRITERS = frozenset({"write_durably", "write_atomically", "open_own"})
"""Of `vipd.host.durable`: no other function writes there."""

WRITTEN = {
    ("vipd/sources/store.py", "StoreSource._write"): ("services.yaml", "services.yaml.last-good"),
    ("vipd/sources/history.py", "StoreHistory._write"): ("history.jsonl",),
    ("vipd/sources/files.py", "FileSource._save_copy"): ("accepted/",),
    ("vipd/sources/files.py", "FileSource._save_record"): ("services-dir.json",),
    ("vipd/sources/override_store.py", "OverrideStore._save"): ("overrides.json",),
    ("vipd/sources/maintenance_store.py", "MaintenanceStore.put"): ("maintenance.json",),
    ("vipd/sources/etcd/snapshot_file.py", "SnapshotFile._append"): ("etcd/snapshot",),
    ("vipd/sources/etcd/snapshot_file.py", "SnapshotFile._write"): ("etcd/snapshot",),
    ("vipd/host/host_changes.py", "HostChanges._write"): ("host-changes.json",),
    ("vipd/host/preflight.py", "_state_lock_file"): ("lock",),
    ("vipd/health/record_file.py", "save"): ("health.json",),
    ("vipd/resolver/saved_answers.py", "save"): ("names.json",),
    ("vipd/dataplane/chosen.py", "ChosenDataplane.write"): ("dataplane",),
    ("vipd/dataplane/conntrack/checkpoint.py", "Checkpoint.write"): ("flow-targets.json",),
    ("vipd/observe/events/event_log.py", "EventLog._open"): ("events.jsonl", "events.1.jsonl"),
    ("vipd/observe/flow_stats/totals_file.py", "write"): ("counters.json",),
    # These read, or write elsewhere.
    ("vipd/host/durable.py", "read_own"): (),
    ("vipd/host/durable.py", "write_durably"): (),
    ("vipd/host/preflight.py", "_remove_stale_lock"): (),
    ("vipd/host/preflight.py", "_own_lock"): (),
    ("vipd/sources/files.py", "_read_copy"): (),
    ("vipd/cli/cleanup.py", "_is_held"): (),
}
"""The functions that open a file of vipd's own, and the files that each writes. One that is missing here is
new: record its file, and have `test_upgrade.py` notice its loss."""
FILES = frozenset(file for files in WRITTEN.values() for file in files)


def callers(tree: ast.AST, within: str = "") -> Iterator[str]:
    """The functions, with their class, that call one of `WRITERS`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from callers(node, f"{within}.{node.name}".removeprefix("."))
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WRITERS:
            yield within
        yield from callers(node, within)


def test_every_writer_is_listed() -> None:
    found = {
        (str(path.relative_to(ROOT)), function)
        for path in (ROOT / "vipd").rglob("*.py")
        if any(name in (text := path.read_text()) for name in WRITERS)
        for function in callers(ast.parse(text))
    }
    assert found == WRITTEN.keys()


def test_the_newest_folder_is_of_this_version_and_has_every_file() -> None:
    newest = folders()[-1]
    assert newest.name == vipd.__version__, "run: python -m tests.upgrade.recording"
    assert {re.sub("(?<=^accepted/).*", "", file) for file in state_files(newest)} == FILES


def test_the_documentation_lists_every_file() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.partition("## The state directory\n")[2].partition("\nAn unusable file")[0]
    rows = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall("`(.*?)`", row)} == FILES


@pytest.mark.parametrize(
    "call", ["write_durably(p, b'')", "open_own(p, 0)", "with x(write_atomically(p)): pass"]
)
def test_a_new_writer_is_found(call: str) -> None:
    assert list(callers(ast.parse(f"class A:\n  def b(self):\n    if 1:\n      {call}"))) == ["A.b"]
