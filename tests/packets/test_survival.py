"""Flows outlive changes of their service, and the daemon itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.lab.cached import cached
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab
from tests.packets.services import Services, backend_text

pytestmark = pytest.mark.root

ENDINGS: dict[str, Callable[[Daemon], None]] = {"SIGTERM": Daemon.stop, "SIGKILL": Daemon.kill}


@pytest.fixture
def daemon(lab: Lab, dataplane: str) -> Iterator[Daemon]:
    """A daemon of each test's own, for they end it; the next one meets the rules of the last."""
    with Daemon(lab.host, dataplane=dataplane) as running:
        yield running


@pytest.fixture
def services(daemon: Daemon) -> Services:
    return Services(daemon)


def rules(lab: Lab) -> list[str]:
    """Every rule, chain and map of the host, without what packets write: counters and pins."""
    saved = lab.host.run("iptables-save").stdout + lab.host.run("ip6tables-save").stdout
    tables = lab.host.run("nft", "--stateless", "list", "ruleset").stdout
    written_by_packets = ("counter", "expires")
    return [
        *(line.partition(" [")[0] for line in saved.splitlines() if not line.startswith("#")),
        *(line for line in tables.splitlines() if not any(word in line for word in written_by_packets)),
    ]


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("family", [4, 6])
def test_open_flow_survives_changes_to_its_service(
    lab: Lab, daemon: Daemon, services: Services, family: int, protocol: str
) -> None:
    vip = services.add(lab.backends[:2], family=family, protocol=protocol)
    with lab.client.open(*vip) as flow:
        before = flow.ask()
        own, other = sorted(lab.backends[:2], key=lambda node: node.name != before.backend)
        for change in (
            ("add-backend", str(vip), backend_text(lab.backends[2], family)),
            ("set", f"{vip}/{backend_text(own, family)}", "--weight", "7"),
            ("set", str(vip), "--affinity", "1m"),
            ("remove-backend", str(vip), backend_text(other, family)),
            ("set", f"{vip}/{backend_text(own, family)}", "--weight", "0"),
        ):
            daemon.vipctl(*change)
            assert flow.ask() == before, f"after vipctl {' '.join(change)}"


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_rules_and_flows_outlive_the_daemon_and_a_restart_changes_nothing(
    lab: Lab, daemon: Daemon, services: Services, ending: str
) -> None:
    vips = [services.add(lab.backends, family=family) for family in (4, 6)]
    services.add(lab.backends, "--affinity", "1m")
    before = rules(lab)
    assert any(vips[0].address in line for line in before)
    with lab.client.open(*vips[0]) as flow:
        answered = flow.ask()
        ENDINGS[ending](daemon)
        assert flow.ask() == answered
        assert rules(lab) == before
        for vip in vips:
            assert len(lab.client.send(*vip, count=60).all_answered().backends) == 3
        daemon.start()
        assert flow.ask() == answered
    assert rules(lab) == before
    assert sorted(daemon.endpoints(str(vips[0]))) == [backend_text(backend) for backend in lab.backends]
    lab.client.send(*vips[0], count=20).all_answered()


@pytest.mark.nightly(each_time="nftables")
def test_what_was_changed_meanwhile_is_served_after_a_restart(
    lab: Lab, daemon: Daemon, services: Services
) -> None:
    vip = services.vip()
    service = f"  - {{address: {vip.address}, ports: [{vip.port}/tcp], backends: ['%s']}}"
    daemon.declare(service % backend_text(lab.backends[0]))
    daemon.kill()
    daemon.write(service % backend_text(lab.backends[1]))
    daemon.start()
    assert set(lab.client.send(*vip, count=20).all_answered().backends) == {"b2"}


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("end", list(ENDINGS))
def test_udp_flow_of_a_service_removed_while_the_daemon_was_down_ends(
    lab: Lab, daemon: Daemon, services: Services, end: str, family: int
) -> None:
    kept, other = services.vip(family, "udp"), services.vip(family, "udp")
    text = "".join(
        f"- {{address: '{vip.address}', ports: [{vip.port}/udp], "
        f"backends: ['{backend_text(lab.backends[0], family)}']}}\n"
        for vip in (kept, other)
    )
    daemon.declare(text)
    daemon.wait_until(lambda: other.address in str(cached(daemon.state_dir, "flow_target")), True)
    with lab.client.open(*kept) as staying, lab.client.open(*other) as flow:
        before = staying.ask()
        assert flow.ask().backend == before.backend
        ENDINGS[end](daemon)
        assert flow.ask().backend == before.backend, "the rules stay while it is down"
        daemon.write(text.splitlines(keepends=True)[0])
        reported = daemon.log.count("flows ended: 1 backend gone")
        daemon.start()
        daemon.wait_until(lambda: daemon.log.count("flows ended: 1 backend gone") > reported, True)
        assert isinstance(flow.try_ask(1.0), str), "nobody answers"
        assert staying.ask() == before
