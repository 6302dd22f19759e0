"""The file that carries the numbers over a restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vipd.host.durable import read_own, write_atomically
from vipd.observe.flow_stats.refusals import Refusals
from vipd.observe.flow_stats.totals import FlowTotals

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SavedTotals(NamedTuple):
    """The content of the file."""

    totals: FlowTotals
    refusals: Refusals
    counter_state: object
    """The dataplane's: the kernel's counts that the totals include. None after a reboot."""


def read(path: Path, boot: Path = _BOOT) -> SavedTotals:
    """The content of the file; empty if there is none. Raises OSError, or ValueError if it is damaged."""
    try:
        text = read_own(path).decode()
    except FileNotFoundError:
        return SavedTotals(FlowTotals(), Refusals(), None)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    totals, refusals = FlowTotals.from_json(value.get("totals")), Refusals()
    refusals.restore(value.get("refused"))
    if value.get("boot") == _boot(boot):
        return SavedTotals(totals, refusals, value.get("counters"))
    totals.forget_open_flows()
    return SavedTotals(totals, refusals, None)


def value_of(saved: SavedTotals, boot: Path = _BOOT) -> dict[str, object]:
    """The input of `write`: a copy of the current state."""
    return {
        "boot": _boot(boot),
        "totals": saved.totals.to_json(),
        "refused": saved.refusals.to_json(),
        "counters": saved.counter_state,
    }


def write(path: Path, value: Mapping[str, object]) -> None:
    """Replace the file in one step, not synced: a power cut may bring an older one back. Raises OSError."""
    write_atomically(path, json.dumps(value).encode())


def _boot(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
