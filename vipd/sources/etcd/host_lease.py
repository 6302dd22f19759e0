"""The lease under which this host holds addresses of LANs, and the gate that is open while it is valid.

The order of requests here is what `vipd.host.lan.answer_gate` relies on: the gate is prepared, or was
extended, before each request is sent, and is opened or extended only after its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from vipd.host.supervisor import Backoff, LoopState
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError

log = logging.getLogger(__name__)

MIN_TTL_SECONDS = 2
"""etcd grants no shorter lease with its default election timeout of 1 s."""
EXPIRY_SECONDS = 1.0
"""From the end of a lease to the next holder: etcd looks for expired leases every 0.5 s, and two writes."""
CLOSE_TIMEOUT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Durations in seconds that follow from the time within which a lost host is replaced."""

    ttl: int

    @classmethod
    def within(cls, takeover: float) -> LeaseTimes:
        """For a takeover within so many seconds."""
        return cls(max(MIN_TTL_SECONDS, int(takeover - EXPIRY_SECONDS)))

    @property
    def margin(self) -> float:
        """For clocks that run at different rates: 10 %, where quartz needs 0.01 %."""
        return self.ttl / 10

    @property
    def gate(self) -> float:
        """How long the gate stays open without a renewal."""
        return (self.ttl - self.margin) / 2

    @property
    def interval(self) -> float:
        """Between two renewals: two may fail before the gate closes."""
        return self.gate / 3

    @property
    def timeout(self) -> float:
        """For one member of etcd to answer."""
        return self.ttl / 4


class Gate(Protocol):
    """What a lease opens. All may raise OSError."""

    async def prepare(self, seconds: float) -> None:
        """A request for the lease follows: `open` within so many seconds."""

    async def open(self, seconds: float) -> bool:
        """Open it for some seconds; False if it was not prepared in time."""

    async def extend(self, seconds: float) -> bool:
        """Keep it open for some seconds from now; False if it has closed."""

    async def reset(self) -> None:
        """Close it, and hold nothing: the lease is lost."""


class HostLease:
    """Gets and renews the lease of this host."""

    def __init__(
        self, client: EtcdClient, gate: Gate, times: LeaseTimes, changed: Callable[[], None]
    ) -> None:
        self._client, self._gate, self._times, self._changed = client, gate, times, changed
        self.lease = 0
        """0: none, or one that may be lost."""
        self.is_open = False
        """The gate was open after the last renewal."""
        self.loop_state = LoopState(
            Backoff(times.interval, times.interval, jitter=0.2), reported_elsewhere=True
        )
        """How the loop is run, and its state. It does not slow down: addresses may have no holder."""

    async def run(self) -> None:
        """Renew until that fails. Raises EtcdError and OSError; run it again then, with `loop_state`."""
        while True:
            await self.renew()
            self.loop_state.clear_fault()
            await asyncio.sleep(self._times.interval)

    async def renew(self) -> None:
        """One renewal; a new lease if there is none or etcd says that it is no more. Raises EtcdError,
        OSError."""
        seconds = self._times.gate
        was_open = self.is_open
        if not was_open:
            await self._gate.prepare(seconds)
        if not self.lease:
            self.lease = await self._client.grant_lease(self._times.ttl)
        elif not await self._client.renew_lease(self.lease):
            await self._lose()
            return
        passes: Callable[[float], Awaitable[bool]] = self._gate.extend if was_open else self._gate.open
        self.is_open = await passes(seconds)
        if self.is_open != was_open:
            log.info("answers for addresses of the LAN: %s", "on" if self.is_open else "off until a renewal")
            self._changed()

    async def _lose(self) -> None:
        """What this host held may belong to another host by now."""
        log.warning("the lease for addresses of the LAN has expired; this host gives them up")
        await self._gate.reset()
        self.is_open, self.lease = False, 0
        self._changed()

    async def close(self) -> None:
        """End the lease, after the gate has been closed. Waits a moment at most."""
        lease, self.lease = self.lease, 0
        if lease:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self._client.revoke_lease(lease)
            except (EtcdError, TimeoutError) as error:
                log.info("the lease of this host stays for up to %d s: %s", self._times.ttl, error)
