"""The daemon: asked over its socket, and seen by the abstract sockets that it holds in its namespace."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vipd import __version__
from vipd.api.client import Client, ClientError, url_path
from vipd.observe.doctor.facts import Daemon

PATIENCE = 10.0
"""Seconds of silence to bear."""
SETTLING = 3.0
"""Seconds in which a change is over, usually."""
UNSETTLED = ("pending", "starting")
_HELD = re.compile(r" @vipd/([A-Z0-9]+)$", re.MULTILINE)


def held_prefixes(root: Path) -> frozenset[str]:
    """Chain prefixes of the vipds at work in this network namespace (vipd/start.py)."""
    try:
        return frozenset(_HELD.findall((root / "proc/net/unix").read_text()))
    except OSError:
        return frozenset()


def ask(socket: str) -> tuple[Mapping[str, Any], list[Mapping[str, Any]], str]:
    """Status and services, or why there is no answer. A change on its way is waited for."""
    client = Client(socket, PATIENCE)
    end = time.monotonic() + SETTLING
    try:
        status = client.get(url_path("status"))
        while status["state"] in UNSETTLED and time.monotonic() < end:
            time.sleep(SETTLING / 20)
            status = client.get(url_path("status"))
        return status, client.get(url_path("services"))["services"], ""
    except ClientError as error:
        return {}, [], str(error)


def serves_elsewhere(pid: int, root: Path) -> bool:
    """Whether a vipd with this pid has another network namespace than we; False when that cannot be seen."""
    try:
        command = (root / f"proc/{pid}/cmdline").read_bytes()
        here, there = (root / "proc/self/ns/net").stat(), (root / f"proc/{pid}/ns/net").stat()
    except OSError:
        return False
    return b"vipd" in command and (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)


def describe(
    status: Mapping[str, Any], fault: str, held: frozenset[str], prefix: str, elsewhere: bool
) -> Daemon:
    """What is known of it."""
    others = tuple(sorted(held - {prefix}))
    return Daemon(status, fault, prefix in held, others, elsewhere, __version__)
