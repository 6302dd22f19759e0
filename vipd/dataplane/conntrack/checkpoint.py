"""The destinations of the last run's flows, on disk: after a restart, flows to removed ones end.

A service that is removed while vipd is down is missing from the next run's input, but its flows continue
in the kernel. Only destinations are kept whose flows end with their backend: UDP, and `on_remove: reset`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from vipd.dataplane.conntrack.entries import SocketAddress
from vipd.dataplane.conntrack.stale import Destination, FlowTarget
from vipd.host.durable import read_own, write_durably
from vipd.model.service import Family, Protocol

FILE_NAME = "flow-targets.json"
MAX_BACKENDS = 500_000
"""For all destinations together; further ones are left out. That is a file of about 15 MB."""
LARGEST_FILE = 64 << 20
"""Bytes; a larger file is not vipd's."""

log = logging.getLogger(__name__)


class SavedTarget(NamedTuple):
    """State of a destination when the last process ended."""

    backends: frozenset[SocketAddress]
    """Its backends; none if its flows are known to have ended."""
    since: float | None = None
    """When the rules without it were written, on the scheduler's clock; None: it was in use."""


SavedTargets = dict[Destination, SavedTarget]


class Checkpoint:
    """The file in one state directory. Its methods block, and are called one at a time, in any thread."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME
        self._written = b""
        """Digest of the file's content."""

    def read(self) -> SavedTargets:
        """The backends of each destination in the file; nothing if the file is missing or
        unreadable."""
        try:
            return dict(_destination(item) for item in json.loads(read_own(self._path, LARGEST_FILE)))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.warning("%s: cannot be read, flows of removed services may go on: %s", self._path, error)
            return {}

    def write(
        self,
        targets: Mapping[Destination, FlowTarget],
        resets: Mapping[Destination, float | None] | None = None,
    ) -> None:
        """Replace the file, if its content differs. `resets`: removed destinations whose clients get a
        reset, and since when. Raises OSError."""
        data = json.dumps(_content(targets, resets or {}), separators=(",", ":")).encode()
        digest = blake2b(data).digest()
        if digest == self._written:
            return
        try:
            write_durably(self._path, data)
        except OSError as error:
            raise OSError(f"{self._path}: cannot be written: {error.strerror or error}") from None
        self._written = digest


def _content(
    targets: Mapping[Destination, FlowTarget], resets: Mapping[Destination, float | None]
) -> list[object]:
    found: list[object] = []
    left = MAX_BACKENDS
    for destination, target in targets.items():
        backends = frozenset(target.serving) | (target.former_backends or frozenset())
        if target.end_stale_flows and backends and len(backends) <= left:
            left -= len(backends)
            since = resets.get(destination)
            found.append([*destination, sorted(backends), *(() if since is None else (since,))])
    found += ([*place, [], since] for place, since in resets.items() if place not in targets)
    return found


def _destination(item: list[Any]) -> tuple[Destination, SavedTarget]:
    """One destination with its backends. Raises ValueError or TypeError for anything else."""
    family, protocol, address, port, backends, *rest = item
    if not (isinstance(address, str) and isinstance(port, int) and isinstance(backends, list)):
        raise TypeError("it has another form")
    since = float(rest[0]) if rest else None
    found = frozenset((str(backend), int(number)) for backend, number in backends)
    return Destination(Family(family), Protocol(str(protocol)), address, port), SavedTarget(found, since)
