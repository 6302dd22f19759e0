"""One host for all tests of a module. Each mends what it has harmed: the next would find that, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.topology import Lab, Wiring
from tests.observe.doctor.deceived import Deceived
from tests.observe.doctor.patient import Patient, patient_in

NEEDED = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.netfilter.nf_conntrack_tcp_be_liberal")
KEEPING = """
  - name: keeping
    address: 10.96.0.17
    ports: [{port: 80, target: 8080}]
    backends: [10.244.0.12]
    affinity: {by: client-ip, timeout: 10m}
"""


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    """A lab with a daemon and servers."""
    with Lab(Wiring(backends=2)) as lab:
        lab.serve_everywhere(8080)
        # Not vipd's to set here, or it would mend by itself what a test is to mend.
        for setting in NEEDED:
            lab.host.sysctl(setting, 1)
        with patient_in(
            lab, tmp_path_factory.mktemp("tools"), socket_group="daemon", manage_sysctls=False
        ) as made:
            yield made


@pytest.fixture(scope="module")
def deceived(patient: Patient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deceived]:
    """A doctor of that host that sees what a test wants it to see."""
    made = Deceived(patient, tmp_path_factory.mktemp("deceived"))
    with patient.declared(KEEPING):
        yield made
    made.doctor.end()
