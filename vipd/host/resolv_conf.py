"""The name servers of this host, as resolv.conf(5) lists them."""

from __future__ import annotations

import contextlib
from ipaddress import ip_address
from pathlib import Path

_MOST_BYTES = 65_536
_MOST_SERVERS = 16


def resolv_conf_servers(path: Path) -> list[str]:
    """The first of the name servers' addresses, with their zones; lines with others are left out. Raises
    OSError."""
    servers = []
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES).decode(errors="replace")
    for words in map(str.split, text.splitlines()):
        with contextlib.suppress(ValueError):
            if len(words) > 1 and words[0] == "nameserver":
                servers.append(str(ip_address(words[1])))
    return servers[:_MOST_SERVERS]
