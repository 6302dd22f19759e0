"""What the host itself must do so that clients behind it reach backends: forward packets."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from vipd.host_record import HostRecord
from vipd.model import Family

log = logging.getLogger(__name__)

SYSCTLS = Path("/proc/sys")
FORWARDING = {
    Family.IPV4: "net/ipv4/ip_forward",
    # Turning this on makes the kernel ignore router advertisements on interfaces with accept_ra=1.
    Family.IPV6: "net/ipv6/conf/all/forwarding",
}


class HostSettings:
    """Turns on forwarding for the families in use."""

    def __init__(self, record: HostRecord, root: Path = SYSCTLS) -> None:
        self._record = record
        self._root = root

    def prepare(self, families: Iterable[Family]) -> tuple[str, ...]:
        """Make sure that the host forwards these families; returns a warning for each that it will not."""
        return tuple(warning for family in families if (warning := self._turn_on(FORWARDING[family])))

    def _turn_on(self, name: str) -> str:
        path, setting = self._root / name, name.replace("/", ".")
        try:
            was = path.read_text().strip()
            if was != "0":
                return ""
            self._record.sysctl(name, was, "1")
            path.write_text("1")
        except OSError as error:
            return f"{setting} cannot be set to 1: {error.strerror}; clients behind this host will fail"
        log.info("%s set to 1; it was %s", setting, was)
        return ""


def restore_sysctls(record: HostRecord, root: Path = SYSCTLS) -> list[str]:
    """Put back what is still as vipd left it; returns what was put back. Raises OSError."""
    undone = []
    for name, change in record.read().sysctls.items():
        path = root / name
        if path.exists() and path.read_text().strip() == change["set"]:
            path.write_text(change["was"])
            undone.append(f"{name.replace('/', '.')} = {change['was']}")
    return undone
