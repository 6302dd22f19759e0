"""Counts the new flows that a dataplane translated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from vipd.model.flow_limits import Limit
from vipd.model.forwarding import ForwardingKey
from vipd.model.service import Family
from vipd.model.service import Protocol as Transport


class BackendKey(NamedTuple):
    """A backend of one forwarding; if its weight changes, its counter continues."""

    key: ForwardingKey
    address: str
    port: int

    def row(self) -> list[object]:
        """As a JSON value."""
        return [*self.key, self.address, self.port]

    @classmethod
    def of_row(cls, row: object) -> BackendKey:
        """From the output of `row`. Raises ValueError for anything else."""
        if not isinstance(row, list) or len(row) != 6:
            raise ValueError("a place has six parts")
        service, port_name, protocol, family, address, port = row
        key = ForwardingKey(str(service), str(port_name), Transport(protocol), Family(family))
        return cls(key, str(address), int(port))


class RefusedKey(NamedTuple):
    """A limit of one forwarding."""

    key: ForwardingKey
    limit: Limit


class FlowCounter(Protocol):
    """Counts new flows while rules are added and removed."""

    @property
    def seconds(self) -> float:
        """CPU time that the last `take` took, about."""

    async def take(self) -> Mapping[BackendKey, int]:
        """The new flows since the last `take`, of backends that had any, including removed ones.

        Raises ApplyError or OSError; the next call then returns those flows.
        """

    async def refused(self) -> Mapping[RefusedKey, int]:
        """The new flows that each limit has refused since the last `refused`. Call it after `take`.

        Of every forwarding with limits, including zero, and of limits that have ended since. Raises
        ApplyError or OSError."""

    async def collect_garbage(self) -> Mapping[BackendKey, int]:
        """Delete the kernel's counts of backends that are gone; returns their flows since the last `take`.

        Call it when what `saved_state` returned after that `take` is on disk. Raises ApplyError or OSError.
        """

    def saved_state(self) -> object:
        """A JSON value for `restore` after a restart: the kernel's counts that have been taken."""

    def restore(self, memory: object) -> None:
        """Continue from what an earlier run had taken. Parts that are not understood are left out."""
