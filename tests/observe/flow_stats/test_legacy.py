"""Legacy rules, of whose changes the kernel tells nothing, count too."""

from __future__ import annotations

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import CLIENT_SOURCES, Lab
from tests.observe.flow_stats.counted import WEB, wait_for

pytestmark = pytest.mark.root


class PatientDaemon(Daemon):
    module = "tests.observe.flow_stats.patient_vipd"


def test_legacy_rules_count_exactly_though_chains_are_rewritten_between_readings(lab: Lab) -> None:
    with PatientDaemon(lab.host, WEB, iptables_variant="legacy") as legacy:
        lab.client.send("10.96.0.10", 80, count=10).all_answered()
        wait_for(legacy, 10)
        for number in range(1, 4):
            lab.client.send("10.96.0.10", 80, count=6).all_answered()
            legacy.declare(WEB.replace(", 10.244.0.12", "" if number % 2 else ", 10.244.0.12"))
            legacy.declare(WEB + ("  affinity: client-ip\n" if number % 2 else ""))
            # From an address of its own: a port that was used before would be the flow of before.
            lab.client.send("10.96.0.10", 80, "udp", count=3, source=CLIENT_SOURCES[number]).all_answered()
        wait_for(legacy, 10 + 3 * 9)
        legacy.stop()
        lab.client.send("10.96.0.10", 80, count=5).all_answered()
        legacy.start()
        wait_for(legacy, 10 + 3 * 9 + 5)
