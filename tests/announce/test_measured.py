"""What clients see while two hosts announce an address, and one of them or its vipd stops or is drained.

Prints a line for each event: the numbers of docs/announce.md. To repeat:

    sudo .venv/bin/python -m pytest tests/announce/test_measured.py --nightly -s
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.announce.many_clients import many_clients
from tests.announce.routed_lab import VIP, RoutedLab, both_serving, require
from tests.lab.daemon import Daemon
from tests.lab.flow import Flow

pytestmark = [pytest.mark.root, pytest.mark.nightly]

FLOWS = 16
SETTLED_SECONDS = 2.0
"""Of traffic before and after an event: long enough for a lost packet to be sent again."""


@contextlib.contextmanager
def traffic(lab: RoutedLab) -> Iterator[dict[str, Any]]:
    with many_clients(lab.client, VIP) as outcome:
        time.sleep(SETTLED_SECONDS)
        yield outcome
        time.sleep(SETTLED_SECONDS)


@contextlib.contextmanager
def established(lab: RoutedLab) -> Iterator[list[Flow]]:
    with contextlib.ExitStack() as stack:
        flows = [stack.enter_context(lab.client.open(VIP, 80, timeout=3.0)) for _ in range(FLOWS)]
        for flow in flows:
            flow.ask()
        yield flows


def measured(lab: RoutedLab, event: str, act: Callable[[], object], *hops: int) -> dict[str, Any]:
    """Let something happen during traffic; returns what came of it, and prints that. `hops`: the hosts that
    the router then sends packets to."""
    with established(lab) as flows:
        with traffic(lab) as outcome:
            began = time.monotonic()
            act()
            lab.wait_next_hops(*hops)
            seconds = time.monotonic() - began
        lived = sum(not isinstance(flow.try_ask(), str) for flow in flows)
    outcome |= {"event": event, "seconds": round(seconds, 2), "established": f"{lived} of {FLOWS}"}
    print(f"\n{json.dumps(outcome)}")
    return outcome


@pytest.fixture
def lab() -> Iterator[RoutedLab]:
    with RoutedLab() as built:
        yield built


def restart(daemon: Daemon) -> None:
    daemon.stop()
    daemon.start()


def crash(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


@pytest.mark.parametrize("kind", ["bird", "frr", "exabgp"])
def test_what_is_planned_fails_no_new_connection(lab: RoutedLab, kind: str) -> None:
    require("bird", kind)
    with both_serving(lab, {1: kind, 2: kind}) as daemons:
        lab.wait_next_hops(1, 2)
        host = daemons[1]
        for event, act, hops in (
            ("vipd restarts, as in an upgrade", lambda: restart(host), (1, 2)),
            ("vipd is killed and starts again", lambda: crash(host), (1, 2)),
            ("a host is drained", lambda: host.vipctl("host", "drain"), (2,)),
            ("a host is resumed", lambda: host.vipctl("host", "resume"), (1, 2)),
        ):
            outcome = measured(lab, f"{kind}: {event}", act, *hops)
            assert outcome["failed"] == {}, outcome
            assert outcome["slow"] == 0, outcome
            if hops == (1, 2) and "vipd" in event:
                assert outcome["established"] == f"{FLOWS} of {FLOWS}", outcome


def test_what_breaks(lab: RoutedLab) -> None:
    require("bird")
    with both_serving(lab, {1: "bird", 2: "bird"}) as daemons:
        lab.wait_next_hops(1, 2)

        def backend_dies() -> None:
            lab.backends[1].kill()
            for daemon in daemons.values():
                daemon.wait_until(lambda: daemon.endpoints("web")[0], "10.20.0.12:8080")  # noqa: B023

        measured(lab, "one of two backends dies", backend_dies, 1, 2)
        lab.backends[1].serve(tcp=(8080,), udp=(8080,))
        lab.wait_next_hops(1, 2)
        measured(lab, "the routing daemon is killed", lambda: lab.kill_daemon("h1-bird"), 2)
        lab.announce_with(1, "bird")
        lab.wait_next_hops(1, 2)
        silent = ("add", "table", "netdev", "cut", ";", "add", "chain", "netdev", "cut", "in",
                  "{ type filter hook ingress device eth0 priority 0; policy drop; }")  # fmt: skip

        def host_dies() -> None:
            lab.hosts[1].run("nft", *silent)

        outcome = measured(lab, "a host dies without a word (BFD)", host_dies, 2)
        assert outcome["seconds"] < 9, "BFD is quicker than the hold time"


def test_an_address_without_backends_is_withdrawn_everywhere_and_comes_back(lab: RoutedLab) -> None:
    require("bird")
    with both_serving(lab, {1: "bird", 2: "bird"}, announce_return_after=3):
        lab.wait_next_hops(1, 2)
        for backend in lab.backends.values():
            backend.kill()
        lab.wait_next_hops()
        for backend in lab.backends.values():
            backend.serve(tcp=(8080,), udp=(8080,))
        lab.wait_next_hops(1, 2)
        lab.client.send(VIP, 80, count=8).all_answered()
