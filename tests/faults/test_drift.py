"""What others do to vipd's rules is undone, whoever it is and however."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.faults.dataplanes import EQUIPMENTS, LEGACY, Equipment, Rules
from tests.faults.equipment import difference
from tests.lab.daemon import Daemon
from tests.lab.flow import finish
from tests.lab.topology import Lab, Wiring
from vipd.dataplane.iptables.watch.repair_backoff import REPAIRS_AT_ONCE

pytestmark = pytest.mark.root

PATIENCE = 60.0
"""Seconds. The promise is one second; the machine may be busy."""

SERVICES = """\
  - {name: web, address: 10.96.0.1, ports: 80, backends: [{address: 10.244.0.11, port: 8080}]}
  - {name: empty, address: 10.96.0.2, ports: 80}
"""

FOREIGN = "-A PREROUTING -j ACCEPT"

World = tuple[Lab, Equipment]

IN_PEACE = 4
"""So often the same culprit may disturb before repairs get pauses."""


def rules(world: World) -> Rules:
    """Everything as it stands. A foreign rule counts only while it is ahead of ours."""
    lab, equipment = world
    found = equipment.rules_of(lab.host)
    return {n: [line for line in r if line != FOREIGN or line == r[0]] for n, r in found.items()}


def seconds_until(world: World, wanted: Rules) -> float:
    """How long the rules take to be as wanted; AssertionError after PATIENCE."""
    began = time.monotonic()
    while left := difference(rules(world), wanted):
        assert time.monotonic() - began < PATIENCE, "not repaired:\n" + "\n".join(left)
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.fixture(scope="module", params=(*EQUIPMENTS, LEGACY), ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    equipment: Equipment = request.param
    with Lab(Wiring(backends=1)) as lab:
        lab.serve_everywhere(8080)
        yield lab, equipment


def test_it_is_undone(world: World) -> None:
    lab, equipment = world
    left = list(equipment.deeds)
    while left:
        with Daemon(lab.host, SERVICES, **equipment.settings):
            wanted = rules(world)
            for kind_of_change in left[:IN_PEACE]:
                lab.host.run("bash", "-c", equipment.deeds[kind_of_change])
                print(f"{equipment}, {kind_of_change}: repaired after {seconds_until(world, wanted):.2f} s")
                lab.client.send("10.96.0.1", 80, count=3).all_answered()
        del left[:IN_PEACE]


def test_an_endpoint_that_leads_elsewhere_is_undone(world: World) -> None:
    lab, equipment = world
    with Daemon(lab.host, SERVICES, **equipment.settings):
        wanted = rules(world)
        lab.host.run("bash", "-c", equipment.bent(lab.host))
        seconds_until(world, wanted)


def told_of(daemon: Daemon) -> bool:
    """Whether the quarrel is told."""
    return any("has undone" in warning for warning in daemon.status()["warnings"])


@pytest.mark.parametrize("equipment", EQUIPMENTS, ids=str)
def test_somebody_who_keeps_undoing_it_is_named(equipment: Equipment) -> None:
    with (
        Lab(Wiring(backends=1)) as lab,
        Daemon(lab.host, SERVICES, **equipment.settings) as daemon,
    ):
        wanted = rules((lab, equipment))
        culprit = lab.host.start("bash")
        assert culprit.stdin is not None
        for _ in range(3 * REPAIRS_AT_ONCE):
            culprit.stdin.write(f"{equipment.constant}; echo\n")
            assert culprit.stdout is not None
            culprit.stdout.readline()
            # Undone again only when it is mended: what is undone twice in one go is mended once.
            seconds_until((lab, equipment), wanted)
            if told_of(daemon):
                break
        daemon.wait_until(lambda: told_of(daemon), True)
        finish(culprit)
        seconds_until((lab, equipment), wanted)
