"""Orders through all that happens to them, beside a model that knows no files, keys or parts."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.lab.inside import Answer, Vipd, running
from vipd.model.override import OverrideTarget

WALKS = int(os.environ.get("VIPD_OVERRIDES", "2"))
"""At night there are more."""
STEPS = 60
ETCD = {"endpoints": ["http://etcd:2379"]}
Json = dict[str, Any]
STATES: dict[str, tuple[list[str] | None, ...]] = {
    "dns": (
        None,
        ["10.0.0.1", "10.0.0.2"],
        ["10.0.0.1"],
        ["10.0.0.1", "10.0.0.2:8080"],
        ["10.0.0.2:8080", "10.0.0.2:8081", "10.0.0.1"],
        [],
    ),
    "web": (None, ["10.0.0.2", "fd00::1"]),
    "10.96.0.12:53/udp": (None, ["10.0.0.3"]),
    "api": (None, ["10.0.0.3"]),
}
"""What is declared of each service; the last two are one that gets a name."""
ADDRESSES = {"dns": "10.96.0.10", "web": "[10.96.0.11, 'fd00:96::1']", "api": "10.96.0.12"}
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


def subject_of(order: Json) -> OverrideTarget:
    return OverrideTarget(order["service"], order["backend"])


def times_of(order: Json) -> tuple[datetime | None, datetime | None]:
    """When it ends, and when its pins do."""
    until, pins = (datetime.fromisoformat(order[k]) if k in order else None for k in ("until", "pins_until"))
    return until, pins


def words_of(subject: OverrideTarget) -> Json:
    named = {"service": subject.service, "backend": subject.backend}
    return named if subject.service else {"address": subject.backend}


class Walk:
    """A vipd of a fleet beside what it is to hold."""

    def __init__(self, vipd: Vipd, random: Random) -> None:
        self.vipd, self.random = vipd, random
        self.model: dict[Place, Said] = {}
        self.declared: dict[str, list[str]] = {}
        self.done, self.full = Counter[str](), False
        self.places = random.sample(PLACES, 3)

    async def step(self) -> None:
        """Something happens; then vipd holds what it is to hold."""
        ways = (
            *(self.give,) * 6, *(self.resume,) * 3, self.resume_all, *(self.wait,) * 2,
            *(self.redeclare,) * 2, self.disk, self.etcd,
        )  # fmt: skip
        way = self.random.choice(ways)
        self.done[way.__name__] += 1
        await way()
        await asyncio.sleep(2)
        assert await self.listed() == self.in_force(), self.done
        await self.backends_stand_as_ordered()

    def now(self) -> datetime:
        return datetime(2027, 1, 15, tzinfo=UTC) + timedelta(seconds=asyncio.get_running_loop().time())

    async def give(self) -> None:
        place, fleet = self.random.choice(self.places), self.random.random() < 0.5
        admin = self.random.choice([None, "draining", "disabled"])
        weight = self.random.choice([None, None, 0, 3])
        lasts, pins = (self.random.choice([None, None, 30, 120, 3600]) for _ in range(2))
        reason = f"order {sum(self.done.values())}"
        body = {**place, "admin": admin, "weight": weight, "for": lasts, "pins": pins, "reason": reason}
        nonsense = (admin is None and weight is None) or (pins is not None and admin != "draining")
        answer = await self.vipd.ask("POST", f"/v1/overrides?fleet={int(fleet)}", body)
        if answer.status != 200:
            self.refused(answer, fleet, by_words=nonsense or not self.live(place))
            return
        subject = subject_of(answer.body["override"])
        assert subject == self.live(place)
        order = answer.body["override"]
        until, pinned = times_of(order)
        scope = "fleet" if fleet else "host"
        if admin:
            self.model[Place(scope, subject, "admin")] = Said(admin, reason, until, pinned)
        if weight is not None:
            self.model[Place(scope, subject, "weight")] = Said(weight, reason, until)

    async def resume(self) -> None:
        """By words that name a backend, whether there is an order about it or not; or as it is listed."""
        listed = [words_of(place.subject) for place in self.in_force()]
        words = self.random.choice([*PLACES, *listed * 3])
        name = str(words.get("backend", words.get("address"))).lower().replace("fd00:0::", "fd00::")
        known = OverrideTarget(words.get("service", ""), name)
        live = self.live(words)
        means = {known, live, OverrideTarget(live.service, name) if live else known}
        await self.take_back(words, {subject for subject in means if subject})

    async def resume_all(self) -> None:
        await self.take_back({"all": True}, {place.subject for place in self.model})

    async def take_back(self, words: Json, means: set[OverrideTarget]) -> None:
        fleet = self.random.random() < 0.5
        scope = "fleet" if fleet else "host"
        meant = {place for place in self.in_force() if place.subject in means}
        answer = await self.vipd.ask("DELETE", f"/v1/overrides?fleet={int(fleet)}", words)
        if answer.status != 200:
            known = bool(meant) or "all" in words or bool(self.live(words))
            self.refused(answer, fleet, by_words=not known)
            return
        gone = {place for place in meant if place.scope == scope}
        assert answer.body["changed"] == bool(gone)
        assert {subject_of(each) for each in answer.body["overrides"]} == {place.subject for place in gone}
        assert {subject_of(each) for each in answer.body["elsewhere"]} == {p.subject for p in meant - gone}
        for place in gone:
            del self.model[place]

    def refused(self, answer: Answer, fleet: bool, by_words: bool) -> None:
        """A refusal has a reason, and has changed nothing."""
        if not (by_words and answer.kind in ("not-found", "malformed")):
            assert self.vipd.etcd.away if fleet else self.full, answer

    async def wait(self) -> None:
        await asyncio.sleep(self.random.choice([1, 10, 61, 4000]))

    async def redeclare(self) -> None:
        """A service or backend goes, comes back, or gets another port or name."""
        name = self.random.choice(list(STATES))
        backends = self.random.choice(STATES[name])
        self.declared.pop(name, None)
        if backends is not None:
            for other in {"api", "10.96.0.12:53/udp"} - {name} if name not in ("dns", "web") else ():
                self.declared.pop(other, None)
            self.declared[name] = backends
        await self.declare()

    async def declare(self) -> None:
        blocks = [
            f"  - {{{'' if ':' in name else f'name: {name}, '}address: {ADDRESSES.get(name, '10.96.0.12')}, "
            f"ports: [53/udp], backends: {[*backends]}}}\n"
            for name, backends in self.declared.items()
        ]
        self.vipd.declare(*blocks)
        await self.vipd.reload()

    async def disk(self) -> None:
        """The file cannot be written while there is a directory in its place."""
        path = self.vipd.state_dir / "state.db"
        kept = path.with_name("kept")
        if self.full:
            path.rmdir()
            if kept.exists():
                kept.rename(path)
        else:
            if path.exists():
                path.rename(kept)
            path.mkdir()
        self.full = not self.full

    async def etcd(self) -> None:
        self.vipd.etcd.away = not self.vipd.etcd.away
        await asyncio.sleep(60)

    async def listed(self) -> dict[Place, Said]:
        found: dict[Place, Said] = {}
        for order in (await self.vipd.ask("GET", "/v1/overrides")).body["overrides"]:
            about = order["scope"], subject_of(order)
            until, pins = times_of(order)
            if order.get("admin", "active") != "active":
                found[Place(*about, "admin")] = Said(order["admin"], order["reason"], until, pins)
            if "weight" in order:
                found[Place(*about, "weight")] = Said(order["weight"], order["reason"], until)
        return found

    async def backends_stand_as_ordered(self) -> None:
        """A drained one rests, a disabled one is gone, of the others the weight is that which was ordered."""
        for name, backends in self.declared.items():
            rules = [f for key, f in self.vipd.kernel.rules.items() if key.service == name]
            for backend in backends:
                address = backend.partition(":")[0] if "." in backend else backend
                port = int(backend.partition(":")[2] or 53) if "." in backend else 53
                admin, weights = self.ordered(name, backend, address)
                groups = {
                    group: {e.weight for f in rules for e in getattr(f, group) if e[:2] == (address, port)}
                    for group in ("endpoints", "without_new_flows", "unavailable")
                }
                if admin == "disabled":
                    assert groups["unavailable"], (name, backend)
                elif admin == "draining" or weights == {0}:
                    assert groups["without_new_flows"], (name, backend)
                elif 0 not in weights:
                    assert groups["endpoints"] <= (weights or {1}), (name, backend)
                    assert groups["endpoints"], (name, backend)

    def ordered(self, service: str, backend: str, address: str) -> tuple[str, set[Any]]:
        """The severest state, and the weights of which one counts."""
        own, everywhere = OverrideTarget(service, backend), OverrideTarget("", address)
        parts = {p: s for p, s in self.in_force().items() if p.subject in (own, everywhere)}
        states = [str(said.value) for place, said in parts.items() if place.part == "admin"]
        weights = {p: s.value for p, s in parts.items() if p.part == "weight"}
        near = {value for place, value in weights.items() if place.subject == own}
        return max(states, key=lambda s: SEVERITY[s], default="active"), near or set(weights.values())

    def in_force(self) -> dict[Place, Said]:
        """The model as of now."""
        found = {}
        for place, said in self.model.items():
            if said.until is None or said.until > self.now():
                over = said.pins_until is not None and said.pins_until <= self.now()
                found[place] = replace(said, pins_until=None) if over else said
        return found

    def live(self, words: Json) -> OverrideTarget | None:
        """The subject that words mean among what is declared now."""
        address = words.get("address", "").replace("fd00:0::", "fd00::")
        everything = {(s, b) for s, backends in self.declared.items() for b in backends}
        if address:
            there = any(address in (b, b.partition(":")[0]) for _, b in everything)
            return OverrideTarget("", address) if there else None
        target, name = str(words.get("service")), str(words.get("backend")).lower()
        found = [s for s in self.declared if target in (s, f"{ADDRESSES.get(s)}:53/udp")]
        backends = [b for s in found for b in self.declared[s]]
        exact = [b for b in backends if b == name] or [b for b in backends if b.partition(":")[0] == name]
        return OverrideTarget(found[0], exact[0]) if len(exact) == 1 else None

    async def end(self) -> None:
        """With room on the disk and etcd there, every order that is listed ends by the words that list it."""
        if self.full:
            await self.disk()
        self.vipd.etcd.away = False
        await asyncio.sleep(120)
        for place in list(self.in_force()):
            path = f"/v1/overrides?fleet={int(place.scope == 'fleet')}"
            await self.vipd.ask("DELETE", path, words_of(place.subject))
        await asyncio.sleep(2)
        assert await self.listed() == {}


@pytest.mark.slow
@pytest.mark.timeout(300 + 10 * WALKS)
@pytest.mark.parametrize("seed", range(WALKS))
def test_whatever_happens_the_orders_in_force_are_those_that_were_given(seed: int) -> None:
    async def story(vipd: Vipd) -> None:
        walk = Walk(vipd, Random(seed))
        walk.declared = {name: states[1] or [] for name, states in STATES.items() if name != "api"}
        await walk.declare()
        for _ in range(STEPS):
            await walk.step()
        await walk.end()

    running(story, simulated=True, etcd=ETCD)
