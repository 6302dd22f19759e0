"""New flows that limits have refused, by service and limit, and when to report them. Pure; times are
arguments, in seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from vipd.dataplane.counting import RefusedKey
from vipd.model.flow_limits import Limit

REPORT_EVERY_SECONDS = 600.0
"""How often the refusals of one service are reported at most."""


class Refusals:
    """Totals of the services that have limits. A total never decreases while its service has them: rules that
    are written anew count from zero."""

    def __init__(self) -> None:
        self._known: Mapping[RefusedKey, int] = {}
        self._totals: dict[str, Counter[Limit]] = {}
        self._unreported: dict[str, Counter[Limit]] = {}
        self._reported_at: dict[str, float] = {}

    def update(self, counts: Mapping[RefusedKey, int]) -> None:
        """Enter a reading of the kernel's counts, of all forwardings that have limits."""
        limited = {place.key.service for place in counts}
        for gone in self._totals.keys() - limited:
            del self._totals[gone]
            self._unreported.pop(gone, None)
            self._reported_at.pop(gone, None)
        for place, flows in counts.items():
            known, service = self._known.get(place, 0), place.key.service
            grown = flows - known if flows >= known else flows
            self._totals.setdefault(service, Counter())[place.limit] += grown
            if grown:
                self._unreported.setdefault(service, Counter())[place.limit] += grown
        self._known = counts

    def services(self) -> Mapping[str, Mapping[Limit, int]]:
        """The refused flows of every service that has limits, by limit, including zero. A copy."""
        return {service: dict(refused) for service, refused in self._totals.items()}

    def take_report(self, now: float) -> dict[str, Mapping[Limit, int]]:
        """The refusals that have not been reported yet, of services whose last report is long ago."""
        due: dict[str, Mapping[Limit, int]] = {
            service: refused
            for service, refused in self._unreported.items()
            if now - self._reported_at.get(service, float("-inf")) >= REPORT_EVERY_SECONDS
        }
        for service in due:
            del self._unreported[service]
            self._reported_at[service] = now
        return due
