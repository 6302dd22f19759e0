"""What a vipd keeps in the cache of its state directory."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def cached(state_dir: Path, bucket: str) -> dict[str, str]:
    """The entries of a bucket; none while there is no file."""
    path = state_dir / "cache.db"
    if not path.is_file():
        return {}
    with closing(sqlite3.connect(path)) as database:
        try:
            rows = database.execute("select key, value from entry where bucket = ?", (bucket,)).fetchall()
        except sqlite3.OperationalError:  # it is being made
            return {}
    return {key.decode(): value.decode() if isinstance(value, bytes) else value for key, value in rows}


def spoil(state_dir: Path, bucket: str, value: str) -> None:
    """Replace the values of a bucket."""
    with closing(sqlite3.connect(state_dir / "cache.db")) as database, database:
        database.execute("update entry set value = ? where bucket = ?", (value, bucket))
