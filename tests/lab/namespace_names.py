"""Names of network namespaces tell which process made them, so that what it left behind can be deleted."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"vipd-([0-9a-f]+)-[0-9a-f]{6}-\w+")


def new_prefix() -> str:
    """Beginning of a name that nobody has; `-` and a word follow."""
    return f"vipd-{os.getpid():x}-{secrets.token_hex(3)}"


def left_behind() -> list[str]:
    """Namespaces of processes that have ended, as when a run is killed."""
    found = (_NAME.fullmatch(name) for name in (os.listdir(NAMESPACES) if NAMESPACES.exists() else ()))  # noqa: PTH208
    return [each[0] for each in found if each and not Path(f"/proc/{int(each[1], 16)}").exists()]
