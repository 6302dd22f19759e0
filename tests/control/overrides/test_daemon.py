"""A running daemon through a random walk of orders, ends, kills, full disks and changed declarations."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.api.daemon_process import ConfiguredHost, host
from vipd.model.override import OverrideTarget

SECONDS = int(os.environ.get("VIPD_OVERRIDES_SECONDS", "5"))
pytestmark = [pytest.mark.root, pytest.mark.timeout(300 + 2 * SECONDS)]
SEED = int(os.environ.get("VIPD_OVERRIDES_SEED", "1"))
ROOM_BYTES = 2 * 2**20
STATES = ("10.0.0.1, 10.0.0.2", "10.0.0.1", "10.0.0.1, '10.0.0.2:8080'", "")
PLACES: tuple[dict[str, str], ...] = (
    {"service": "dns", "backend": "10.0.0.1"},
    {"service": "dns", "backend": "10.0.0.2"},
    {"service": "dns", "backend": "10.0.0.2:8080"},
    {"address": "10.0.0.2"},
)
Part = tuple[OverrideTarget, str]


@contextmanager
def small_disk(place: Path, options: str = f"size={ROOM_BYTES},mode=0750") -> Iterator[None]:
    """A tmpfs at a place."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(directory: Path) -> None:
    """Leave no room in a file system."""
    with (directory / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass


def free(directory: Path) -> None:
    """Have room again."""
    (directory / "filler").unlink(missing_ok=True)


def declare(node: ConfiguredHost, backends: str) -> None:
    """The service dns with these backends, or none of that name; the service other stays."""
    named = "  - {name: %s, address: %s, ports: [53/udp], backends: [%s]}\n"
    dns = named % ("dns", "10.96.0.10", backends) if backends else ""
    node.write(
        "dns.yaml", "apiVersion: vipd/v1\nservices:\n" + dns + named % ("other", "10.96.0.11", "10.0.0.2")
    )
    node.wait_for(lambda: ("dns" in node.names()) == bool(backends))


def parts(node: ConfiguredHost) -> dict[Part, str]:
    """What is listed: the reason of each part."""
    found = {}
    for order in node.get("overrides")["overrides"]:
        subject = OverrideTarget(order["service"], order["backend"])
        if order.get("admin", "active") != "active":
            found[subject, "state"] = order["reason"]
        if "weight" in order:
            found[subject, "weight"] = order["reason"]
    return found


def words_of(subject: OverrideTarget) -> dict[str, str]:
    """How an order is taken back."""
    named = {"service": subject.service, "backend": subject.backend}
    return named if subject.service else {"address": subject.backend}


class Walk:
    """A daemon beside what it is to hold."""

    def __init__(self, node: ConfiguredHost, random: Random) -> None:
        self.node, self.random = node, random
        self.model: dict[Part, tuple[str, float | None]] = {}
        self.full = False
        self.done: dict[str, int] = {}

    def step(self) -> None:
        """Something happens; then the daemon holds what it is to hold."""
        ways: tuple[Callable[[], None], ...] = (
            self.give, self.give, self.give, self.resume, self.wait, self.redeclare, self.disk, self.kill,
        )  # fmt: skip
        way = self.random.choice(ways)
        self.done[way.__name__] = self.done.get(way.__name__, 0) + 1
        way()
        self.node.wait_for(lambda: parts(self.node) == self.expected())

    def expected(self) -> dict[Part, str]:
        """What is in force by now."""
        now = time.time()
        return {key: reason for key, (reason, until) in self.model.items() if until is None or until > now}

    def give(self) -> None:
        reason, lasts = f"order {sum(self.done.values())}", self.random.choice([None, 1, 3])
        what: dict[str, Any] = self.random.choice(
            [{"admin": "draining"}, {"admin": "disabled"}, {"weight": 3}, {"admin": "draining", "weight": 0}]
        )
        place = self.random.choice(PLACES)
        status, given = self.node.ask("POST", "overrides", {**place, **what, "reason": reason, "for": lasts})
        if status != 200:
            assert status == 404 or (self.full and "cannot be written" in given["error"]["what"]), given
            return
        assert given["applied"], given
        order = given["override"]
        until = time.time() + lasts if lasts else None
        for part in ("state",) * ("admin" in what) + ("weight",) * ("weight" in what):
            self.model[OverrideTarget(order["service"], order["backend"]), part] = (reason, until)

    def resume(self) -> None:
        """Whatever is listed can be taken back, but not where that cannot be kept."""
        listed = sorted({subject for subject, _ in parts(self.node)})
        if not listed:
            return
        subject = self.random.choice(listed)
        status, answer = self.node.ask("DELETE", "overrides", words_of(subject))
        if status != 200:
            over = status == 404 and subject not in {s for s, _ in self.expected()}
            assert over or (self.full and "cannot be written" in answer["error"]["what"]), answer
            return
        gone = {OverrideTarget(order["service"], order["backend"]) for order in answer["overrides"]}
        assert gone <= {subject, *(s for s, _ in self.model)}
        self.model = {key: value for key, value in self.model.items() if key[0] not in gone}

    def wait(self) -> None:
        time.sleep(self.random.choice([0.2, 1.5]))

    def redeclare(self) -> None:
        declare(self.node, self.random.choice(STATES))

    def disk(self) -> None:
        self.full = not self.full
        (fill if self.full else free)(self.node.state_dir)

    def kill(self) -> None:
        """With room for what a start needs; what ended while the disk was full does not come back."""
        self.node.end(signal.SIGKILL)
        if self.full:
            self.disk()
        self.node.start()


def test_a_daemon_holds_the_orders_that_it_was_given(record_property: Callable[[str, object], None]) -> None:
    with host() as node, small_disk(node.state_dir):
        node.start()
        declare(node, STATES[0])
        walk = Walk(node, Random(SEED))
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            walk.step()
        free(node.state_dir)
        print(f"seed {SEED}: {walk.done}")
        record_property("steps", walk.done)
        for subject in {subject for subject, _ in parts(node)}:
            node.ask("DELETE", "overrides", words_of(subject))
        assert parts(node) == {}
        assert "Traceback" not in node.log()
