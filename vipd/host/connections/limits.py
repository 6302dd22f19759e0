"""Limits on the resources of clients, and the identity of a client."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Hashable
from typing import NamedTuple

WANTED_CONNECTIONS = 1536
"""Number of connections that all listeners of vipd should be able to have."""

_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
_IPV6_PREFIX = 64


class ClientSource(NamedTuple):
    """The other end of a connection. Connections with the same source are counted together."""

    key: Hashable
    privileged: bool = False
    """Others cannot block it."""

    def __str__(self) -> str:
        return str(self.key)


ClientOf = Callable[[socket.socket, object], ClientSource]
"""The source of a connection with its address. Raises OSError."""


class ConnectionLimits(NamedTuple):
    """Limits on the resources of clients."""

    connections: int
    """Maximum concurrent connections of all sources that are not privileged."""
    per_client: int
    """Of these, the maximum of one source."""
    head_seconds: float
    """Until the head of a request is whole, from the connection or from the answer before."""
    body_seconds: float
    """From there until the request is complete."""
    send_seconds: float
    """Time in which a client must read what was written, or some 50 KB of it."""
    life_seconds: float | None = None
    """Longest life of a connection, unless it is prolonged; None: no limit."""
    privileged: int = 0
    """Connections of the privileged, all together, beside those of others."""
    unsent: int = 128 * 1024 * 1024
    """Bytes of different answers that clients have not read yet, all together. A single one may be longer."""

    def within(self, descriptors: int) -> ConnectionLimits:
        """The same, or less where all listeners together may use only so many descriptors."""
        if descriptors >= WANTED_CONNECTIONS:
            return self
        counts = (self.connections, self.per_client, self.privileged)
        most, of_one, privileged = (n and max(2, n * descriptors // WANTED_CONNECTIONS) for n in counts)
        return self._replace(connections=most, per_client=of_one, privileged=privileged)


def tcp_client(_: socket.socket, address: object) -> ClientSource:
    """An IPv4 address, an IPv6 network of 64 bits, or this host by any of its IPv4 loopback addresses."""
    text = str(address[0]) if isinstance(address, tuple) else ""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ClientSource(text)
    if found.version == 6 and not found.is_loopback:
        return ClientSource(str(ipaddress.ip_network((int(found), _IPV6_PREFIX), strict=False)))
    return ClientSource(str(_LOOPBACK if found in _LOOPBACK else found))
