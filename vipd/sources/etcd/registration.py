"""A backend that takes part in a service while its registration is renewed: a key in etcd under a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.supervisor import Backoff
from vipd.sources.etcd.client import EtcdClient
from vipd.sources.etcd.errors import EtcdError, RejectedError

BACKOFF = Backoff(initial=0.2, maximum=5.0)
CLOSE_TIMEOUT_SECONDS = 3.0
"""How long the end waits for etcd to delete the registration."""


class Registration:
    """Keeps one key. `report` is called on each change: whether the key exists, and what happened."""

    def __init__(
        self, client: EtcdClient, key: str, value: str, ttl: int, report: Callable[[bool, str], None]
    ) -> None:
        """`ttl`: seconds after which the key expires without renewal."""
        self._client, self._key, self._value, self._ttl = client, key.encode(), value.encode(), ttl
        self._report = report
        self._random = Random()  # noqa: S311 (spreads tries; nothing secret)
        self._lease = 0
        self._reported: tuple[bool, str] | None = None

    async def run(self) -> None:
        """Register and renew until cancelled, then delete the registration. Failures are retried."""
        failures = 0
        try:
            while True:
                try:
                    await self._once()
                    failures = 0
                    pause = self._ttl / 3
                except Exception as error:
                    # Whatever it is: a backend must not leave its service for a fault of vipd's.
                    self._report_change(False, _reason(error))
                    failures += 1
                    pause = min(BACKOFF.delay(failures, self._random), self._ttl / 3)
                await asyncio.sleep(pause)
        finally:
            await self._deregister()

    async def _once(self) -> None:
        """Renew the lease; write the key anew if it has expired."""
        if self._lease and not await self._client.renew_lease(self._lease):
            self._report_change(False, "the lease has expired")
            self._lease = 0
        if self._lease:
            found = await self._client.get(self._key)
            if found is not None and found.lease != self._lease:
                self._report_change(
                    False, "somebody else has registered the same; it counts for as long as that lasts"
                )
                return
            if found is not None:
                self._report_change(True, "registered")
                return
            self._report_change(False, "the key is gone")
        await self._put()
        self._report_change(True, "registered")

    async def _put(self) -> None:
        self._lease = self._lease or await self._client.grant_lease(self._ttl)
        try:
            await self._client.put(self._key, self._value, self._lease)
        except RejectedError:
            self._lease = 0  # most likely it has expired
            raise

    async def _deregister(self) -> None:
        lease, self._lease = self._lease, 0
        if not lease:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await self._client.revoke_lease(lease)
            self._report_change(False, "taken back")
        except Exception as error:
            why = "no answer of etcd" if isinstance(error, TimeoutError) else _reason(error)
            self._report_change(False, f"cannot be taken back, and ends by itself after {self._ttl} s: {why}")

    def _report_change(self, state: bool, what: str) -> None:
        if (state, what) != self._reported:
            self._reported = (state, what)
            self._report(state, what)


def _reason(error: Exception) -> str:
    """Why it failed, in a line."""
    if isinstance(error, EtcdError | OSError):
        return str(error)
    return f"{internal_error(error, 'registering')}; {PLEASE_REPORT}"
