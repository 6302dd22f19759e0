"""A recorded state directory: `0.1.0/state/...`, and in `0.1.0/recorded.json` what its daemon knew.

The daemon's directory is written there as `/HOST`, and its boot as zeros: a trial is what follows a reboot.
`place` moves every time to now, because verdicts of checks are trusted for minutes only. A database is kept
as the SQL that makes it, with its texts to be read.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import time
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.lab.daemon import Daemon

ROOT = Path(__file__).parent
RECORDED, STATE = "recorded.json", "state"
DIRECTORY = "/HOST"
BOOT = "00000000-0000-0000-0000-000000000000"
DATABASES = ("state.db", "state.db.last-good", "cache.db")
TIME = re.compile(r"(?<![\d.])1\d{9}(?=[.,\]}\s])|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
"""Seconds since 1970, and RFC 3339 in UTC; without the fraction, which stays."""


def folders() -> list[Path]:
    """Those of all releases, the newest last."""
    return sorted(
        (path.parent for path in ROOT.glob(f"*/{RECORDED}")),
        key=lambda folder: tuple(map(int, folder.name.split("."))),
    )


def kinds_of_files(state: Path) -> set[str]:
    """The files of a state directory, by their paths there."""
    return {str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()}


def save(folder: Path, daemon: Daemon, knowledge: dict[str, Any]) -> None:
    """Replace a folder by the state directory of a daemon that has ended."""
    shutil.rmtree(folder, ignore_errors=True)
    own = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    names = {quote(str(daemon.directory), safe=""): quote(DIRECTORY, safe="")}
    texts = {str(daemon.directory): DIRECTORY, own: BOOT}
    _copy(daemon.state_dir, folder / STATE, names, texts, 0)
    at = int(time.time()) + 1  # no verdict of a check may seem to be of the future
    text = json.dumps({"at": at, "knowledge": knowledge}, indent=1) + "\n"
    (folder / RECORDED).write_text(_replaced(text, texts))


def place(folder: Path, daemon: Daemon) -> dict[str, Any]:
    """Make it the state directory of a daemon that has not started, with all times moved as if it had been
    recorded now. Returns what the recorded daemon knew, with times moved likewise."""
    text = (folder / RECORDED).read_text()
    seconds = int(time.time()) - json.loads(text)["at"]
    texts = {DIRECTORY: str(daemon.directory)}
    names = {quote(DIRECTORY, safe=""): quote(str(daemon.directory), safe="")}
    _copy(folder / STATE, daemon.state_dir, names, texts, seconds)
    found: dict[str, Any] = json.loads(_moved(_replaced(text, texts), seconds))["knowledge"]
    return found


def _copy(source: Path, target: Path, names: dict[str, str], texts: dict[str, str], seconds: int) -> None:
    for path in sorted(source.rglob("*")):
        copy = target / _replaced(str(path.relative_to(source)), names)
        if path.is_file():
            copy.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            _write(copy, _moved(_replaced(_read(path), texts), seconds))


def _read(path: Path) -> str:
    """A file, as text."""
    if path.name not in DATABASES or path.read_bytes()[:6] != b"SQLite":
        return path.read_text()
    with closing(sqlite3.connect(path)) as database:
        (form,) = database.execute("pragma user_version").fetchone()
        # Something else than 0: a new one.
        marks = f"pragma user_version = {form};\npragma application_id = 1;\n"
        return "\n".join([*map(_readable, database.iterdump()), marks])


def _readable(statement: str) -> str:
    """With the text of each blob."""

    def text(blob: re.Match[str]) -> str:
        quoted = bytes.fromhex(blob[1]).decode().replace("'", "''")
        return f"cast('{quoted}' as blob)"

    return re.sub(r"X'([0-9A-F]*)'", text, statement)


def _write(path: Path, text: str) -> None:
    """The file of a text; a database only in a state directory that a daemon gets."""
    if path.name not in DATABASES or path.is_relative_to(ROOT):
        path.write_text(text)
        return
    with closing(sqlite3.connect(path)) as database:
        database.executescript(text)


def _replaced(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def _moved(text: str, seconds: int) -> str:
    def moved(found: re.Match[str]) -> str:
        if "T" not in found[0]:
            return str(int(found[0]) + seconds)
        return (datetime.fromisoformat(found[0]) + timedelta(seconds=seconds)).isoformat()

    return TIME.sub(moved, text)
