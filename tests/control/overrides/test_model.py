"""Orders through everything that can happen to them, beside a model that knows no files, keys or parts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.control.overrides.isolated_overrides import REFUSALS, IsolatedOverrides, Json
from tests.model.samples import service
from vipd.declaration.operations import RefusedError
from vipd.model.override import OverrideTarget
from vipd.model.service import Backend, Service
from vipd.sources.store import StoreError

EXAMPLES = int(os.environ.get("VIPD_OVERRIDES", "100"))
"""At night there are more."""
DNS = service("dns", "10.96.0.10")
STATES = {
    "dns": (
        None,
        replace(DNS, backends=(Backend("10.0.0.1"), Backend("10.0.0.2"))),
        replace(DNS, backends=(Backend("10.0.0.1"),)),
        replace(DNS, backends=(Backend("10.0.0.1"), Backend("10.0.0.2", 8080))),
        replace(DNS, backends=(Backend("10.0.0.2", 8080), Backend("10.0.0.2", 8081), Backend("10.0.0.1"))),
        replace(DNS, backends=()),
    ),
    "web": (None, service("web", "10.96.0.11", "", 1, "10.0.0.2", "fd00::1")),
    "unnamed": (
        None,
        *(service(name, "10.96.0.12", "", 1, "10.0.0.3") for name in ("10.96.0.12:53/udp", "api")),
    ),
}
PLACES: tuple[Json, ...] = (
    {"service": "dns", "backend": "10.0.0.1"},
    {"service": "dns", "backend": "10.0.0.2"},
    {"service": "dns", "backend": "10.0.0.2:8080"},
    {"service": "10.96.0.10:53/udp", "backend": "10.0.0.2"},
    {"service": "web", "backend": "FD00::1"},
    {"service": "10.96.0.12:53/udp", "backend": "10.0.0.3"},
    {"service": "api", "backend": "10.0.0.3"},
    {"address": "10.0.0.2"},
    {"address": "fd00:0::1"},
)
SECONDS = st.sampled_from([None, None, 10, 60, 3600])
SEVERITY = {"draining": 1, "disabled": 2}


class Place(NamedTuple):
    """Of what a part of an order is known."""

    scope: str
    subject: OverrideTarget
    part: str


@dataclass(frozen=True, slots=True)
class Said:
    """A part of an order."""

    value: object
    reason: str
    until: datetime | None
    pins_until: datetime | None = None


class ActiveOverrides(RuleBasedStateMachine):
    """Every rule is something that operators, time, or the machine do."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(prefix="vipd-orders-")
        self.isolated = IsolatedOverrides(Path(self.directory.name))
        self.model: dict[Place, Said] = {}
        self.count = 0
        self.places: list[Json] = []

    def teardown(self) -> None:
        """No order outlives the wish to end it."""
        self.resume_everything()
        self.isolated.close()
        self.directory.cleanup()

    @initialize(places=st.lists(st.sampled_from(PLACES), min_size=1, max_size=3))
    def begin(self, places: list[Json]) -> None:
        """Few places, so that orders meet."""
        self.places = places
        self.isolated.declare(found[1] for found in STATES.values() if found[1])

    @rule(
        where=st.integers(0, 2),
        admin=st.sampled_from([None, None, "draining", "disabled"]),
        weight=st.sampled_from([None, None, 0, 3]),
        lasts=SECONDS,
        pins=SECONDS,
        fleet=st.booleans(),
    )
    def give(
        self,
        where: int,
        admin: str | None,
        weight: int | None,
        lasts: int | None,
        pins: int | None,
        fleet: bool,
    ) -> None:
        self.count += 1
        place = self.places[where % len(self.places)]
        reason = f"order {self.count}"
        body = {"admin": admin, "weight": weight, "for": lasts, "pins": pins, "reason": reason}
        nonsense = (admin is None and weight is None) or (pins is not None and admin != "draining")
        try:
            given = self.isolated.give({**place, **body}, fleet)
        except REFUSALS as error:
            self.refused(error, fleet, by_words=nonsense or not self.live(place))
            return
        subject = OverrideTarget(given["override"]["service"], given["override"]["backend"])
        assert subject == self.live(place)
        until, pinned = (self.at(seconds) for seconds in (lasts, pins))
        scope = "fleet" if fleet else "host"
        if admin:
            self.model[Place(scope, subject, "admin")] = Said(admin, reason, until, pinned)
        if weight is not None:
            self.model[Place(scope, subject, "weight")] = Said(weight, reason, until)

    @rule(place=st.sampled_from(PLACES), fleet=st.booleans())
    def resume(self, place: Json, fleet: bool) -> None:
        """By words that name a backend, whether there is an order about it or not."""
        words = OverrideTarget(
            place.get("service", ""), str(place.get("backend", place.get("address"))).lower()
        )
        words = words._replace(backend=words.backend.replace("fd00:0::", "fd00::"))
        live = self.live(place)
        means = {words, live, OverrideTarget(live.service, words.backend) if live else words}
        self.take_back(place, {subject for subject in means if subject}, fleet)

    @rule(data=st.data(), fleet=st.booleans())
    @precondition(lambda self: self.model)
    def resume_as_listed(self, data: st.DataObject, fleet: bool) -> None:
        subject = data.draw(
            st.sampled_from(sorted({place.subject for place in self.in_force()} or [OverrideTarget("", "x")]))
        )
        if subject.backend == "x":
            return
        words = (
            {"service": subject.service, "backend": subject.backend}
            if subject.service
            else {"address": subject.backend}
        )
        means = {subject}
        if live := self.live(words):
            means |= {live, OverrideTarget(live.service, subject.backend)}
        self.take_back(words, means, fleet)

    @rule(fleet=st.booleans())
    def resume_all(self, fleet: bool) -> None:
        self.take_back({"all": True}, {place.subject for place in self.model}, fleet)

    @rule(seconds=st.sampled_from([1, 10, 61, 4000]))
    def time_passes(self, seconds: int) -> None:
        self.isolated.pass_time(seconds)

    @rule()
    def etcd_ends_leases(self) -> None:
        """Sooner or later after their time."""
        self.isolated.etcd.end_leases()
        self.isolated.hear()

    @rule(name=st.sampled_from(sorted(STATES)), data=st.data())
    def redeclare(self, name: str, data: st.DataObject) -> None:
        """A service or backend goes, comes back, or gets another port or name."""
        state = data.draw(st.sampled_from(STATES[name]))
        kept = {
            n: s for n, s in self.isolated.services.items() if n not in {s.name for s in STATES[name] if s}
        }
        self.isolated.declare([*kept.values(), *([state] if state else [])])

    @rule(full=st.sampled_from([False, False, True]))
    def disk(self, full: bool) -> None:
        self.isolated.full = full
        self.isolated.save()

    @rule(away=st.sampled_from([False, False, True]))
    def etcd(self, away: bool) -> None:
        self.isolated.etcd.away = away
        self.isolated.hear()

    @rule(configured=st.sampled_from([True, True, True, False]), seconds=st.sampled_from([0, 0, 61]))
    def kill_and_start(self, configured: bool, seconds: int) -> None:
        """What is answered is on disk; what has ended meanwhile does not come back."""
        self.isolated.configured = configured
        self.isolated.now += timedelta(seconds=seconds)
        self.isolated.start()
        self.isolated.save()

    @invariant()
    def listed_is_what_is_in_force(self) -> None:
        told: dict[Place, Said] = {}
        for order in self.isolated.listed():
            about = order["scope"], OverrideTarget(order["service"], order["backend"])
            until, pins = (
                datetime.fromisoformat(order[k]) if k in order else None for k in ("until", "pins_until")
            )
            if order.get("admin", "active") != "active":
                told[Place(*about, "admin")] = Said(order["admin"], order["reason"], until, pins)
            if "weight" in order:
                told[Place(*about, "weight")] = Said(order["weight"], order["reason"], until)
        assert told == self.in_force()

    @invariant()
    def backends_stand_as_ordered(self) -> None:
        for each in self.isolated.services.values():
            backend_statuses = self.isolated.backend_statuses(each)
            for backend in each.backends:
                found = backend_statuses.get(str(backend))
                admin, weights = self.expected(each, backend)
                assert str(found.admin if found else "active") == admin
                assert (found.weight if found else None) in (weights or {None})

    def take_back(self, words: Json, means: set[OverrideTarget], fleet: bool) -> None:
        scope, there = "fleet" if fleet else "host", self.in_force()
        meant = {place for place in there if place.subject in means}
        try:
            answer = self.isolated.resume(words, fleet)
        except REFUSALS as error:
            known = bool(meant) or "all" in words or bool(self.live(words))
            self.refused(error, fleet, by_words=not known)
            return
        gone = {place for place in meant if place.scope == scope}
        assert answer["changed"] == bool(gone)
        assert {_subject(each) for each in answer["overrides"]} == {place.subject for place in gone}
        assert {_subject(each) for each in answer["elsewhere"]} == {p.subject for p in meant - gone}
        for place in gone:
            del self.model[place]

    def refused(self, error: Exception, fleet: bool, by_words: bool) -> None:
        """A refusal has a reason, and has changed nothing."""
        if by_words and isinstance(error, RefusedError) and error.kind in ("not-found", "malformed"):
            return
        if fleet:
            assert isinstance(error, RefusedError)
            assert self.isolated.etcd.away or self.isolated.orders is None, error
        else:
            assert isinstance(error, StoreError), error
            assert self.isolated.full

    def resume_everything(self) -> None:
        """With room on the disk and etcd there, every order that is listed ends by the words that list it."""
        self.isolated.full = self.isolated.etcd.away = False
        self.isolated.hear()
        for order in self.isolated.listed():
            subject = _subject(order)
            words = {"service": subject.service, "backend": subject.backend}
            self.isolated.resume(
                words if subject.service else {"address": subject.backend}, order["scope"] == "fleet"
            )
        assert self.isolated.listed() == []
        self.isolated.start()
        assert self.isolated.listed() == []

    def live(self, words: Json) -> OverrideTarget | None:
        """The subject that words mean among what is declared now."""
        address = words.get("address", "").replace("fd00:0::", "fd00::")
        if address:
            there = any(b.address == address for s in self.isolated.services.values() for b in s.backends)
            return OverrideTarget("", address) if there else None
        target, name = str(words.get("service")), str(words.get("backend")).lower()
        found = [s for s in self.isolated.services.values() if target in (s.name, f"{s.addresses[0]}:53/udp")]
        backends = [b for s in found for b in s.backends]
        exact = [b for b in backends if str(b) == name] or [b for b in backends if b.address == name]
        return OverrideTarget(found[0].name, str(exact[0])) if len(exact) == 1 else None

    def in_force(self) -> dict[Place, Said]:
        """The model as of now."""
        return dict(self._in_force())

    def _in_force(self) -> Iterator[tuple[Place, Said]]:
        for place, said in self.model.items():
            if (said.until is None or said.until > self.isolated.now) and (
                place.scope == "host" or self.isolated.orders is not None
            ):
                over = said.pins_until is not None and said.pins_until <= self.isolated.now
                yield place, replace(said, pins_until=None) if over else said

    def expected(self, each: Service, backend: Backend) -> tuple[str, set[Any]]:
        """The severest state, and the weights of which one counts."""
        own, everywhere = OverrideTarget(each.name, str(backend)), OverrideTarget("", backend.address)
        parts = {p: s for p, s in self.in_force().items() if p.subject in (own, everywhere)}
        states = [str(said.value) for place, said in parts.items() if place.part == "admin"]
        weights = {p: s.value for p, s in parts.items() if p.part == "weight"}
        near = {value for place, value in weights.items() if place.subject == own}
        return max(states, key=lambda s: SEVERITY[s], default="active"), near or set(weights.values())

    def at(self, seconds: int | None) -> datetime | None:
        """So many seconds from now."""
        return None if seconds is None else self.isolated.now + timedelta(seconds=seconds)


def _subject(order: Json) -> OverrideTarget:
    return OverrideTarget(order["service"], order["backend"])


pytestmark = [pytest.mark.timeout(300 + 3 * EXAMPLES), pytest.mark.slow]
TestOrders = ActiveOverrides.TestCase
TestOrders.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
