"""A known number of connections through very many changes of rules: each is counted once.

VIPD_CHANGES=1000 makes a thousand changes instead of a few; `pytest -s` prints the numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.daemon import Daemon
from tests.lab.inside import DATAPLANES
from tests.lab.steady_client import steady_client
from tests.lab.topology import Lab
from tests.observe.flow_stats.counted import PATIENCE_SECONDS, WEB, new_flows, service, wait_for

pytestmark = pytest.mark.root

CHANGES = int(os.environ.get("VIPD_CHANGES", "12"))
LOOK_EVERY = 4
PAIR = ["10.244.0.11", "10.244.0.12"]
CHANGING, STEADY = "10.97.0.1", "10.96.0.10"

FORMS: list[dict[str, Any]] = [
    {"backends": PAIR, "affinity": None},
    {"backends": PAIR, "affinity": {"by": "client-ip", "timeout": "10m"}},
    {"backends": PAIR[:1]},
    {"backends": PAIR, "affinity": None},
    {"backends": [{"address": PAIR[0], "weight": 3}, PAIR[1]]},
    {"backends": PAIR[1:]},
]
"""What the service becomes, one after the other: chains are rewritten, backends come and go."""


@pytest.fixture(params=DATAPLANES)
def daemon(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    lab.host.sysctl("net.netfilter.nf_conntrack_acct", 1)
    with Daemon(lab.host, WEB, dataplane=request.param) as made:
        made.vipctl("add", f"{CHANGING}:80/tcp", *PAIR, "--name", "changing")
        yield made
        made.stop()
        made.cleanup()


def change(daemon: Daemon, numbers: range) -> int:
    """Change the service once for each number; how many changes the kernel has taken."""
    seen, before = 0, daemon.status()["applies"]
    for number in numbers:
        form = {"service": FORMS[number % len(FORMS)]}
        status, outcome = daemon.ask("PATCH", "services/changing", form)
        assert (status, outcome.get("applied")) == (200, True), outcome
        if number % LOOK_EVERY == 0:
            now = new_flows(daemon, "changing")
            assert now >= seen, "a number has fallen"
            seen = now
    return int(daemon.status()["applies"] - before)


def test_no_flow_is_lost_or_counted_twice(lab: Lab, daemon: Daemon) -> None:
    dataplane = daemon.status()["dataplane"]["name"]
    half = CHANGES // 2
    with steady_client(lab.client, CHANGING, 80) as changing, steady_client(lab.client, STEADY, 80) as steady:
        applied = change(daemon, range(1, half + 1))
        written = new_flows(daemon, "changing")
        daemon.stop()
        daemon.start()
        applied += change(daemon, range(half + 1, CHANGES + 1))
    assert applied >= CHANGES, "each was written to the kernel"
    for outcome in (changing, steady):
        assert outcome["failed"] == {}
        assert outcome["answered"] > CHANGES
    wait_for(daemon, changing["answered"], "changing")
    wait_for(daemon, steady["answered"])
    # A handshake, a question, an end; the ends are told by another way than the beginnings.
    least = 3 * steady["answered"]
    daemon.wait_until(lambda: service(daemon)["packets_in"] > least, True, PATIENCE_SECONDS)
    print(f"\n{dataplane}: {CHANGES} changes, a restart: {changing['answered']} flows to the service changed")
    print(f"{dataplane}: {steady['answered']} to another; each counted once")
    daemon.kill()
    daemon.start()
    wait_for(daemon, steady["answered"])
    lost = changing["answered"] - new_flows(daemon, "changing")
    assert 0 <= lost <= changing["answered"] - written, "what replaced rules had counted since the last write"
    assert not lost or dataplane == "iptables", "the nftables table keeps what it has counted"
    print(f"{dataplane}: a kill lost {lost} of the flows to the service changed")
