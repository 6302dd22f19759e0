"""What vipd has done to this host, on disk before it is done, so that cleanup can undo it after any crash."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vipd.durable import write_durably

FILE_NAME = "host-changes.json"


@dataclass(slots=True)
class Changes:
    """What was done."""

    sysctls: dict[str, dict[str, str]] = field(default_factory=dict)
    """Path below /proc/sys -> {"was": before, "set": by vipd}."""
    tables: list[str] = field(default_factory=list)
    """`FAMILY TABLE` of iptables tables that did not exist before."""
    prefixes: list[str] = field(default_factory=list)
    """Chain prefixes that were written."""
    devices: dict[str, str] = field(default_factory=dict)
    """Network device that carries routes to VIPs -> `made` by vipd, or found `up` or `down`."""
    accepts: list[str] = field(default_factory=list)
    """Chains of others in which vipd accepts its flows, such as `inet filter forward`."""


class HostRecord:
    """The record of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME

    def read(self) -> Changes:
        """What is recorded; nothing when there is no record, or none that can be read."""
        try:
            found = json.loads(self._path.read_text())
            devices = found.get("devices", {})  # a record of an earlier version has none
            accepts = found.get("accepts", [])
            return Changes(found["sysctls"], found["tables"], found["prefixes"], devices, accepts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Changes()

    def sysctl(self, name: str, was: str, now: str) -> None:
        """A kernel setting is about to be changed. The first value seen is the one to go back to."""
        changes = self.read()
        if name not in changes.sysctls:
            changes.sysctls[name] = {"was": was, "set": now}
            self._write(changes)

    def rules(self, prefix: str, new_tables: list[str]) -> None:
        """Chains of a prefix are about to be written, and these tables to come into being."""
        changes = self.read()
        tables = [table for table in new_tables if table not in changes.tables]
        if tables or prefix not in changes.prefixes:
            changes.tables += tables
            changes.prefixes += [prefix] if prefix not in changes.prefixes else []
            self._write(changes)

    def forget_prefix(self, prefix: str) -> None:
        """Every chain of a prefix has been removed."""
        changes = self.read()
        if prefix in changes.prefixes:
            changes.prefixes.remove(prefix)
            self._write(changes)

    def device(self, name: str, state: str) -> None:
        """A device is about to be `made`, or to get routes, having been found `up` or `down`.

        The first state of a device is the one to go back to.
        """
        changes = self.read()
        if name not in changes.devices:
            changes.devices[name] = state
            self._write(changes)

    def forget_device(self, name: str) -> None:
        """A device is as it was before."""
        changes = self.read()
        if changes.devices.pop(name, None) is not None:
            self._write(changes)

    def accept(self, prefix: str, place: str) -> None:
        """A rule of a chain prefix is about to be written into a chain of somebody else."""
        changes = self.read()
        if place not in changes.accepts or prefix not in changes.prefixes:
            changes.accepts += [place] if place not in changes.accepts else []
            changes.prefixes += [prefix] if prefix not in changes.prefixes else []
            self._write(changes)

    def forget_accept(self, place: str) -> None:
        """That chain holds no rule of ours any more."""
        changes = self.read()
        if place in changes.accepts:
            changes.accepts.remove(place)
            self._write(changes)

    def clear(self) -> None:
        """Everything has been undone."""
        self._path.unlink(missing_ok=True)

    def _write(self, changes: Changes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        write_durably(self._path, json.dumps(asdict(changes), indent=1).encode())
