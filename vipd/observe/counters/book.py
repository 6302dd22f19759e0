"""The file that carries the numbers over a restart."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vipd.observe.counters.ledger import Ledger

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Page(NamedTuple):
    """What is kept."""

    ledger: Ledger
    memory: object
    """The dataplane's: what of the kernel's counts the ledger has. None after a reboot."""


def read(path: Path, boot: Path = _BOOT) -> Page:
    """What was written last; empty if there is nothing. Raises OSError, or ValueError if it is damaged."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Page(Ledger(), None)
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    ledger = Ledger.from_json(value.get("ledger"))
    if value.get("boot") == _boot(boot):
        return Page(ledger, value.get("memory"))
    ledger.forget_open_flows()
    return Page(ledger, None)


def value_of(page: Page, boot: Path = _BOOT) -> dict[str, object]:
    """What `write` is to write: a copy of what is known now."""
    return {"boot": _boot(boot), "ledger": page.ledger.to_json(), "memory": page.memory}


def write(path: Path, value: Mapping[str, object]) -> None:
    """Replace the file in one step, not synced: a power cut may bring an older one back. Raises OSError."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(value))
    os.replace(beside, path)  # noqa: PTH105 (the same, but without a returned path)


def _boot(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
