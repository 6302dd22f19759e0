"""`limits` refuse new flows over a number or a rate, and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from urllib.parse import quote

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import CLIENT_SOURCES, CLIENT_SOURCES_IPV6, HOST_TOWARDS_BACKENDS, Lab
from tests.lab.waiting import wait_until
from tests.packets.outside import SILENCE, Declared, backend_texts, inside_address, node_port, outside_address
from tests.packets.services import SERVED_PORT, Services, backend_text

pytestmark = pytest.mark.root

SOURCES = {4: CLIENT_SOURCES, 6: CLIENT_SOURCES_IPV6}


@pytest.mark.parametrize("family", [4, 6])
def test_one_client_has_so_many_connections(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    vip = services.add(lab.backends, "--limit", "connections_per_client=2", family=family)
    if family == 6:  # of which a client has all
        daemon.vipctl("set", str(vip), "--limit", "connections_per_client=2,client_ipv6_prefix=128")
    first, second = SOURCES[family][:2]
    with lab.client.open(*vip, source=first) as one, lab.client.open(*vip, source=first) as other:
        one.ask()
        other.ask()
        lab.client.send(*vip, source=first, count=4).all_failed("refused").at_once()
        lab.client.send(*vip, source=second).all_answered()
        one.ask()
    wait_until(lambda: not lab.client.send(*vip, source=first).failures, "room after both connections ended")


def test_addresses_of_one_ipv6_network_are_one_client(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, "--limit", "connections_per_client=2", family=6)
    first, second, third = CLIENT_SOURCES_IPV6[:3]
    with lab.client.open(*vip, source=first) as one, lab.client.open(*vip, source=second) as other:
        one.ask()
        other.ask()
        lab.client.send(*vip, source=third).all_failed("refused").at_once()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_the_service_has_so_many_connections(
    lab: Lab, services: Services, family: int, protocol: str
) -> None:
    vip = services.add(lab.backends, "--limit", "connections=3", family=family, protocol=protocol)
    sources = SOURCES[family]
    with ExitStack() as opened:
        for source in sources[:3]:
            opened.enter_context(lab.client.open(*vip, source=source)).ask()
        lab.client.send(*vip, source=sources[3], count=3).all_failed("refused").at_once()
        lab.host.send(*vip).all_failed("EPERM" if protocol == "udp" else "refused")


def test_connections_are_still_counted_after_changes_and_a_restart(
    lab: Lab, daemon: Daemon, services: Services
) -> None:
    vip = services.add(lab.backends[:2], "--limit", "connections=2")
    with lab.client.open(*vip) as one, lab.client.open(*vip) as other:
        before = one.ask(), other.ask()
        daemon.vipctl("add-backend", str(vip), backend_text(lab.backends[2]))
        lab.client.send(*vip, count=3).all_failed("refused").at_once()
        daemon.reload()
        daemon.vipctl("remove-backend", str(vip), backend_text(lab.backends[2]))
        lab.client.send(*vip, count=3).all_failed("refused").at_once()
        daemon.stop()
        daemon.start()
        lab.client.send(*vip, count=3).all_failed("refused").at_once()
        assert (one.ask(), other.ask()) == before
        daemon.vipctl("set", str(vip), "--limit", "none")
        lab.client.send(*vip, count=5).all_answered()
        daemon.vipctl("set", str(vip), "--limit", "new_per_second=1,burst=2")
        assert lab.client.send(*vip, count=30).failures
        assert (one.ask(), other.ask()) == before


@pytest.mark.parametrize("family", [4, 6])
def test_refused_flows_are_counted_by_limit(
    lab: Lab, daemon: Daemon, services: Services, family: int
) -> None:
    limits = "connections_per_client=5,connections=5"
    vip = services.add(lab.backends, "--limit", limits, "--limit", "client_ipv6_prefix=128", family=family)
    sources = SOURCES[family]
    name, expected = str(vip), {"connections_per_client": 3, "connections": 4}

    def refused() -> dict[str, int]:
        (service,) = daemon.get(f"stats?service={quote(name)}")["services"]
        return dict(service["refused"])

    assert refused() == dict.fromkeys(expected, 0)
    with ExitStack() as opened:
        for _ in range(5):
            opened.enter_context(lab.client.open(*vip, source=sources[0])).ask()
        lab.client.send(*vip, source=sources[0], count=3).all_failed("refused")
        lab.client.send(*vip, source=sources[1], count=4).all_failed("refused")
        wait_until(lambda: refused() == expected, lambda: f"{refused()}")
        daemon.vipctl("remove-backend", name, backend_text(lab.backends[2], family))
        assert refused() == expected
    said = daemon.vipctl("stats", name)
    assert "3 over connections_per_client, 4 over connections" in said.stderr
    told = [event for event in daemon.get("events")["events"] if event["event"] == "flows-refused"]
    assert name in [service for event in told for service in event["services"]]
    metrics = lab.host.run("curl", "-sf", "--unix-socket", str(daemon.socket), "http://vipd/metrics").stdout
    assert f'vipd_service_refused_flows_total{{limit="connections",service="{name}"}} 4.0' in metrics


def test_refused_flows_are_counted_exactly_over_changes_and_restarts(
    lab: Lab, daemon: Daemon, services: Services
) -> None:
    """Each change of a limit writes rules anew, whose counts begin at zero; those of a restart stay."""
    limits = ["new_per_client=1", "new_per_client=2,connections=500", "new_per_client=1,client_burst=3"]
    vip, expected = services.add(lab.backends[:2], "--limit", limits[0]), 0

    def refused() -> int:
        (service,) = daemon.get(f"stats?service={quote(str(vip))}")["services"]
        return sum(service["refused"].values())

    for restart in (False, True, False):
        for limit in limits:
            daemon.vipctl("set", str(vip), "--limit", limit)
            expected += lab.client.send(*vip, count=9).failures["refused"]
        if restart:
            daemon.stop()
            daemon.start()
        expected += lab.client.send(*vip, count=9).failures["refused"]
        wait_until(lambda: refused() == expected, lambda: f"{refused()}, not {expected}")  # noqa: B023
    assert expected > 60


@pytest.mark.parametrize("limit", ["new_per_client=1,client_burst=5", "new_per_second=1,burst=5"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_new_flows_have_a_rate(lab: Lab, services: Services, limit: str, protocol: str, family: int) -> None:
    vip = services.add(lab.backends, "--limit", limit, family=family, protocol=protocol)
    result = lab.client.send(*vip, count=40)
    assert 5 <= len(result.answers) < 40
    assert set(result.failures) == {"refused"}


def test_a_client_over_its_rate_takes_nothing_from_others(lab: Lab, services: Services) -> None:
    limit = "new_per_client=1,client_burst=3,new_per_second=1,burst=20"
    vip = services.add(lab.backends, "--limit", limit)
    assert lab.client.send(*vip, source=CLIENT_SOURCES[0], count=60).failures
    assert len(lab.client.send(*vip, source=CLIENT_SOURCES[1], count=3).answers) == 3


def test_over_a_limit_drop_keeps_silent(lab: Lab, services: Services) -> None:
    vip = services.add(lab.backends, "--limit", "connections=1", "--fallback", "drop")
    with lab.client.open(*vip) as flow:
        flow.ask()
        lab.client.send(*vip, count=2, timeout=SILENCE).all_failed("timeout")


def test_limits_stand_beside_affinity_and_masquerade(lab: Lab, services: Services) -> None:
    vip = services.add(
        lab.backends, "--limit", "new_per_second=1,burst=30", "--affinity", "10m", "--masquerade", "always"
    )
    result = lab.client.send(*vip, count=30)
    assert len(set(result.all_answered().backends)) == 1
    assert result.sources == {HOST_TOWARDS_BACKENDS[4]}
    assert lab.client.send(*vip, count=60).failures


@pytest.mark.parametrize("family", [4, 6])
def test_all_frontends_of_a_port_count_together(lab: Lab, declared: Declared, family: int) -> None:
    inside, outside, number = inside_address(family), outside_address(family), node_port()
    spec = {
        "address": inside,
        "ports": [{"port": SERVED_PORT, "node_port": number}],
        "external_addresses": outside,
        "limits": {"connections": 3},
    }
    declared.put("together", backend_texts(lab.backends[:2], family), family, **spec)
    ways = [(inside, SERVED_PORT), (outside, SERVED_PORT), (lab.host.address(family), number)]
    with ExitStack() as opened:
        for way in ways:
            opened.enter_context(lab.client.open(*way)).ask()
        for way in ways:
            lab.client.send(*way, count=2).all_failed("refused").at_once()


def test_a_source_that_may_not_come_takes_nothing(lab: Lab, declared: Declared) -> None:
    outside, (first, second) = outside_address(4), CLIENT_SOURCES[:2]
    spec = {"external_addresses": outside, "ports": [SERVED_PORT], "allow_from": second}
    limits = {"new_per_second": 1, "burst": 5, "connections": 5}
    declared.put("apart", backend_texts(lab.backends[:2], 4), 4, **spec, limits=limits)
    lab.client.send(outside, SERVED_PORT, source=first, count=20, timeout=SILENCE).all_failed("timeout")
    lab.client.send(outside, SERVED_PORT, source=second, count=5).all_answered()
