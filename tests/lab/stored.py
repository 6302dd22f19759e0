"""What is in the database of a state directory, read without vipd."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path


def stored(state_dir: Path) -> str:
    """The services that vipctl added, as a declaration; those on disk, which a restarted vipd would read."""
    specs: list[object] = []
    path = state_dir / "state.db"
    if path.exists():
        with closing(sqlite3.connect(path)) as database:
            rows = database.execute("select text from service order by rowid")
            specs = [json.loads(text) for (text,) in rows]
    return json.dumps({"apiVersion": "vipd/v1", "services": specs})


def overrides(state_dir: Path) -> list[dict[str, object]]:
    """The parts of overrides on disk, and the maintenance of the host; JSON objects."""
    with closing(sqlite3.connect(state_dir / "state.db")) as database:
        return [json.loads(text) for (text,) in database.execute("select text from override order by rowid")]
