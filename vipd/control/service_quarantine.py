"""Services that vipd itself fails at: an exception that nobody expected while one was selected or programmed.

Its last good rules serve on, all others go through. It is tried again with growing pauses, and at once when
it is declared anew. (What the kernel does not take is quarantined by the dataplane.)"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vipd.declaration.problems import PLEASE_REPORT, internal_error
from vipd.host.systemd.fields import Event, fields

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0


@dataclass(slots=True)
class _Entry:
    reason: str
    failures: int
    retry_at: float


class ServiceQuarantine:
    """Which services are held, why, and when each is to be tried again. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._held_now: set[str] = set()

    @property
    def reasons(self) -> Mapping[str, str]:
        """Every service that is held, and why."""
        return {name: entry.reason for name, entry in self._entries.items()}

    def due(self, now: float) -> frozenset[str]:
        """The services to try again."""
        return frozenset(name for name, entry in self._entries.items() if entry.retry_at <= now)

    def next_retry(self) -> float | None:
        """When the next one is to be tried again; None while none is held."""
        return min((entry.retry_at for entry in self._entries.values()), default=None)

    def begin(self) -> None:
        """A step begins: `settle` asks which services were held since."""
        self._held_now.clear()

    def hold(self, service: str, doing: str, error: Exception, now: float) -> None:
        """Hold a service because of an exception; its traceback is logged once."""
        reason, before = f"{internal_error(error, doing)}; {PLEASE_REPORT}", self._entries.get(service)
        if before is None or before.reason != reason:
            extra = fields(Event.SERVICE_QUARANTINED, service=service, cause="vipd", reason=reason)
            log.error("%s is quarantined: %s", service, reason, extra=extra, exc_info=error)
        failures = before.failures if before else 0
        if service not in self._held_now:  # once a step, however often it fails there
            failures += 1
        self._held_now.add(service)
        # The exponent is bounded: 2.0**1024 is an OverflowError.
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE_SECONDS)
        self._entries[service] = _Entry(reason, failures, now + pause)

    def settle(self, tried: Collection[str]) -> None:
        """These were tried in this step: those that did not fail again are held no more."""
        for name in [name for name in self._entries if name in tried and name not in self._held_now]:
            del self._entries[name]
