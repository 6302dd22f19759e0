"""Kernel settings, connection tracking's counters, the clock."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from vipd.dataplane.conntrack.messages import Query
from vipd.dataplane.conntrack.netlink import Conntrack, ConntrackError, open_socket
from vipd.model import Family
from vipd.observe.doctor.checks.conntrack import COUNT, MAXIMUM
from vipd.observe.doctor.checks.kernel_settings import BRIDGE, FORWARDING, LIBERAL
from vipd.observe.doctor.facts import Kernel

SETTINGS = (*FORWARDING.values(), LIBERAL, COUNT, MAXIMUM, *BRIDGE.values())
OF_DEVICES = ("net/ipv4/conf/*/rp_filter", "net/ipv6/conf/*/disable_ipv6")
TIMEX_BYTES = 1024
"""Larger than struct timex of any machine. All zero, it asks and sets nothing."""
TIME_ERROR = 5
"""What adjtimex(2) returns while the clock is not synchronised."""


def read_kernel(root: Path, *, netlink: bool, clock: bool) -> Kernel:
    """What the kernel says; it is asked over netlink and for the clock only if told so."""
    settings = {}
    found = (path for pattern in OF_DEVICES for path in (root / "proc/sys").glob(pattern))
    for path in (*(root / "proc/sys" / name for name in SETTINGS), *found):
        with contextlib.suppress(OSError):
            settings[str(path.relative_to(root / "proc/sys"))] = path.read_text().strip()
    return Kernel(
        settings,
        _table(root / "proc/net/stat/nf_conntrack"),
        _conntrack_fault() if netlink else "",
        _number(root / "sys/module/xt_recent/parameters/ip_list_tot"),
        _pair(root / "proc/net/netstat", "TcpExt:", "IPReversePathFilter"),
        _synchronised() if clock else None,
    )


def _table(path: Path) -> dict[str, int]:
    """Counters with a column each, a line for each CPU in hexadecimal, added up."""
    try:
        head, *rows = (line.split() for line in path.read_text().splitlines())
        return {name: sum(int(row[at], 16) for row in rows) for at, name in enumerate(head)}
    except (OSError, ValueError, IndexError):
        return {}


def _pair(path: Path, group: str, name: str) -> int:
    """A counter of a file with one line of names and one of numbers for each group."""
    try:
        names, numbers = (line.split() for line in path.read_text().splitlines() if line.startswith(group))
        return int(numbers[names.index(name)])
    except (OSError, ValueError, IndexError):
        return 0


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


def _synchronised() -> bool | None:
    """Whether a time server corrects the clock; None when that cannot be asked."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (OSError, AttributeError):
        return None
    state = adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    return None if state < 0 else state != TIME_ERROR
