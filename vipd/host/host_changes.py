"""Records vipd's changes to this host, on disk before they are made, so that cleanup can undo them after any
crash.

Root undoes the recorded changes, and the daemon's user can write the file: only entries that vipd could have
made count.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Collection
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from vipd.host.durable import make_directory, names_in, read_own, remove_own, rename_own, write_durably

log = logging.getLogger(__name__)

FILE_NAME = "host-changes.json"
REQUIRED = ("sysctls", "tables", "prefixes")
MAX_BYTES = 2**20
MAX_DIGITS = 10
"""Of a number in a kernel setting."""
IP_FORWARD = "net/ipv4/ip_forward"
IPV6_FORWARDING = "net/ipv6/conf/all/forwarding"
BE_LIBERAL = "net/netfilter/nf_conntrack_tcp_be_liberal"
PROXY_NDP = "net/ipv6/conf/all/proxy_ndp"
SYSCTLS = frozenset((IP_FORWARD, IPV6_FORWARDING, BE_LIBERAL, PROXY_NDP))
"""Every kernel setting that vipd ever changes from 0 to 1."""
_CHANGE = {"was": "0", "set": "1"}
_PROXY_DELAY = re.compile(r"net/ipv[46]/neigh/[^/\0]{1,15}/proxy_delay")
"""Those that it changes from any number to 0."""
_TABLE = re.compile(r"ipv[46] (raw|mangle|nat|filter|security)")
_PREFIX = re.compile(r"[A-Z][A-Z0-9]{0,6}")
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")
_DEVICE_STATES = ("made", "up", "down")
DAMAGED = "damaged-"
"""Part of the names of damaged records, before a number."""


@dataclass(slots=True)
class RecordedChanges:
    """The recorded changes."""

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
    announce_tables: list[int] = field(default_factory=list)
    """Routing tables in which vipd has routes for routing daemons."""


class HostChanges:
    """The record of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE_NAME
        self._unwritten: RecordedChanges | None = None
        """Changes not on disk, as the file system is read-only: services must be served all the same."""

    def read(self) -> RecordedChanges:
        """The recorded changes; empty if there is no record, or an unreadable one. Does not modify
        anything."""
        try:
            return self._load()
        except (OSError, ValueError):
            return RecordedChanges()

    def warnings(self) -> tuple[str, ...]:
        """Problems of the record: cleanup may not know everything that it must restore."""
        what = "what vipd has changed on this host is not known to vipctl cleanup"
        if self._unwritten is not None:
            with contextlib.suppress(OSError):
                self._write(self._unwritten)
        found = [
            f"{self._path.with_name(name)}: a damaged record was kept aside: {what}; hint: look at it, then "
            "delete it"
            for name in self._names()
            if name.startswith(f"{FILE_NAME}.{DAMAGED}")
        ]
        try:
            self._load()
        except (OSError, ValueError) as error:
            found.append(f"{self._path}: {_reason(error)}: {what}")
        if self._unwritten is not None:
            found.append(f"{self._path}: {os.strerror(errno.EROFS)}: {what}")
        return tuple(found)

    def record_sysctl(self, name: str, was: str, now: str) -> None:
        """A kernel setting is about to be changed: one of `SYSCTLS` from 0 to 1, or a proxy delay to 0."""
        change = {"was": was, "set": now}
        if (name not in SYSCTLS or change != _CHANGE) and not _is_proxy_delay(name, change):
            raise ValueError(f"{name}: a change from {was} to {now} would not be undone")
        changes = self._to_change()
        if name not in changes.sysctls:
            changes.sysctls[name] = {"was": was, "set": now}
            self._write(changes)

    def record_rules(self, prefix: str, new_tables: list[str]) -> None:
        """Chains of a prefix are about to be written, and these tables to be created."""
        changes = self._to_change()
        tables = [table for table in new_tables if table not in changes.tables]
        if tables or prefix not in changes.prefixes:
            changes.tables += tables
            changes.prefixes += [prefix] if prefix not in changes.prefixes else []
            self._write(changes)

    def record_device(self, name: str, state: str) -> None:
        """A device is about to be `made`, or to get routes; it was found `up` or `down`.

        The first state of a device is the one to restore.
        """
        changes = self._to_change()
        if name not in changes.devices:
            changes.devices[name] = state
            self._write(changes)

    def forget_device(self, name: str) -> None:
        """A device is in its original state again."""
        changes = self._to_change()
        if changes.devices.pop(name, None) is not None:
            self._write(changes)

    def record_accept(self, prefix: str, place: str) -> None:
        """A rule of a chain prefix is about to be written into a foreign chain."""
        changes = self._to_change()
        if place not in changes.accepts or prefix not in changes.prefixes:
            changes.accepts += [place] if place not in changes.accepts else []
            changes.prefixes += [prefix] if prefix not in changes.prefixes else []
            self._write(changes)

    def forget_accept(self, place: str) -> None:
        """That chain contains no rule of vipd's any more."""
        changes = self._to_change()
        if place in changes.accepts:
            changes.accepts.remove(place)
            self._write(changes)

    def record_announce_table(self, table: int) -> None:
        """A route for routing daemons is about to be written into a routing table."""
        changes = self._to_change()
        if table not in changes.announce_tables:
            changes.announce_tables.append(table)
            self._write(changes)

    def forget_announce_table(self, table: int) -> None:
        """That routing table contains no route of vipd's any more."""
        changes = self._to_change()
        if table in changes.announce_tables:
            changes.announce_tables.remove(table)
            self._write(changes)

    def clear(self) -> None:
        """Everything has been undone. A record that cannot be understood is kept aside. Raises OSError."""
        self._to_change()
        remove_own(self._path)

    def _load(self) -> RecordedChanges:
        """Raises OSError when the record cannot be read, and ValueError when it is not understood."""
        if self._unwritten is not None:
            return deepcopy(self._unwritten)
        try:
            text = read_own(self._path, MAX_BYTES).decode("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return RecordedChanges()
        return _parsed(text)

    def _to_change(self) -> RecordedChanges:
        """The recorded changes, for an update of the record. A record that is not understood is kept aside
        first; an unreadable one stays. Raises OSError."""
        try:
            return self._load()
        except ValueError as error:
            aside = self._free_name()
            rename_own(self._path, aside.name)
            why = "what vipd has changed on this host before is not known to vipctl cleanup"
            log.error("%s: %s; kept aside as %s: %s", self._path, _reason(error), aside, why)
            return RecordedChanges()
        except OSError as error:
            text = f"{self._path} cannot be read ({_reason(error)}), and is not overwritten"
            raise OSError(error.errno, text) from None

    def _free_name(self) -> Path:
        names, taken = (f"{FILE_NAME}.{DAMAGED}{number}" for number in count(1)), set(self._names())
        return self._path.with_name(next(name for name in names if name not in taken))

    def _names(self) -> list[str]:
        """Names in the state directory; empty if it is unreadable."""
        try:
            return names_in(self._path.parent)
        except OSError:
            return []

    def _write(self, changes: RecordedChanges) -> None:
        self._unwritten = None
        try:
            make_directory(self._path.parent)
            write_durably(self._path, json.dumps(asdict(changes), indent=1).encode())
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            self._unwritten = changes


def _parsed(text: str) -> RecordedChanges:
    """Raises ValueError."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict) or not found.keys() >= set(REQUIRED):
        raise ValueError("it is no record")
    # A record of an earlier version lacks these.
    later = found.get("devices", {}), found.get("accepts", []), found.get("announce_tables", [])
    changes = RecordedChanges(found["sysctls"], found["tables"], found["prefixes"], *later)
    sound = (
        _is_mapping(changes.sysctls, dict)
        and _is_texts(changes.tables)
        and _is_texts(changes.prefixes)
        and _is_mapping(changes.devices, str)
        and _is_texts(changes.accepts)
        and isinstance(changes.announce_tables, list)
        # The kernel's own tables are not among those that the setting allows.
        and all(type(table) is int and 1 <= table <= 252 for table in changes.announce_tables)
    )
    if not sound:
        raise ValueError("it is no record")
    if alien := _unknown_content(changes):
        raise ValueError(f"it names {alien[:60]!r}, which vipd never does")
    return changes


def _unknown_content(changes: RecordedChanges) -> str:
    """Something that vipd has not written; empty when there is none."""
    found = [
        name
        for name, change in changes.sysctls.items()
        if (name not in SYSCTLS or change != _CHANGE) and not _is_proxy_delay(name, change)
    ]
    found += [table for table in changes.tables if not _TABLE.fullmatch(table)]
    found += [prefix for prefix in changes.prefixes if not _PREFIX.fullmatch(prefix)]
    found += [
        name
        for name, state in changes.devices.items()
        if not _DEVICE.fullmatch(name) or state not in _DEVICE_STATES
    ]
    return next(iter(found), "")


def _is_proxy_delay(name: str, change: dict[str, str]) -> bool:
    """Whether this is the change of a proxy delay from a number to 0."""
    was = change.get("was")
    number = isinstance(was, str) and was.isascii() and was.isdecimal() and len(was) <= MAX_DIGITS
    known = _PROXY_DELAY.fullmatch(name) is not None and ".." not in name
    return known and number and change == {"was": was, "set": "0"}


def proxy_delays(interfaces: Collection[str]) -> list[str]:
    """The settings by which the kernel delays answers for others' addresses on these interfaces."""
    return [
        f"net/{family}/neigh/{name}/proxy_delay" for name in sorted(interfaces) for family in ("ipv4", "ipv6")
    ]


def _is_mapping(found: object, kind: type) -> bool:
    return isinstance(found, dict) and all(isinstance(value, kind) for value in found.values())


def _is_texts(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(value, str) for value in found)


def _reason(error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) else ""
    return why or f"it is damaged: {error}"
