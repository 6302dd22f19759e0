"""vipd repairs its rules after any change by another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.dataplanes import EQUIPMENTS, LEGACY, Equipment, Rules
from tests.faults.equipment import difference
from tests.lab.daemon import Daemon
from tests.lab.flow import finish
from tests.lab.topology import Lab, Wiring
from tests.lab.waiting import wait_until

pytestmark = pytest.mark.root

SERVICES = """\
  - {name: web, address: 10.96.0.1, ports: 80, backends: [{address: 10.244.0.11, port: 8080}]}
  - {name: empty, address: 10.96.0.2, ports: 80}
"""

EquippedLab = tuple[Lab, Equipment]

BEFORE_BACKOFF = 4
"""Changes by one process that vipd repairs at once; after more of them it backs off."""


def rules(equipped_lab: EquippedLab) -> Rules:
    lab, equipment = equipped_lab
    return equipment.rules_of(lab.host)


def seconds_until(equipped_lab: EquippedLab, wanted: Rules) -> float:
    """Seconds until the rules are as wanted. One second is promised; a busy machine gets more."""
    left: list[str] = []

    def repaired() -> bool:
        left[:] = difference(rules(equipped_lab), wanted)
        return not left

    return wait_until(repaired, lambda: "not repaired:\n" + "\n".join(left))


@pytest.fixture(scope="module", params=(*EQUIPMENTS, LEGACY), ids=str)
def equipped_lab(request: pytest.FixtureRequest) -> Iterator[EquippedLab]:
    equipment: Equipment = request.param
    with Lab(Wiring(backends=1)) as lab:
        lab.serve_everywhere(8080)
        yield lab, equipment


def test_a_foreign_change_is_repaired(equipped_lab: EquippedLab) -> None:
    lab, equipment = equipped_lab
    left = list(equipment.foreign_changes)
    while left:
        with Daemon(lab.host, SERVICES, **equipment.settings):
            wanted = rules(equipped_lab)
            for kind_of_change in left[:BEFORE_BACKOFF]:
                lab.host.run("bash", "-c", equipment.foreign_changes[kind_of_change])
                took = seconds_until(equipped_lab, wanted)
                print(f"{equipment}, {kind_of_change}: repaired after {took:.2f} s")
                lab.client.send("10.96.0.1", 80, count=3).all_answered()
        del left[:BEFORE_BACKOFF]


def test_an_endpoint_with_another_destination_is_repaired(equipped_lab: EquippedLab) -> None:
    lab, equipment = equipped_lab
    with Daemon(lab.host, SERVICES, **equipment.settings):
        wanted = rules(equipped_lab)
        lab.host.run("bash", "-c", equipment.bent(lab.host))
        seconds_until(equipped_lab, wanted)


def offender_reported(daemon: Daemon) -> bool:
    return any("has undone" in warning for warning in daemon.status()["warnings"])


@pytest.mark.parametrize("equipment", EQUIPMENTS, ids=str)
def test_a_process_that_keeps_undoing_repairs_is_reported(equipment: Equipment) -> None:
    with Lab(Wiring(backends=1)) as lab, Daemon(lab.host, SERVICES, **equipment.settings) as daemon:
        wanted = rules((lab, equipment))
        offender = lab.host.start("bash")
        assert offender.stdin is not None
        for _ in range(15):
            offender.stdin.write(f"{equipment.constant}; echo\n")
            assert offender.stdout is not None
            offender.stdout.readline()
            # Wait for each repair: vipd repairs two changes that come together only once.
            seconds_until((lab, equipment), wanted)
            if offender_reported(daemon):
                break
        daemon.wait_until(lambda: offender_reported(daemon), True)
        finish(offender)
        seconds_until((lab, equipment), wanted)
