"""Runs the same clients against each way of balancing: vipd's, and HAProxy's in the host's namespace."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from tests.bench.extent import SMOKE, Extent
from tests.bench.path.proxies import run_haproxy
from tests.bench.progress import say
from tests.bench.record import Measurement
from tests.lab.daemon import Daemon
from tests.lab.flow import finish, read_line
from tests.lab.topology import Lab, Wiring

GROUP = "balance"
VIP, PORT, SERVED = "10.96.0.10", 80, 8080
SLOTS, FAST, SLOW = 4, 0.04, 0.8
"""A fast backend serves 100 clients a second, the slow one 5."""
CLIENTS_PER_SECOND = 30.0
"""Of these a quarter is more than the slow backend can serve."""
SKIPPED = 5.0
"""Seconds at first that do not count: least connections has to find out."""
SECONDS = 25.0
ROUNDS = 3


class Seen(NamedTuple):
    median: float
    p99: float
    slow: float
    """Connections open to the slow backend, on average."""
    unanswered: int


Balanced = Callable[[Lab, ExitStack], None]


def by_vipd(balance: str) -> Balanced:

    def start(lab: Lab, stack: ExitStack) -> None:
        daemon = Daemon(lab.host, dataplane="nftables", log_level="warning")
        backends = ", ".join(f"{backend.ipv4}:{SERVED}" for backend in lab.backends)
        daemon.write(f"  - {{address: {VIP}, ports: [{PORT}], balance: {balance}, backends: [{backends}]}}\n")
        stack.enter_context(daemon)
        daemon.wait_in_sync()

    return start


def by_haproxy(balance: str) -> Balanced:

    def start(lab: Lab, stack: ExitStack) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vipd-bench-")))
        servers = [f"  server {backend.name} {backend.ipv4}:{SERVED}" for backend in lab.backends]
        listen = [f"listen vip\n  bind {VIP}:{PORT}\n  balance {balance}", *servers]
        run_haproxy(lab.host, directory, ["  maxconn 4000"], listen, f"{VIP}:{PORT}", f"{VIP}/32")

    return start


SUBJECTS: dict[str, Balanced] = {
    "vipd random": by_vipd("random"),
    "vipd least-connections": by_vipd("least-connections"),
    "haproxy roundrobin": by_haproxy("roundrobin"),
    "haproxy leastconn": by_haproxy("leastconn"),
}


def measure(extent: Extent) -> Iterator[Measurement]:
    """Every way in turn; a row comes again, longer, after each round. None in a smoke test."""
    if extent is SMOKE:
        return
    values: dict[tuple[str, str], list[float]] = {}
    for number in range(1, ROUNDS + 1):
        say(f"balance, round {number} of {ROUNDS}")
        for subject, start in SUBJECTS.items():
            seen = one_round(start, SECONDS, number)
            note = f"{seen.unanswered} clients got no answer" if seen.unanswered else ""
            for what, unit, value in (
                ("half of the answers within", "ms", 1000 * seen.median),
                ("99 % of the answers within", "ms", 1000 * seen.p99),
                ("open to the slow backend, on average", "", seen.slow),
            ):
                taken = values.setdefault((what, subject), [])
                taken.append(value)
                yield Measurement(GROUP, what, subject, None, unit, tuple(taken), note)


def one_round(start: Balanced, seconds: float, seed: int) -> Seen:
    """One lab, from its begin to its end. The same clients come at the same times for each `seed`."""
    here = Path(__file__)
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(Wiring(backends=4)))
        servers = []
        for number, backend in enumerate(lab.backends):
            script = (sys.executable, "-I", str(here.with_name("server.py")))
            takes = FAST if number else SLOW
            servers.append(backend.start(*script, str(SERVED), str(SLOTS), str(takes)))
            assert read_line(servers[-1]) == "READY"
        start(lab, stack)
        client = lab.client.start(
            sys.executable, "-I", str(here.with_name("client.py")), VIP, str(PORT),
            str(CLIENTS_PER_SECOND), str(seconds), str(SKIPPED), str(seed),
        )  # fmt: skip
        found = json.loads(read_line(client, 2 * seconds + 120))
        finish(client)
        slow = servers[0]
        assert slow.stdin is not None
        slow.stdin.close()
        cut = quantiles(found["took"], n=100)
        return Seen(cut[49], cut[98], json.loads(read_line(slow))["mean"], found["unanswered"])
