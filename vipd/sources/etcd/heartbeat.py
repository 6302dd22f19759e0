"""The key by which this host reports that it is alive, and its applied revision: `PREFIXhosts/NAME`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from math import inf

from vipd.declaration.bounded_json import BeyondLimitsError, read_json
from vipd.host.supervisor import Backoff, LoopState
from vipd.model.limits import ETCD_SMALL_VALUE_BYTES
from vipd.sources.etcd import fields
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError, MalformedAnswerError, RejectedError

log = logging.getLogger(__name__)

TTL_SECONDS = 30
CLOSE_TIMEOUT_SECONDS = 1.0
"""How long the end of the daemon may wait for etcd."""
MAX_VERSION = 60
"""Characters."""
MAX_ANNOUNCED = 200
"""Announced addresses in one report: 12 KB at most, of the 16 KB that a small value may have."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """The report of a host."""

    name: str
    revision: int
    """Revision of the newest change of the declaration that is in its kernel: a source's `last_change`. Not
    the store's own revision, which every report of every host increments."""
    problems: int
    version: str
    services: int = 0
    maintenance: bool = False
    """It has been taken out of service by an operator."""
    announced: Mapping[str, str] = field(default_factory=dict)
    """Addresses that it announces, as `METHOD ADDRESS`, each with the reason."""


def read_report(value: bytes) -> tuple[dict[str, int | str], str]:
    """The fields of a host's report: version, revision, services, problems; and why it cannot be read, else
    empty. A field that cannot be read is 0 or empty."""
    counts, version, fault = dict.fromkeys(("revision", "services", "problems"), 0), "", ""
    try:
        found = fields.message_of(read_json(value, ETCD_SMALL_VALUE_BYTES), "the report")
        counts = {name: fields.number(found, name) for name in counts}
        version = fields.text(found, "version")
    except MalformedAnswerError as error:
        fault = str(error)
    except BeyondLimitsError as error:
        fault = str(error)
    except ValueError:
        fault = "it is not JSON"
    if len(version) > MAX_VERSION or not version.isprintable():
        version, fault = "", "version is no version"
    return {"version": version, **counts}, fault and f"its report cannot be read: {fault}"


def read_announced(value: bytes) -> dict[str, str]:
    """The addresses that a host's report says it announces, each with the reason; none if it cannot be
    read."""
    try:
        found = fields.message_of(read_json(value, ETCD_SMALL_VALUE_BYTES), "the report")
        announced = fields.inner(found, "announced")
    except (MalformedAnswerError, BeyondLimitsError, ValueError):
        return {}
    return {
        word: reason
        for word, reason in list(announced.items())[:MAX_ANNOUNCED]
        if isinstance(reason, str)
        and word.isprintable()
        and reason.isprintable()
        and len(word) <= MAX_VERSION
    }


def read_maintenance(value: bytes) -> bool:
    """Whether a host's report says that it is in maintenance."""
    try:
        found = fields.message_of(read_json(value, ETCD_SMALL_VALUE_BYTES), "the report")
    except (MalformedAnswerError, BeyondLimitsError, ValueError):
        return False
    return found.get("maintenance") is True


class HostHeartbeat:
    """Publishes a report under a lease, so that it disappears with the host: by `close`, or soon by itself.

    Written only if the report has changed, at most once in `gather` seconds, or if it is gone. Otherwise
    the lease is renewed, which costs the store no write.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        report: Callable[[], HostReport],
        now: Callable[[], datetime],
        ttl: int = TTL_SECONDS,
        gather: float = 2.0,
    ) -> None:
        self._client, self._prefix, self._report, self._now = client, prefix, report, now
        self._ttl, self._gather = ttl, gather
        self._lease = 0
        self._reported: HostReport | None = None
        self.loop_state = LoopState(
            Backoff(min(gather, ttl / 3), ttl / 3, jitter=0.5), reported_elsewhere=True
        )
        """How the loop is run, and its state."""

    @property
    def fault(self) -> str:
        """Why the report cannot be published; empty while it is."""
        return self.loop_state.fault and f"this host's report cannot be published: {self.loop_state.fault}"

    async def run(self) -> None:
        """Publish until that fails. Raises EtcdError; run it again then, with `loop_state`."""
        clock = asyncio.get_running_loop().time
        renewed = -inf
        while True:
            if not self._lease or clock() - renewed >= self._ttl / 3:
                renewed = clock()
                await self._renew()
            await self._publish()
            self.loop_state.clear_fault()
            await asyncio.sleep(min(self._gather, self._ttl / 3))

    async def _renew(self) -> None:
        """Renew the lease; get a new one if it has expired, as after a long absence or with another store."""
        if self._lease and await self._client.renew_lease(self._lease):
            if self._reported and await self._client.get(self._key(self._reported)) is None:
                self._reported = None
            return
        self._reported, self._lease = None, 0
        self._lease = await self._client.grant_lease(self._ttl)

    async def _publish(self) -> None:
        report = self._report()
        if report == self._reported:
            return
        value = {**asdict(report), "time": self._now().strftime("%Y-%m-%dT%H:%M:%SZ")}
        try:
            await self._client.put(self._key(report), json.dumps(value).encode(), self._lease)
        except RejectedError:
            self._lease = 0  # most likely the lease is no more: have a new one next time
            raise
        self._reported = report

    def _key(self, report: HostReport) -> bytes:
        return f"{self._prefix}hosts/{report.name}".encode()

    async def close(self) -> None:
        """Take the report back. Waits a moment at most."""
        lease, self._lease = self._lease, 0
        if lease:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self._client.revoke_lease(lease)
            except (EtcdError, TimeoutError) as error:
                why = str(error) or "no answer"
                log.info("the report of this host stays for up to %d s: %s", self._ttl, why)
