"""200 backends that die and return while vipd is killed and started again, at moments that a seed chooses."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.health.servers import PATIENCE
from tests.health.torture import address, targets
from vipd.health.record_cache import check_id, probe_address

BACKENDS = 200
ROUNDS = 6
Verdicts = dict[str, tuple[bool, str, str]]


class Backends:
    """Listeners, of which some are dead."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.alive: dict[int, socket.socket] = {}
        first = socket.create_server((address(0), 0), backlog=512)
        self.port = first.getsockname()[1]
        self.alive[0] = first
        for number in range(1, BACKENDS):
            self.revive(number)
        stack.callback(self.kill_all)

    def revive(self, number: int) -> None:
        self.alive[number] = socket.create_server((address(number), self.port), backlog=512)

    def kill(self, number: int) -> None:
        self.alive.pop(number).close()

    def kill_all(self) -> None:
        for number in tuple(self.alive):
            self.kill(number)

    def flap(self, chance: random.Random) -> None:
        """Some die, and some of the dead return."""
        for number in chance.sample(range(BACKENDS), BACKENDS // 5):
            if number in self.alive:
                self.kill(number)
            else:
                self.revive(number)


class Vipd:
    """The process; `at_start` is what it says before it has asked anybody."""

    def __init__(self, file: Path, port: int) -> None:
        argv = [sys.executable, "-m", "tests.health.torture", str(file), str(port), str(BACKENDS)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.at_start = self._read()

    def verdicts(self) -> Verdicts:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Verdicts:
        assert self._process.stdout is not None
        found: Verdicts = json.loads(self._process.stdout.readline())
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def backends() -> Iterator[Backends]:
    with ExitStack() as stack:
        yield Backends(stack)


def until(condition: Callable[[], list[str]]) -> None:
    """Wait until nothing is amiss any more."""
    end = time.monotonic() + PATIENCE
    while amiss := condition():
        assert time.monotonic() < end, amiss[:5]
        time.sleep(0.1)


def dead(found: Backends) -> set[str]:
    """Targets that cannot answer well."""
    names = targets(found.port, BACKENDS)
    return {n for n in names if n.startswith("http") or int(n.split()[1]) not in found.alive}


def wrong(found: Backends, verdicts: Verdicts) -> list[str]:
    """Verdicts that are not what the backends say; one that flapped may be held down for a while."""
    bad = dead(found)
    return [
        f"{name}: {state}, {fit}: {reason}"
        for name, (fit, state, reason) in verdicts.items()
        if state != ("unhealthy" if name in bad else "healthy") and (name in bad or "held down" not in reason)
    ]


def unfit(verdicts: Verdicts) -> set[str]:
    return {name for name, (fit, _, _) in verdicts.items() if not fit}


def saved_unfit(file: Path, port: int) -> set[str]:
    """What the file says of each target, by name."""
    if not file.exists():
        return set()
    read = json.loads(file.read_bytes())
    both = zip(read["verdicts"], read["checks"], strict=True)
    bad = {(*entry[:3], check[0]) for entry, check in both if entry[4] == "unhealthy"}
    asked = targets(port, BACKENDS).items()
    return {name for name, target in asked if (*probe_address(target), check_id(target)) in bad}


class Life:
    """vipd with its backends, killed and started again."""

    def __init__(self, file: Path, found: Backends) -> None:
        self._file, self._found = file, found
        self.vipd = Vipd(file, found.port)
        self.kills = 0

    def settle(self) -> None:
        """Verdicts are what the backends say, and the bad ones are on disk."""
        until(lambda: wrong(self._found, self.vipd.verdicts()))
        until(lambda: sorted(dead(self._found) - saved_unfit(self._file, self._found.port)))

    def kill(self) -> set[str]:
        """Kill it and start it again: what it was not to use then."""
        self.vipd.kill()
        self.kills += 1
        saved = saved_unfit(self._file, self._found.port)
        self.vipd = Vipd(self._file, self._found.port)
        assert unfit(self.vipd.at_start) == saved
        return saved


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_no_dead_backend_serves_after_a_restart_for_longer_than_its_check_needs(
    seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    with backends() as found:
        life = Life(tmp_path / "health.json", found)
        try:
            for _ in range(ROUNDS):
                life.settle()
                assert dead(found) <= life.kill()
                # In the middle of it: what is on disk counts, the rest is found out anew.
                found.flap(chance)
                for _ in range(chance.randrange(3)):
                    time.sleep(chance.random())
                    life.kill()
            life.settle()
        finally:
            life.vipd.kill()
        print(f"{life.kills} kills, {len(found.alive)} of {BACKENDS} backends alive in the end")
