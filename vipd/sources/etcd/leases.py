"""What is in etcd as long as a process renews its lease: a host's report, and a backend's registration."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from math import inf
from random import Random
from typing import Any

from vipd.declaration.bounded_json import BeyondLimitsError, read_json
from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.supervisor import Backoff, LoopState
from vipd.model.limits import ETCD_SMALL_VALUE_BYTES
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EndpointError, EtcdError

log = logging.getLogger(__name__)

REPORT_TTL_SECONDS = 30
CLOSE_TIMEOUT_SECONDS = 1.0
"""How long the end of the daemon may wait for etcd."""
DEREGISTER_TIMEOUT_SECONDS = 3.0
REGISTRATION_BACKOFF = Backoff(initial=0.2, maximum=5.0)
MAX_TEXT = 60
"""Characters of a version, of a number, or of an announced address or its reason."""
MAX_ANNOUNCED = 200
"""Announced addresses in one report: 12 KB at most, of the 16 KB that a small value may have."""


class Lease:
    """One lease, and the keys that are written under it. All coroutines raise EtcdError, but `end`."""

    def __init__(self, client: EtcdClient, ttl: int) -> None:
        """`ttl`: seconds after which it expires without renewal."""
        self._client, self.ttl = client, ttl
        self.id = 0
        """0: none, or one that may be lost."""

    async def renew(self) -> bool:
        """Renew it; False if there is none any more."""
        if self.id and not await self._client.renew_lease(self.id):
            self.id = 0
        return bool(self.id)

    async def put(self, key: str, value: str) -> None:
        """Write a key under it, or under a new one if there is none."""
        self.id = self.id or await self._client.grant_lease(self.ttl)
        try:
            await self._client.put(key, value, self.id)
        except EtcdError as error:
            if not isinstance(error, EndpointError):  # refused: it has expired, or holds nothing
                await self.end(CLOSE_TIMEOUT_SECONDS)
            raise

    async def end(self, seconds: float) -> Exception | None:
        """End it, and with it its keys, within some seconds; returns why it ends by itself only."""
        lease, self.id = self.id, 0
        try:
            if lease:
                async with asyncio.timeout(seconds):
                    await self._client.revoke_lease(lease)
        except Exception as error:
            return EtcdError("no answer of etcd") if isinstance(error, TimeoutError) else error
        return None


@dataclass(frozen=True, slots=True)
class HostReport:
    """The report of a host."""

    name: str
    revision: int
    """Revision of the newest change of the declaration that is in its kernel: that of the followed keys. Not
    the store's own revision, which every report of every host increments."""
    problems: int
    version: str
    services: int = 0
    maintenance: bool = False
    """It has been taken out of service by an operator."""
    announced: Mapping[str, str] = field(default_factory=dict)
    """Addresses that it announces, as `METHOD ADDRESS`, each with the reason."""


def read_report(value: str) -> tuple[dict[str, Any], str]:
    """The fields of a host's report but its name; and why it cannot be read, else empty. A field that cannot
    be read is 0 or empty."""
    report = {**asdict(HostReport("", 0, 0, "")), "announced": {}}
    del report["name"]
    fault = ""
    try:
        document = read_json(value, ETCD_SMALL_VALUE_BYTES)
        for name in ("revision", "services", "problems"):
            number = document.get(name, 0)
            if type(number) is int and 0 <= number < 2**64:
                report[name] = number
            else:
                fault = f"{name} is no number"
        if _is_short(version := document.get("version", "")):
            report["version"] = version
        else:
            fault = "version is no version"
        report["maintenance"] = document.get("maintenance") is True
        announced = list(document.get("announced", {}).items())[:MAX_ANNOUNCED]
        report["announced"] = {w: why for w, why in announced if _is_short(w) and _is_short(why)}
    except (ValueError, AttributeError) as error:
        fault = str(error) if isinstance(error, BeyondLimitsError) else "it is no JSON object of a host"
    return report, fault and f"its report cannot be read: {fault}"


class HostHeartbeat:
    """Publishes a report at `PREFIXhosts/NAME` under a lease, so that it disappears with the host: by
    `close`, or soon by itself.

    Written only if the report has changed, at most once in `gather` seconds, or if it is gone. Otherwise
    the lease is renewed, which costs the store no write.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        report: Callable[[], HostReport],
        now: Callable[[], datetime],
        gather: float,
    ) -> None:
        self._client, self._prefix, self._report, self._now = client, prefix, report, now
        self._lease, self._gather = Lease(client, REPORT_TTL_SECONDS), gather
        self._reported: HostReport | None = None
        backoff = Backoff(min(gather, REPORT_TTL_SECONDS / 3), REPORT_TTL_SECONDS / 3, jitter=0.5)
        self.loop_state = LoopState(backoff, reported_elsewhere=True)
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
            if not self._lease.id or clock() - renewed >= REPORT_TTL_SECONDS / 3:
                renewed = clock()
                if not await self._lease.renew() or await self._is_gone():
                    self._reported = None
            await self._publish()
            self.loop_state.clear_fault()
            await asyncio.sleep(min(self._gather, REPORT_TTL_SECONDS / 3))

    async def close(self) -> None:
        """Take the report back. Waits a moment at most."""
        if fault := await self._lease.end(CLOSE_TIMEOUT_SECONDS):
            log.info("the report of this host stays for up to %d s: %s", REPORT_TTL_SECONDS, fault)

    async def _is_gone(self) -> bool:
        return self._reported is not None and await self._client.get(self._key(self._reported)) is None

    async def _publish(self) -> None:
        report = self._report()
        if report != self._reported:
            value = {**asdict(report), "time": self._now().strftime("%Y-%m-%dT%H:%M:%SZ")}
            await self._lease.put(self._key(report), json.dumps(value))
            self._reported = report

    def _key(self, report: HostReport) -> str:
        return f"{self._prefix}hosts/{report.name}"


class Registration:
    """Keeps the key of a backend that takes part in a service. `report` is called on each change: whether the
    key exists, and what happened."""

    def __init__(
        self, client: EtcdClient, key: str, value: str, ttl: int, report: Callable[[bool, str], None]
    ) -> None:
        """`ttl`: seconds after which the key expires without renewal."""
        self._client, self._key, self._value = client, key, value
        self._lease, self._report = Lease(client, ttl), report
        self._random = Random()  # noqa: S311 (spreads tries; nothing secret)
        self._reported: tuple[bool, str] | None = None

    async def run(self) -> None:
        """Register and renew until cancelled, then delete the registration. Failures are retried."""
        failures = 0
        try:
            while True:
                pause = self._lease.ttl / 3
                try:
                    await self._keep()
                    failures = 0
                except Exception as error:
                    # Whatever it is: a backend must not leave its service for a fault of vipd's.
                    self._report_change(False, _reason(error))
                    failures += 1
                    pause = min(REGISTRATION_BACKOFF.delay(failures, self._random), pause)
                await asyncio.sleep(pause)
        finally:
            await self._deregister()

    async def _keep(self) -> None:
        """Renew the lease; write the key anew if it has expired."""
        if self._lease.id and not await self._lease.renew():
            self._report_change(False, "the lease has expired")
        stored = await self._client.get(self._key) if self._lease.id else None
        if stored is not None and stored.lease != self._lease.id:
            taken = "somebody else has registered the same; it counts for as long as that lasts"
            self._report_change(False, taken)
            return
        if stored is None:
            if self._lease.id:
                self._report_change(False, "the key is gone")
            await self._lease.put(self._key, self._value)
        self._report_change(True, "registered")

    async def _deregister(self) -> None:
        if not self._lease.id:
            return
        fault = await self._lease.end(DEREGISTER_TIMEOUT_SECONDS)
        result = "taken back"
        if fault:
            why = f"cannot be taken back, and ends by itself after {self._lease.ttl} s"
            result = f"{why}: {_reason(fault)}"
        self._report_change(False, result)

    def _report_change(self, state: bool, event: str) -> None:
        if (state, event) != self._reported:
            self._reported = (state, event)
            self._report(state, event)


def _is_short(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()


def _reason(error: Exception) -> str:
    """Why it failed, in a line."""
    if isinstance(error, EtcdError | OSError):
        return str(error)
    return f"{internal_error(error, 'registering')}; {PLEASE_REPORT}"
