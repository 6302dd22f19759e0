"""TCP ports that a test may listen on, leave and take again, while nobody else on this machine gets them.

A socket that is bound and does not listen refuses connections, and keeps its number from being chosen for
anybody else's. Servers that set SO_REUSEADDR, as asyncio's, Go's and vipd's own do, can listen beside it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

TRIES = 50


@contextlib.contextmanager
def held_ports(number: int) -> Iterator[list[int]]:
    """So many ports, held in both families on every address."""
    with contextlib.ExitStack() as stack:
        yield [hold(stack) for _ in range(number)]


def hold(stack: contextlib.ExitStack) -> int:
    """One such port, held until the stack is closed."""
    for _ in range(TRIES):
        with contextlib.ExitStack() as trying:
            port: int = trying.enter_context(_bound(socket.AF_INET, 0)).getsockname()[1]
            if socket.has_ipv6:
                try:
                    trying.enter_context(_bound(socket.AF_INET6, port))
                except OSError:
                    continue
            stack.push(trying.pop_all())
            return port
    raise AssertionError(f"no port is free in both families after {TRIES} tries")


def _bound(family: socket.AddressFamily, port: int) -> socket.socket:
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(("", port))
    except BaseException:
        made.close()
        raise
    return made
