"""API documents for the fake daemon to answer with; `test_answers.py` holds them to the real API's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]


_RECORDED: dict[str, Json] = json.loads(Path(__file__).with_suffix(".json").read_text())
DNS, WEB, STATUS = _RECORDED["DNS"], _RECORDED["WEB"], _RECORDED["STATUS"]
"""Two services, one of them without backends, and a status with a bit of everything."""


def one(view: Json) -> Json:
    """The answer about one service."""
    return {"service": view, "version": "0123456789abcdef"}


def changed(*results: tuple[str, str], **changes: Any) -> Json:
    """The answer to a change, with (action, name) of each service."""
    answer: Json = {
        "changed": any(action != "unchanged" for action, _ in results),
        "applied": True,
        "message": "",
        "stored": "/var/lib/vipd/state.db",
        "results": [{"name": name, "action": action} for action, name in results],
        "warnings": [],
    }
    return answer | changes
