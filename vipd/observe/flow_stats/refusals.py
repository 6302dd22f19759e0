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
    """Totals of the services that have limits. A total never decreases while its service has them."""

    def __init__(self) -> None:
        self._limited: frozenset[str] = frozenset()
        """The services that have limits, as of the last `add`."""
        self._totals: dict[str, Counter[Limit]] = {}
        self._unreported: dict[str, Counter[Limit]] = {}
        self._reported_at: dict[str, float] = {}

    def add(self, refused: Mapping[RefusedKey, int]) -> bool:
        """Enter refused flows since the last time: of all forwardings that have limits, also none. Returns
        whether there were any."""
        self._limited = frozenset(place.key.service for place in refused)
        for place, flows in refused.items():
            service = place.key.service
            self._totals.setdefault(service, Counter())[place.limit] += flows
            if flows:
                self._unreported.setdefault(service, Counter())[place.limit] += flows
        return any(refused.values())

    def expire(self) -> None:
        """Drop the totals of services that have no limits any more."""
        for gone in self._totals.keys() - self._limited:
            del self._totals[gone]
            self._unreported.pop(gone, None)
            self._reported_at.pop(gone, None)

    def services(self) -> Mapping[str, Mapping[Limit, int]]:
        """The refused flows of every service that has limits, by limit, including zero. A copy."""
        return {service: dict(self._totals[service]) for service in self._limited}

    def to_json(self) -> dict[str, dict[str, int]]:
        """The input of `restore`."""
        return {service: {str(limit): n for limit, n in of.items()} for service, of in self._totals.items()}

    def restore(self, value: object) -> None:
        """Continue with the totals of an earlier run. Parts that are not understood are left out."""
        for service, totals in value.items() if isinstance(value, dict) else ():
            for limit, number in totals.items() if isinstance(totals, dict) else ():
                if limit in Limit.__members__.values() and isinstance(number, int) and number >= 0:
                    self._totals.setdefault(str(service), Counter())[Limit(limit)] = number

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
