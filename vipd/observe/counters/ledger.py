"""New flows of every backend and service since they were first known. Pure; time is given, in seconds.

A number never falls: what a backend that is long gone had counted stays in its service's number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from vipd.dataplane.counting import Place

KEPT_SECONDS = 3600.0
"""A backend or service that is gone for longer is forgotten; one that comes back later begins at zero."""


@dataclass(slots=True)
class _Account:
    flows: int = 0
    gone_since: float | None = None


@dataclass(slots=True)
class _Service:
    former: int = 0
    """New flows of backends that are forgotten."""
    backends: dict[Place, _Account] = field(default_factory=dict)


class Ledger:
    """Totals, added to and asked for."""

    def __init__(self) -> None:
        self._services: dict[str, _Service] = {}

    def add(self, flows: Mapping[Place, int]) -> None:
        """Enter new flows."""
        for place, number in flows.items():
            service = self._services.setdefault(place.key.service, _Service())
            service.backends.setdefault(place, _Account()).flows += number

    def age(self, known: Collection[Place], now: float) -> None:
        """These backends are there now; forget others that have been gone for long."""
        for service in self._services.values():
            for place, account in list(service.backends.items()):
                if place in known:
                    account.gone_since = None
                elif account.gone_since is None:
                    account.gone_since = now
                elif now - account.gone_since > KEPT_SECONDS:
                    service.former += account.flows
                    del service.backends[place]
        served = {place.key.service for place in known}
        for name in [n for n, s in self._services.items() if not s.backends and n not in served]:
            del self._services[name]

    def of_service(self, name: str) -> int:
        """New flows of a service, whichever backend they went to."""
        service = self._services.get(name)
        if service is None:
            return 0
        return service.former + sum(account.flows for account in service.backends.values())

    def of_backend(self, place: Place) -> int:
        """New flows that went to a backend."""
        service = self._services.get(place.key.service)
        account = service.backends.get(place) if service else None
        return account.flows if account else 0

    def backends_of(self, name: str) -> Iterator[Place]:
        """The backends of a service that had flows, those included that are gone since a while."""
        service = self._services.get(name)
        return iter(service.backends) if service else iter(())

    def to_json(self) -> dict[str, object]:
        """For `from_json`."""
        return {
            name: {
                "former": service.former,
                "backends": [[*p.row(), a.flows, a.gone_since] for p, a in service.backends.items()],
            }
            for name, service in self._services.items()
        }

    @classmethod
    def from_json(cls, value: object) -> Ledger:
        """From what `to_json` gave. Raises ValueError for anything else."""
        ledger = cls()
        try:
            for name, told in value.items():  # type: ignore[attr-defined]  # a fault is caught below
                service = ledger._services[str(name)] = _Service(int(told["former"]))
                for *place, flows, gone_since in told["backends"]:
                    gone = None if gone_since is None else float(gone_since)
                    service.backends[Place.of_row(place)] = _Account(int(flows), gone)
        except (AttributeError, TypeError, LookupError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return ledger
