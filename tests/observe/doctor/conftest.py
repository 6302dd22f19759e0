"""One host for all tests of a module. Each mends what it has harmed: the next would find that, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.topology import Lab, Wiring
from tests.observe.doctor.patient import Patient, patient_in

NEEDED = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", "net.netfilter.nf_conntrack_tcp_be_liberal")


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
