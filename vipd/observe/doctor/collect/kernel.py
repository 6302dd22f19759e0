"""Kernel settings, connection tracking's counters, the clock."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack, ConntrackError, open_socket
from vipd.model.service import Family, Protocol, socket_text
from vipd.observe.doctor.checks.conntrack import COUNT, MAXIMUM, NEARLY_FULL, SNAT_PORTS
from vipd.observe.doctor.checks.kernel_settings import (
    BRIDGE,
    FORWARDING,
    IPV6_DISABLED,
    LIBERAL,
    NEIGHBOURS,
    accept_advertisements,
    reverse_path,
)
from vipd.observe.doctor.facts import Kernel

SETTINGS = (*FORWARDING.values(), LIBERAL, NEIGHBOURS, COUNT, MAXIMUM, *BRIDGE.values())
OF_DEVICES = (reverse_path("*"), accept_advertisements("*"), IPV6_DISABLED.format("*"))
TIMEX_BYTES = 1024
"""Larger than struct timex of any machine. All zero, it only reads."""
TIME_ERROR = 5
"""Return value of adjtimex(2) while the clock is not synchronised."""


MAX_SHOWN = 40
"""Characters of a value that is not understood."""


def read_kernel(root: Path, *, netlink: bool, clock: bool) -> Kernel:
    """The kernel's facts; netlink and the clock are read only on request."""
    settings, unread = {}, {}
    sysctls = root / "proc/sys"
    of_devices = (path for pattern in OF_DEVICES for path in sysctls.glob(pattern))
    for path in (*(sysctls / name for name in SETTINGS), *of_devices):
        name = str(path.relative_to(sysctls))
        try:
            settings[name] = path.read_text().strip()
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            unread[name] = f"it cannot be read: {error}"
        else:
            if not settings[name].lstrip("-").isdigit():
                unread[name] = f"it is no number: {settings.pop(name)[:MAX_SHOWN]!r}"
    counters, counters_fault = _counters(root, tracking=COUNT in settings)
    synchronised, clock_fault = _synchronised() if clock else (None, "")
    return Kernel(
        settings,
        counters,
        unread=unread,
        counters_fault=counters_fault,
        conntrack_fault=_conntrack_fault() if netlink else "",
        neighbours=_neighbours(root)[0],
        neighbours_refused=_neighbours(root)[1],
        snat=_masqueraded(settings) if netlink else {},
        ipvs=_ipvs(root),
        affinity_limit=_number(root / "sys/module/xt_recent/parameters/ip_list_tot"),
        reverse_path_drops=_pair(root / "proc/net/netstat", "TcpExt:", "IPReversePathFilter"),
        clock_synchronised=synchronised,
        clock_fault=clock_fault,
    )


def reread(root: Path, before: Kernel, seconds: float) -> Kernel:
    """The same with the growth of the counters of connection tracking in this many seconds."""
    if before.counters_fault or before.fault:
        return replace(before, neighbours_refused=0)
    counters, fault = _counters(root, tracking=COUNT in before.settings)
    refused = _neighbours(root)[1] - before.neighbours_refused
    # Counters that restart, as those of a CPU that is back online, have not grown.
    grown = {name: max(0, number - before.conntrack.get(name, 0)) for name, number in counters.items()}
    return replace(
        before,
        conntrack=counters,
        conntrack_new=grown,
        watched_seconds=seconds,
        counters_fault=fault,
        neighbours_refused=max(0, refused),
    )


def _counters(root: Path, *, tracking: bool) -> tuple[dict[str, int], str]:
    """The counters of connection tracking, or why they cannot be read; neither if it is not used."""
    path = root / "proc/net/stat/nf_conntrack"
    try:
        return _table(path.read_text()), ""
    except FileNotFoundError:
        return {}, f"this kernel has no /{path.relative_to(root)}" if tracking else ""
    except (OSError, ValueError) as error:
        return {}, f"the counters of connection tracking cannot be read: {error}"


def _table(text: str) -> dict[str, int]:
    """Counters with a column each, a line for each CPU in hexadecimal, added up. Raises ValueError."""
    head, *rows = (line.split() for line in text.splitlines())
    if any(len(row) != len(head) for row in rows):
        raise ValueError("lines of different lengths")
    return {name: sum(int(row[at], 16) for row in rows) for at, name in enumerate(head)}


def _neighbours(root: Path) -> tuple[int | None, int]:
    """The number of IPv4 neighbours, which every line repeats, and how often their table was full. None:
    unknown."""
    try:
        head, *rows = (line.split() for line in (root / "proc/net/stat/arp_cache").read_text().splitlines())
        full = head.index("table_fulls")
        return int(rows[0][head.index("entries")], 16), sum(int(row[full], 16) for row in rows)
    except (OSError, ValueError, IndexError):
        return None, 0


def _masqueraded(settings: Mapping[str, str]) -> dict[tuple[Protocol, str, str], int] | None:
    """Masqueraded flows by protocol, source and backend; None if unknown. They are only counted where there
    are enough: listing a large table takes seconds."""
    count = settings.get(COUNT, "")
    return snat_flows() if count.isdigit() and int(count) >= NEARLY_FULL * SNAT_PORTS else {}


def snat_flows() -> dict[tuple[Protocol, str, str], int] | None:
    """The tracked flows that were masqueraded, by protocol, source and backend; None if the table cannot be
    listed."""
    found = Counter[tuple[Protocol, str, str]]()
    try:
        for family in Family:
            with Conntrack(open_socket()) as table:
                for entries in table.dump(Query(family)):
                    found.update(
                        (e.protocol, e.reply_destination[0], socket_text(*e.reply_source))
                        for e in entries
                        if e.reply_destination[0] != e.source[0]
                    )
    except ConntrackError:
        return None
    return dict(found)


def _ipvs(root: Path) -> frozenset[str]:
    """What IPVS serves; nothing where the kernel does not have it."""
    try:
        lines = (root / "proc/net/ip_vs").read_text().splitlines()
    except (OSError, ValueError):
        return frozenset()
    found = set()
    for words in map(str.split, lines):
        if words[:1] == ["FWM"] and len(words) > 1:
            found.add(f"FWM {int(words[1], 16)}")
        elif words[:1] and words[0] in ("TCP", "UDP", "SCTP") and len(words) > 1:
            with contextlib.suppress(ValueError):
                found.add(f"{_ipvs_address(words[1])}/{words[0].lower()}")
    return frozenset(found)


def _ipvs_address(text: str) -> str:
    """`0A60000A:0050` or `[fd00:...]:0050` as an address and a port. Raises ValueError."""
    address, _, port = text.rpartition(":")
    place = ip_address(address.strip("[]") if "[" in address else bytes.fromhex(address))
    return socket_text(str(place), int(port, 16))


def _pair(path: Path, group: str, name: str) -> int | None:
    """A counter of a file with a line of names and one of numbers for each group; None without it."""
    try:
        names, numbers = (line.split() for line in path.read_text().splitlines() if line.startswith(group))
        return int(numbers[names.index(name)])
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # the module is not loaded, or we are not root


def _conntrack_fault() -> str:
    """Why the table cannot be listed; empty when it can. The first answer is enough."""
    try:
        with Conntrack(open_socket()) as table:
            next(table.dump(Query(Family.IPV4)), None)
    except ConntrackError as error:
        return f"{error.what}: {error.why}"
    return ""


def _synchronised() -> tuple[bool | None, str]:
    """Whether a time server corrects the clock, or why that is unknown."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError) as error:
        return None, f"adjtimex cannot be called: {error}"
    state = adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    if state < 0:
        return None, f"adjtimex: {os.strerror(ctypes.get_errno())}"
    return state != TIME_ERROR, ""
