"""Random changes through the API, and what they must have come to."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.faults.equipment import GONE
from tests.lab.daemon import Daemon
from tests.packets.services import SERVED_PORT
from vipd.model.service import family_of

BACKENDS = {4: ("10.244.0.11", "10.244.0.12", "10.244.0.13"), 6: ("fd00:244::11", "fd00:244::12")}
AFFINITIES = (None, "1m", "10m")


@dataclass(frozen=True)
class Wanted:
    backends: tuple[tuple[str, int], ...] = ()
    affinity: str | None = None


class Changes:
    """Changes services of its own, at random; `wanted` is what every answered change came to."""

    def __init__(self, seed: int, numbers: range = range(30)) -> None:
        self._random = random.Random(seed)
        self._numbers = numbers
        self.wanted: dict[str, Wanted] = {}
        self.unanswered: tuple[str, Wanted | None] | None = None
        """The service of a change that the daemon did not live to answer, and what it may be now."""
        self.answered = 0

    def one(self, daemon: Daemon) -> None:
        """Make one change. Raises one of `GONE` when the daemon ends, AssertionError when it refuses."""
        name = f"s{self._random.choice(self._numbers)}"
        method, path, body, after = self._choose(name, self.wanted.get(name))
        try:
            status, answer = daemon.ask(method, path, body)
        except GONE:
            self.unanswered = (name, after)
            raise
        assert status == 200, f"{method} {path} {body}: {answer}"
        self.answered += 1
        self._is(name, after)

    def settle(self, found: dict[str, Wanted]) -> None:
        """Take over what a change without an answer came to; AssertionError when it is neither of the two."""
        if self.unanswered:
            name, after = self.unanswered
            self.unanswered = None
            assert found.get(name) in (after, self.wanted.get(name)), f"{name} is neither old nor new"
            self._is(name, found.get(name))

    def _is(self, name: str, service: Wanted | None) -> None:
        self.wanted.pop(name, None)
        if service is not None:
            self.wanted[name] = service

    def _choose(self, name: str, now: Wanted | None) -> tuple[str, str, Any, Wanted | None]:
        if now and self._random.random() < 0.2:
            return "DELETE", f"services/{name}", None, None
        number = int(name[1:])
        address = f"10.96.5.{number}" if number % 4 else f"fd00:96:5::{number:x}"
        known = BACKENDS[family_of(address)]
        chosen = self._random.sample(known, self._random.randrange(len(known) + 1))
        backends = tuple((backend, self._random.choice((0, 1, 2, 7))) for backend in chosen)
        after = Wanted(backends, self._random.choice(AFFINITIES))
        spec: dict[str, Any] = {
            "backends": [{"address": a, "port": SERVED_PORT, "weight": weight} for a, weight in backends],
            "affinity": {"by": "client-ip", "timeout": after.affinity} if after.affinity else None,
        }
        if now:
            return "PATCH", f"services/{name}", {"service": spec}, after
        added = {"name": name, "address": address, "ports": ["80/tcp", "80/udp"], **spec}
        return "POST", "services", {"service": {k: v for k, v in added.items() if v is not None}}, after


def services_of(daemon: Daemon) -> dict[str, Wanted]:
    services = daemon.get("export")["services"]
    return {spec["name"]: _wanted(spec) for spec in services if spec["name"].startswith("s")}


def _wanted(spec: dict[str, Any]) -> Wanted:
    backends = tuple((b["address"], b.get("weight", 1)) for b in spec.get("backends", ()))
    affinity = spec.get("affinity")
    return Wanted(backends, affinity["timeout"] if isinstance(affinity, dict) else None)
