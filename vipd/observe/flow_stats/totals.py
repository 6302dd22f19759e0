"""New flows and traffic of every backend and service since they were first known. Pure; times are arguments,
in seconds.

A number never decreases: the count of a removed backend stays in its service's number. Traffic is
never more than what has passed: a flow whose end was missed reduces the growth of one interval between
readings by its earlier traffic, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vipd.dataplane.conntrack.entries import Traffic
from vipd.dataplane.counting import BackendKey

KEPT_SECONDS = 3600.0
"""A backend or service is dropped after this time without it; if it is added again later it begins at
zero."""


NO_TRAFFIC = Traffic(0, 0, 0, 0)


def added(one: Traffic, other: Traffic) -> Traffic:
    """The sum."""
    return Traffic(one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3])


@dataclass(slots=True)
class TrafficTotals:
    """Traffic of one backend."""

    settled: Traffic = NO_TRAFFIC
    """As of the last reading."""
    open: Traffic = NO_TRAFFIC
    """Traffic of the flows that were open at the last reading."""
    ended: Traffic = NO_TRAFFIC
    """Traffic of all flows that have ended since."""

    @property
    def now(self) -> Traffic:
        """The known total."""
        return self.settled if self.ended is NO_TRAFFIC else _grown(self.settled, self.ended, self.open)

    def add_ended(self, traffic: Traffic) -> None:
        """Flows have ended, with this traffic in all."""
        self.ended = added(self.ended, traffic)

    def set_open(self, traffic: Traffic) -> bool:
        """Open flows have this traffic, without those that `end` reported; returns whether that is new."""
        if self.ended is NO_TRAFFIC and traffic == self.open:
            return False  # nearly all of very many
        self.settled = _grown(self.settled, added(self.ended, traffic), self.open)
        self.open, self.ended = traffic, NO_TRAFFIC
        return True


def _grown(settled: Traffic, known: Traffic, before: Traffic) -> Traffic:
    return Traffic(
        settled[0] + max(known[0] - before[0], 0),
        settled[1] + max(known[1] - before[1], 0),
        settled[2] + max(known[2] - before[2], 0),
        settled[3] + max(known[3] - before[3], 0),
    )


@dataclass(slots=True)
class _BackendTotals:
    flows: int = 0
    gone_since: float | None = None
    traffic: TrafficTotals | None = None
    """None until there is any."""


@dataclass(slots=True)
class _ServiceTotals:
    removed_flows: int = 0
    """New flows of backends that are forgotten."""
    removed_traffic: Traffic = NO_TRAFFIC
    backends: dict[BackendKey, _BackendTotals] = field(default_factory=dict)


class FlowTotals:
    """Totals of flows and traffic."""

    def __init__(self) -> None:
        self._services: dict[str, _ServiceTotals] = {}
        self._active: dict[BackendKey, TrafficTotals] = {}
        """Backends that had open flows at the last reading, or ended ones since."""
        self.changed = set[str]()
        """The services whose totals have changed, or are gone, since the writer last emptied this."""
        self.lost = 0
        """Total number of flows whose end the kernel could not report: their traffic is not fully counted."""

    @property
    def services(self) -> Collection[str]:
        """The names of those that have totals."""
        return self._services.keys()

    def add(self, flows: Mapping[BackendKey, int]) -> None:
        """Enter new flows."""
        for place, number in flows.items():
            self._account(place).flows += number
            self.changed.add(place.key.service)

    def add_ended(self, traffic: Mapping[BackendKey, Traffic]) -> None:
        """Add the traffic of flows that have ended."""
        for place, each in traffic.items():
            self._volume(place).add_ended(each)
            self.changed.add(place.key.service)

    def set_open(self, traffic: Mapping[BackendKey, Traffic]) -> None:
        """Set the traffic of open flows: of all backends, so that those left out have none."""
        for place in traffic.keys() - self._active.keys():
            self._volume(place)
        for place, volume in self._active.items():
            if volume.set_open(traffic.get(place, NO_TRAFFIC)):
                self.changed.add(place.key.service)
        self._active = {place: volume for place, volume in self._active.items() if volume.open != NO_TRAFFIC}

    def add_lost(self, flows: int) -> None:
        """The ends of so many flows were missed."""
        self.lost += flows

    def forget_open_flows(self) -> None:
        """No earlier flow is open any more: the kernel restarted."""
        self.set_open({})

    def expire(self, current: Collection[BackendKey], now: float) -> None:
        """These are the backends of `services` that exist now; drop others that have been gone for long and
        have no flows."""
        for name, service in self._services.items():
            for place, account in list(service.backends.items()):
                if place in current:
                    if account.gone_since is not None:
                        account.gone_since = None
                        self.changed.add(name)
                elif account.gone_since is None or account.gone_since > now:
                    account.gone_since = now  # a later moment is of a clock that was set back
                    self.changed.add(name)
                elif now - account.gone_since > KEPT_SECONDS and place not in self._active:
                    service.removed_flows += account.flows
                    service.removed_traffic = added(service.removed_traffic, _traffic(account))
                    del service.backends[place]
                    self.changed.add(name)
        served = {place.key.service for place in current}
        for name in [n for n, s in self._services.items() if not s.backends and n not in served]:
            del self._services[name]
            self.changed.add(name)

    def flows_of_service(self, name: str) -> int:
        """New flows of a service, whichever backend they went to."""
        service = self._services.get(name)
        if service is None:
            return 0
        return service.removed_flows + sum(account.flows for account in service.backends.values())

    def flows_of_backend(self, place: BackendKey) -> int:
        """New flows that went to a backend."""
        account = self._known(place)
        return account.flows if account else 0

    def traffic_of_service(self, name: str) -> Traffic:
        """Traffic of a service's flows, whichever backend they went to."""
        service = self._services.get(name)
        if service is None:
            return NO_TRAFFIC
        total = service.removed_traffic
        for account in service.backends.values():
            if account.traffic is not None:
                total = added(total, account.traffic.now)
        return total

    def traffic_of_backend(self, place: BackendKey) -> Traffic:
        """Traffic of the flows to a backend."""
        account = self._known(place)
        return _traffic(account) if account else NO_TRAFFIC

    def backends_of(self, name: str) -> Iterator[BackendKey]:
        """The backends of a service that had flows, including recently removed ones."""
        service = self._services.get(name)
        return iter(service.backends) if service else iter(())

    def to_json(self) -> dict[str, object]:
        """The input of `from_json`."""
        return {"lost": self.lost, "services": dict(self.rows(self._services))}

    def rows(self, names: Iterable[str]) -> Iterator[tuple[str, object]]:
        """The parts of `to_json` of these services, without those that have no totals any more."""
        for name in names:
            if service := self._services.get(name):
                former = [service.removed_flows, *service.removed_traffic]
                yield (
                    name,
                    {
                        "former": former,
                        "backends": [[*p.row(), *_row(a)] for p, a in service.backends.copy().items()],
                    },
                )

    @classmethod
    def from_json(cls, value: object) -> FlowTotals:
        """Parses the output of `to_json`. Raises ValueError for anything else."""
        totals = cls()
        try:
            totals.lost = _count(value["lost"])  # type: ignore[index]  # a fault is caught below
            for name, told in value["services"].items():  # type: ignore[index]
                flows, *traffic = map(_count, told["former"])
                service = totals._services[str(name)] = _ServiceTotals(flows, Traffic(*traffic))
                for row in told["backends"]:
                    place = BackendKey.of_row(row[:_PLACE])
                    service.backends[place] = account = _account(row[_PLACE:])
                    if account.traffic is not None:
                        totals._active[place] = account.traffic
        except (AttributeError, TypeError, LookupError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return totals

    def _known(self, place: BackendKey) -> _BackendTotals | None:
        service = self._services.get(place.key.service)
        return service.backends.get(place) if service else None

    def _account(self, place: BackendKey) -> _BackendTotals:
        return self._services.setdefault(place.key.service, _ServiceTotals()).backends.setdefault(
            place, _BackendTotals()
        )

    def _volume(self, place: BackendKey) -> TrafficTotals:
        account = self._account(place)
        if account.traffic is None:
            account.traffic = TrafficTotals()
        self._active[place] = account.traffic
        return account.traffic


_END_OF_COUNTING = 2**80
"""Above every real count, and below the limit of a metric's number."""
_PLACE = 6
"""Number of values of a row that are `Place.row`."""


def _traffic(account: _BackendTotals) -> Traffic:
    return account.traffic.now if account.traffic is not None else NO_TRAFFIC


def _count(value: object) -> int:
    """Parses a count. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _END_OF_COUNTING:
        raise ValueError("not a count")
    return value


def _row(account: _BackendTotals) -> list[object]:
    """The numbers, after them twelve more where there was any traffic."""
    volume = account.traffic
    traffic = [*volume.settled, *volume.open, *volume.ended] if volume else []
    return [account.flows, account.gone_since, *traffic]


def _account(row: list[object]) -> _BackendTotals:
    flows, gone_since, *traffic = row
    numbers = [_count(each) for each in traffic]
    volume = TrafficTotals(*(Traffic(*numbers[at : at + 4]) for at in (0, 4, 8))) if numbers else None
    return _BackendTotals(_count(flows), None if gone_since is None else float(str(gone_since)), volume)
