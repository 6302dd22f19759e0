"""The file that carries the numbers over a restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from vipd.host.batches import in_batches
from vipd.host.durable import read_own, write_atomically
from vipd.observe.flow_stats.refusals import Refusals
from vipd.observe.flow_stats.totals import FlowTotals

COPIED_AT_ONCE = 200
"""Services: some milliseconds."""
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


async def value_of(saved: SavedTotals, boot: Path = _BOOT) -> dict[str, object]:
    """The input of `write`: a copy of the current state. The totals are copied in parts, between which no new
    flows may be added."""
    refused, services = saved.refusals.to_json(), dict[str, object]()
    async for part in in_batches(dict.fromkeys(saved.totals.services), COPIED_AT_ONCE):
        services.update(saved.totals.rows(part))
    totals = {"lost": saved.totals.lost, "services": services}
    return {"boot": _boot(boot), "totals": totals, "refused": refused, "counters": saved.counter_state}


def write(path: Path, value: Mapping[str, object]) -> None:
    """Replace the file in one step, not synced: a power cut may bring an older one back. Blocks. Raises
    OSError."""
    write_atomically(path, _encoded(value).encode())


def _encoded(value: object) -> str:
    """A value as JSON. Large parts are encoded in parts: a single call holds Python's lock all the time."""
    if isinstance(value, Mapping) and len(value) <= COPIED_AT_ONCE:
        return f"{{{', '.join(f'{json.dumps(key)}: {_encoded(item)}' for key, item in value.items())}}}"
    if isinstance(value, Mapping):
        items = iter(value.items())
        parts = iter(lambda: dict(islice(items, COPIED_AT_ONCE)), {})
        return f"{{{', '.join(json.dumps(part)[1:-1] for part in parts)}}}"
    if isinstance(value, list):
        starts = range(0, len(value), COPIED_AT_ONCE)
        return f"[{', '.join(json.dumps(value[at : at + COPIED_AT_ONCE])[1:-1] for at in starts)}]"
    return json.dumps(value)


def _boot(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
