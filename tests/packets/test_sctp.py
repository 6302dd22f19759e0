"""SCTP, where the kernel has it."""

from __future__ import annotations

import socket

import pytest

from tests.lab.client import IPPROTO_SCTP
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import SERVED_PORT, Services

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def sctp(lab: Lab) -> None:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_SCTP).close()
    except OSError as error:
        pytest.skip(f"this kernel has no SCTP sockets: {error.strerror}")
    for backend in lab.backends:
        backend.serve(sctp=[SERVED_PORT])


@pytest.mark.usefixtures("sctp")
@pytest.mark.parametrize("family", [4, 6])
def test_all_backends_are_reached(lab: Lab, services: Services, family: int) -> None:
    vip = services.add(lab.backends, family=family, protocol="sctp")
    assert len(lab.client.send(*vip, count=60).all_answered().backends) == 3


def test_rules_for_sctp_are_accepted(daemon: Daemon, services: Services, lab: Lab) -> None:
    """Needs no SCTP socket: the kernel takes the rules of such services, empty ones too."""
    for family in (4, 6):
        vip = services.add(lab.backends, family=family, protocol="sctp")
        services.add([], family=family, protocol="sctp")
        assert len(daemon.endpoints(str(vip))) == 3
    assert daemon.status()["state"] == "in-sync"
