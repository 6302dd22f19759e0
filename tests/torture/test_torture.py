"""Random operations on a real daemon; after each settled point real connections are compared with a model.

`VIPD_TORTURE=600 pytest -rP tests/torture` goes on for ten minutes with each dataplane;
`VIPD_TORTURE_SEED` repeats the operations of a run.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.dataplanes import EQUIPMENTS, Equipment, listed_tables, saved_rules
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.lab.traffic import Result
from tests.torture.model import SERVED_PORT, DeclaredService
from tests.torture.operations import Torture

SECONDS = float(os.environ.get("VIPD_TORTURE", "6"))
# Without a budget it is one of many tests, which must not fail for another reason each time.
FRESH = random.SystemRandom().randrange(1, 2**32) if "VIPD_TORTURE" in os.environ else 1
SEED = int(os.environ.get("VIPD_TORTURE_SEED", FRESH))
BETWEEN = 6
"""Operations at the most between two settled points."""
SETTLED_SECONDS = 90.0
"""Until everything must be served as declared: somebody who disturbs the rules often has to wait."""
SOME, MOST = 30, 600
"""Connections of a first look, and until a backend that none of them reached counts as missing: of shares
from 1/7 one is missed in 600 once in 10^40 times."""
SILENCE = 0.4
MOST_MEMORY = 200 * 1024
"""KiB of the daemon's own memory."""
MOST_THREADS, MOST_DESCRIPTORS, MOST_FILES = 40, 80, 40
MOST_LINES = 30
"""Of the log, for each operation and each look."""

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300 + SECONDS * 3)]


@pytest.fixture(params=EQUIPMENTS, ids=str)
def equipment(request: pytest.FixtureRequest) -> Equipment:
    given: Equipment = request.param
    return given


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab() as built:
        built.serve_everywhere(SERVED_PORT)
        yield built


class Comparison:
    """Compares what is served with the model."""

    def __init__(self, torture: Torture) -> None:
        self._torture = torture
        self._addresses = set[str]()
        """All that ever were a service's."""
        self.counts = Counter[str]()

    def settle(self) -> None:
        """Everything is as declared, at last. Raises AssertionError."""
        end = time.monotonic() + SETTLED_SECONDS
        while wrong := self._wrong():
            assert time.monotonic() < end, f"after {SETTLED_SECONDS:.0f} s: {wrong}"
            self.counts["looks again"] += 1
            time.sleep(0.2)
        self.counts["settled points"] += 1

    def _wrong(self) -> str:
        services = self._torture.model.services()
        self._addresses |= {service.address for service in services.values()}
        for service in services.values():
            for protocol in ("tcp", "udp"):
                if wrong := self._difference(service, protocol):
                    return f"{service} over {protocol}: {wrong}"
        present = {service.address for service in services.values()}
        for address in sorted(self._addresses - present):
            sent = self._send(address, "tcp", 1, SILENCE)
            if sent.answers:
                return f"{address} is no service any more and answers: {sent}"
        return self._left_over(present)

    def _difference(self, service: DeclaredService, protocol: str) -> str:
        wanted = self._torture.model.serving(service)
        if not wanted:
            sent = self._send(service.address, protocol, 2, SILENCE if service.drops else 5)
            right = {"timeout" if service.drops else "refused"}
            return "" if set(sent.failures) == right and not sent.answers else f"{sent}, wanted {right}"
        found = Counter[str]()
        for _ in range(MOST // SOME):
            sent = self._send(service.address, protocol, SOME, 5)
            found += sent.backends
            if sent.failures or found.keys() - wanted:
                return f"{sent.failures} {found}, wanted {wanted}"
            if found.keys() == wanted or service.affinity:
                return ""
        return f"{found}, wanted {wanted}"

    def _send(self, address: str, protocol: str, count: int, timeout: float) -> Result:
        self.counts["connections compared"] += count
        return self._torture.lab.client.send(address, 80, protocol, count=count, timeout=timeout)

    def _left_over(self, present: set[str]) -> str:
        """What rules name though it is nobody's."""
        may = present | self._torture.model.reset_frontends
        host = self._torture.lab.host
        parts = (saved_rules(host), listed_tables(host))
        rules = [line for part in parts for found in part.values() for line in found]
        named = {line: set(re.findall(r"10\.96\.9\.\d+|fd00:96:9::[0-9a-f]+", line)) - may for line in rules}
        return "; ".join(f"{line} names {sorted(left)}" for line, left in named.items() if left)


def bounded(daemon: Daemon, operations: int) -> dict[str, int]:
    """What the daemon uses; AssertionError when it is too much."""
    pid = daemon.status()["pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    found = {
        "memory": int(re.findall(r"RssAnon:\s+(\d+)", status)[0]),
        "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "files": sum(path.is_file() for path in daemon.state_dir.rglob("*")),
        "lines": daemon.log.count("\n"),
    }
    most = (MOST_MEMORY, MOST_THREADS, MOST_DESCRIPTORS, MOST_FILES, MOST_LINES * (operations + 20))
    for (name, value), limit in zip(found.items(), most, strict=True):
        assert value <= limit, f"{name}: {value}, at the most {limit}; {found}"
    return found


@pytest.mark.nightly(each_time="nftables")
def test_torture(lab: Lab, equipment: Equipment) -> None:
    print(f"seed {SEED}: VIPD_TORTURE_SEED={SEED} repeats it")
    with Daemon(lab.host, **equipment.settings) as daemon:
        torture = Torture(lab, daemon, equipment, SEED)
        comparison, latest, used = Comparison(torture), list[str](), dict[str, int]()
        end = time.monotonic() + SECONDS
        try:
            while time.monotonic() < end:
                for _ in range(torture.random.randint(1, BETWEEN)):
                    latest.append(torture.one())
                comparison.settle()
                used = bounded(daemon, len(latest))
        except BaseException:
            print(f"seed {SEED} failed at operation {len(latest) + 1}, after {latest[-20:]}")
            raise
        finally:
            print(f"{len(latest)} operations: {dict(torture.done)}; {dict(comparison.counts)}; uses {used}")
        assert "Traceback" not in daemon.log
        assert torture.done["kills"] or SECONDS < 20
