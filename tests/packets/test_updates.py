"""While rules change under load, no flow is lost: no reader ever sees a service half-programmed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.lab.traffic import Result
from tests.packets.services import Services, backend_text
from vipd.model.service import Frontend

pytestmark = pytest.mark.root

CHANGE_SECONDS = 120


@contextmanager
def under_load(lab: Lab, vip: Frontend) -> Iterator[list[Result]]:
    """Bursts to a VIP for as long as the block lasts; the list has their results so far."""
    results: list[Result] = []
    enough = threading.Event()

    def load() -> None:
        while not enough.is_set():
            results.append(lab.client.send(*vip, count=200))

    sender = threading.Thread(target=load)
    sender.start()
    try:
        yield results
    finally:
        enough.set()
        sender.join()


def rounds(results: list[Result], number: int) -> Iterator[int]:
    """So many rounds of changes, and more until there was enough load to prove anything."""
    for each in itertools.count():
        if each >= number and len(results) > 2:
            return
        yield each


def lost(results: list[Result]) -> dict[str, int]:
    assert len(results) > 2, "the load was too short to prove anything"
    return {kind: times for result in results for kind, times in result.failures.items()}


def test_changing_weights(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    with under_load(lab, vip) as results:
        for each in rounds(results, 4):
            weight = (5, 1, 9, 0, 2)[each % 5]
            daemon.vipctl("set", f"{vip}/{backend_text(lab.backends[0])}", "--weight", str(weight))
    assert lost(results) == {}


@pytest.mark.parametrize("family", [4, 6])
def test_backends_come_and_go(lab: Lab, daemon: Daemon, services: Services, family: int) -> None:
    vip = services.add(lab.backends, family=family)
    moving = backend_text(lab.backends[2], family)
    with under_load(lab, vip) as results:
        for _ in rounds(results, 2):
            daemon.vipctl("remove-backend", str(vip), moving)
            daemon.vipctl("add-backend", str(vip), moving)
    assert lost(results) == {}


def test_other_services_come_and_go(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    with under_load(lab, vip) as results:
        for _ in rounds(results, 2):
            other = services.add(lab.backends[:1])
            daemon.vipctl("remove", str(other))
    assert lost(results) == {}


@pytest.mark.nightly(each_time="nftables")
def test_restarts(lab: Lab, daemon: Daemon, services: Services) -> None:
    vip = services.add(lab.backends)
    with under_load(lab, vip) as results:
        for _ in rounds(results, 1):
            daemon.stop()
            daemon.start()
            daemon.kill()
            daemon.start()
    assert lost(results) == {}
