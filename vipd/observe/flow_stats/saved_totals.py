"""The numbers in the cache, which carries them over a restart: an entry for each service, and for each of the
kernel's counts that the totals include."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vipd.observe.flow_stats.refusals import Refusals
from vipd.observe.flow_stats.totals import FlowTotals
from vipd.sources.cache import Value

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ABOUT_KEY, _SERVICE, _COUNTER = "about", "service ", "counter "


class SavedTotals(NamedTuple):
    """What an earlier run had."""

    totals: FlowTotals
    refusals: Refusals
    counter_state: object
    """The dataplane's: the kernel's counts that the totals include. None after a reboot."""


def decode(rows: Mapping[str, Value], boot: Path = _BOOT) -> SavedTotals:
    """From entries. Raises ValueError for others."""
    if not rows:
        return SavedTotals(FlowTotals(), Refusals(), None)
    try:
        about = json.loads(rows[_ABOUT_KEY])
        services = {key.removeprefix(_SERVICE): json.loads(text) for key, text in _starting(rows, _SERVICE)}
        totals, refusals = FlowTotals.from_json({"lost": about["lost"], "services": services}), Refusals()
        refusals.restore(about["refused"])
        if about["boot"] == boot_id(boot):
            return SavedTotals(totals, refusals, _nested(rows))
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    totals.forget_open_flows()
    return SavedTotals(totals, refusals, None)


def about(totals: FlowTotals, refusals: Refusals) -> dict[str, object]:
    """The entry of what is no service's."""
    return {_ABOUT_KEY: {"boot": boot_id(), "lost": totals.lost, "refused": refusals.to_json()}}


def service_key(name: str) -> str:
    """The key of a service."""
    return f"{_SERVICE}{name}"


def flat(state: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """The entries of a dataplane's state: lists of rows within mappings, of which the last value is a count
    and the others say of what."""
    if isinstance(state, Mapping):
        for name, inner in state.items():
            yield from flat(inner, (*path, name))
    elif isinstance(state, list):
        for row in state:
            yield f"{_COUNTER}{json.dumps([path, *row[:-1]], separators=(',', ':'))}", row[-1]


def _nested(rows: Mapping[str, Value]) -> dict[str, object]:
    """The state of such entries. Raises one of LookupError, TypeError, ValueError."""
    state: dict[str, object] = {}
    for key, text in _starting(rows, _COUNTER):
        path, *row = json.loads(key.removeprefix(_COUNTER))
        level = state
        for name in path[:-1]:
            inner = level.setdefault(name, {})
            if not isinstance(inner, dict):
                raise TypeError("it has another form")
            level = inner
        counts = level.setdefault(path[-1], [])
        if not isinstance(counts, list):
            raise TypeError("it has another form")
        counts.append([*row, json.loads(text)])
    return state


def _starting(rows: Mapping[str, Value], start: str) -> Iterator[tuple[str, Value]]:
    return ((key, text) for key, text in rows.items() if key.startswith(start))


def boot_id(path: Path = _BOOT) -> str:
    """Another one after each boot."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
