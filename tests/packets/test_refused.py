"""With nothing to serve them, new flows are refused at once, or dropped when that was asked for."""

from __future__ import annotations

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.outside import SILENCE
from tests.packets.services import Services, backend_text, origin

pytestmark = pytest.mark.root


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("start", ["client", "host", "backend"])
def test_empty_service_refuses(lab: Lab, services: Services, start: str, family: int, protocol: str) -> None:
    vip = services.add([], family=family, protocol=protocol)
    # For a sender on the host itself, sendto() fails: its datagram may not leave.
    how = "EPERM" if (start, protocol) == ("host", "udp") else "refused"
    # No segment is sent again: the first one is refused, which needs no clock.
    origin(lab, start).send(*vip, count=10).all_failed(how).at_once()


def test_all_weights_zero_refuse(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, weights=(0, 0, 0))
    lab.client.send(*vip, count=3).all_failed("refused").at_once()


def test_drop_keeps_silent(lab: Lab, services: Services) -> None:
    vip = services.add([], "--fallback", "drop")
    for node in (lab.client, lab.host):
        node.send(*vip, count=2, timeout=SILENCE).all_failed("timeout")


def test_fallback_serves_only_while_no_other_can(lab: Lab, daemon: Daemon, services: Services) -> None:
    last = lab.backends[2]
    vip = services.add([], "--fallback", backend_text(last))
    assert set(lab.client.send(*vip, count=20).all_answered().backends) == {last.name}
    daemon.vipctl("add-backend", str(vip), backend_text(lab.backends[0]))
    assert set(lab.client.send(*vip, count=20).all_answered().backends) == {"b1"}


def test_the_first_backend_ends_the_refusal_and_the_last_ones_end_spares_open_flows(
    lab: Lab, daemon: Daemon, services: Services
) -> None:
    vip = services.add([])
    lab.client.send(*vip).all_failed("refused").at_once()
    daemon.vipctl("add-backend", str(vip), backend_text(lab.backends[0]))
    with lab.client.open(*vip) as flow:
        before = flow.ask()
        daemon.vipctl("remove-backend", str(vip), backend_text(lab.backends[0]))
        lab.client.send(*vip, count=3).all_failed("refused").at_once()
        assert flow.ask() == before
