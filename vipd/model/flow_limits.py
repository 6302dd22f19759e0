"""Limits on the new flows of a service, as a frozen value. Pure.

Each limit holds for one service port in one address family, with all its frontends together: the kernel keeps
the counts of IPv4 and IPv6 apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

MAX_CONNECTIONS = 1_000_000
MAX_NEW_PER_SECOND = 100_000
MAX_BURST = 100_000
DEFAULT_CLIENT_IPV6_PREFIX = 64
"""Hosts choose their addresses within a /64 freely, so that a single address limits nobody."""
MIN_CLIENT_IPV6_PREFIX = 32


class Limit(StrEnum):
    """A limit, by its key in the declaration: the reason why a flow is refused."""

    NEW_PER_CLIENT = "new_per_client"
    CONNECTIONS_PER_CLIENT = "connections_per_client"
    NEW_PER_SECOND = "new_per_second"
    CONNECTIONS = "connections"

    @property
    def per_client(self) -> bool:
        """Whether each client is counted by itself."""
        return self in (Limit.NEW_PER_CLIENT, Limit.CONNECTIONS_PER_CLIENT)

    @property
    def is_rate(self) -> bool:
        """Whether it is about new flows in a second; else about flows that exist at the same time."""
        return self in (Limit.NEW_PER_CLIENT, Limit.NEW_PER_SECOND)


class AppliedLimit(NamedTuple):
    """One limit with its numbers."""

    limit: Limit
    most: int
    """Flows that exist at the same time, or new flows in a second."""
    burst: int = 0
    """New flows that may come at once, after a pause; 0 for a limit that is no rate."""

    def __str__(self) -> str:
        unit = f"/s, {self.burst} at once" if self.limit.is_rate else ""
        return f"{self.limit} {self.most}{unit}"

    @property
    def idle_seconds(self) -> int:
        """Seconds without a new flow after which a rate has nothing left to remember."""
        return max(10, -(-2 * self.burst // self.most))


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """The limits of a service; None: no such limit."""

    new_per_client: int | None = None
    """New flows of one client in a second."""
    client_burst: int | None = None
    """New flows of one client that may come at once; None: as many as `new_per_client`."""
    connections_per_client: int | None = None
    """Flows of one client at the same time."""
    new_per_second: int | None = None
    burst: int | None = None
    """New flows that may come at once; None: as many as `new_per_second`."""
    connections: int | None = None
    """Flows at the same time."""
    client_ipv6_prefix: int = DEFAULT_CLIENT_IPV6_PREFIX
    """Length of the IPv6 prefix that counts as one client. With IPv4 that is one address."""

    def applied(self) -> Iterator[AppliedLimit]:
        """The limits in the order in which a flow meets them: a client that is over its own limit takes
        nothing of what all share, and a rate is cheaper to look up than a list of flows."""
        for limit, most, burst in (
            (Limit.NEW_PER_CLIENT, self.new_per_client, self.client_burst or self.new_per_client),
            (Limit.CONNECTIONS_PER_CLIENT, self.connections_per_client, 0),
            (Limit.NEW_PER_SECOND, self.new_per_second, self.burst or self.new_per_second),
            (Limit.CONNECTIONS, self.connections, 0),
        ):
            if most is not None:
                yield AppliedLimit(limit, most, burst or 0)
