"""New flows of real traffic are counted exactly, over changes of rules, restarts and others' doings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.counters.counted import WEB, backends, new_flows, service, wait_for
from tests.faults.equipment import Api, steady_client
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab

pytestmark = pytest.mark.root

ROUNDS, SERVICES = 20, 50


@pytest.fixture(scope="module")
def resident(lab: Lab) -> Iterator[Daemon]:
    with Daemon(lab.host, WEB) as made:
        yield made


@pytest.fixture
def daemon(resident: Daemon) -> Daemon:
    """The same one for every test, with WEB; the flows of other tests are counted already."""
    resident.declare(WEB)
    return resident


def test_each_flow_is_counted_at_its_backend(lab: Lab, daemon: Daemon) -> None:
    assert new_flows(daemon) == 0
    tcp = lab.client.send("10.96.0.10", 80, count=40).all_answered().backends
    udp = lab.client.send("10.96.0.10", 80, "udp", count=12).all_answered().backends
    six = lab.client.send("fd00:96::10", 80, count=5).all_answered().backends
    expected = {f"10.244.0.1{name[1]}:80/tcp": number for name, number in tcp.items()}
    expected |= {f"10.244.0.1{name[1]}:80/udp": number for name, number in udp.items()}
    expected |= {"[fd00:244::11]:80/tcp": six["b1"]}
    wait_for(daemon, 57)
    assert backends(daemon) == expected
    with lab.client.open("10.96.0.10", 80) as flow:
        for _ in range(5):
            flow.ask()
        wait_for(daemon, 58)


def round_of(number: int) -> list[dict[str, object]]:
    """The same services in another form: affinity rewrites endpoints' chains, a backend comes and goes."""
    pair = ["10.244.0.11", "10.244.0.12"]
    return [
        {
            "name": f"s{n}",
            "address": f"10.97.0.{n + 1}",
            "ports": ["80/tcp"],
            "backends": pair if (number + n) % 3 else pair[: 1 + number % 2],
            "affinity": None if number % 2 else {"by": "client-ip", "timeout": "10m"},
        }
        for n in range(SERVICES)
    ]


def apply(api: Api, number: int) -> int:
    """Make the store hold a round; how many services changed."""
    status, told = api.ask("POST", "apply", {"services": round_of(number)})
    assert status == 200, told
    assert told["applied"], told
    return sum(result["action"] != "unchanged" for result in told["results"])


def test_a_thousand_changes_under_traffic_lose_no_flow(lab: Lab, daemon: Daemon) -> None:
    api, before = Api(daemon), new_flows(daemon)
    try:
        apply(api, 0)
        asked, changes = [], 0
        with (
            steady_client(lab.client, "10.97.0.1", 80) as changing,
            steady_client(lab.client, "10.96.0.10", 80) as steady,
        ):
            for number in range(1, ROUNDS + 1):
                changes += apply(api, number)
                asked.append(new_flows(daemon, "s0") if number % 5 == 0 else 0)
        assert changes == ROUNDS * SERVICES
    finally:
        api.close()
    for told in (changing, steady):
        assert told["failed"] == {}
        assert told["answered"] > 100
    wait_for(daemon, changing["answered"], "s0")
    wait_for(daemon, before + steady["answered"])
    monotonic = [number for number in asked if number]
    assert monotonic == sorted(monotonic)


def test_a_backend_that_lived_between_two_readings_is_counted(lab: Lab, daemon: Daemon) -> None:
    daemon.vipctl("add", "10.98.0.80:80/tcp", "10.244.0.11", "--name", "brief")
    lab.client.send("10.98.0.80", 80, count=9).all_answered()
    daemon.vipctl("add-backend", "brief", "10.244.0.12")
    daemon.vipctl("remove-backend", "brief", "10.244.0.11")
    wait_for(daemon, 9, "brief")
    (_, gone) = service(daemon, "brief")["backends"]
    assert (gone["endpoint"], gone["gone"], gone["new_flows"]) == ("10.244.0.11:80", True, 9)
    daemon.vipctl("remove", "brief")


def test_rules_that_others_flush_have_counted(lab: Lab, daemon: Daemon) -> None:
    before = new_flows(daemon)
    lab.client.send("10.96.0.10", 80, count=15).all_answered()
    written = daemon.status()["applies"]
    lab.host.run("nft", "flush", "ruleset")
    daemon.wait_until(lambda: daemon.status()["applies"] > written, True)
    daemon.wait_in_sync()
    lab.client.send("10.96.0.10", 80, count=4).all_answered()
    wait_for(daemon, before + 19)


def test_a_restart_loses_nothing_and_a_crash_only_what_rewritten_rules_had_counted(
    lab: Lab, daemon: Daemon
) -> None:
    before = new_flows(daemon)
    daemon.vipctl("add", "10.98.0.81:80/tcp", "10.244.0.11", "--name", "calm")
    lab.client.send("10.96.0.10", 80, count=11).all_answered()
    daemon.stop()
    lab.client.send("10.96.0.10", 80, count=7).all_answered()
    daemon.start()
    wait_for(daemon, before + 18)
    lab.client.send("10.98.0.81", 80, count=3).all_answered()
    lab.client.send("10.96.0.10", 80, count=6).all_answered()
    daemon.declare(WEB + "  affinity: client-ip\n")
    wait_for(daemon, before + 24)
    daemon.kill()
    lab.client.send("10.98.0.81", 80, count=5).all_answered()
    lab.client.send("10.96.0.10", 80, count=2).all_answered()
    daemon.start()
    wait_for(daemon, 8, "calm")
    assert before + 18 + 2 <= new_flows(daemon) <= before + 24 + 2
    daemon.vipctl("remove", "calm")
