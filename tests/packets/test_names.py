"""Backends by DNS name, with a real name server: packets follow its answers, and outlive it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.name_server import NEEDED, NameServer
from tests.lab.topology import HOST_TOWARDS_BACKENDS, Lab
from tests.packets.services import ENOUGH, SERVED_PORT

pytestmark = [pytest.mark.root, NEEDED]

VIP, VIP6 = "10.96.7.1", "fd00:96::7"
NAME = "web.internal"
WEB = f"""
  - name: web
    address: [{VIP}, "{VIP6}"]
    ports: 80/tcp
    backends: [dns:{NAME}:{SERVED_PORT}]
"""
PROMPT = {"dns_min_ttl": "1s", "dns_max_ttl": "1s", "dns_timeout": "400ms", "dns_hold": "2s"}

one_dataplane = pytest.mark.parametrize("dataplane", ["nftables"], indirect=True)
"""For what the rules have no part in."""


@pytest.fixture
def server(lab: Lab, tmp_path: Path) -> Iterator[NameServer]:
    found = NameServer(lab.host, tmp_path)
    yield found
    found.die()


def daemon_of(lab: Lab, dataplane: str, declaration: str = WEB, **settings: object) -> Daemon:
    return Daemon(
        lab.host,
        declaration,
        dataplane=dataplane,
        dns_servers=NameServer.place,
        **{**PROMPT, **settings},
    )


def both(lab: Lab, *numbers: int) -> list[str]:
    return [address for n in numbers for address in (lab.backends[n].ipv4, lab.backends[n].ipv6)]


def places(lab: Lab, *numbers: int) -> list[str]:
    return sorted(
        place
        for n in numbers
        for place in (f"{lab.backends[n].ipv4}:{SERVED_PORT}", f"[{lab.backends[n].ipv6}]:{SERVED_PORT}")
    )


def settled(daemon: Daemon, expected: list[str]) -> None:
    # The API shows backends, as pending, from a moment before the kernel has them.
    daemon.wait_until(lambda: sorted(daemon.endpoints("web")), expected)
    daemon.wait_in_sync()


def served(lab: Lab, address: str = VIP, count: int = ENOUGH) -> set[str]:
    return set(lab.client.send(address, 80, "tcp", count=count).all_answered().backends)


def name_view(daemon: Daemon, target: str = "web") -> dict[str, object]:
    (found,) = daemon.get(f"services/{target}")["service"]["names"]
    return dict(found)


@pytest.mark.nightly(each_time="iptables")
def test_packets_follow_the_answers_of_both_families(lab: Lab, dataplane: str, server: NameServer) -> None:
    server.addresses(NAME, both(lab, 0))
    with daemon_of(lab, dataplane) as daemon:
        settled(daemon, places(lab, 0))
        assert served(lab) == served(lab, VIP6) == {"b1"}
        server.addresses(NAME, both(lab, 0, 1))
        settled(daemon, places(lab, 0, 1))
        assert served(lab) == served(lab, VIP6) == {"b1", "b2"}
        server.addresses(NAME, both(lab, 1))
        settled(daemon, places(lab, 1))
        assert served(lab) == served(lab, VIP6) == {"b2"}


@one_dataplane
def test_flows_of_a_backend_that_left_the_answer_go_on(lab: Lab, dataplane: str, server: NameServer) -> None:
    server.addresses(NAME, both(lab, 0))
    with daemon_of(lab, dataplane, dns_hold="0s") as daemon:
        settled(daemon, places(lab, 0))
        with lab.client.open(VIP, 80) as flow:
            assert flow.ask().backend == "b1"
            server.addresses(NAME, both(lab, 1))
            settled(daemon, places(lab, 1))
            assert served(lab) == {"b2"}
            assert flow.ask().backend == "b1"


@one_dataplane
def test_a_name_server_that_stalls_dies_or_knows_nothing_changes_nothing(
    lab: Lab, dataplane: str, server: NameServer
) -> None:
    server.addresses(NAME, both(lab, 0, 1))
    with daemon_of(lab, dataplane) as daemon:
        settled(daemon, places(lab, 0, 1))
        server.stall()
        daemon.wait_until(lambda: str(name_view(daemon)["fault"])[:16], "no answer within")
        assert sorted(daemon.endpoints("web")) == places(lab, 0, 1)
        server.die()
        assert served(lab) == {"b1", "b2"}
        server.serve()
        daemon.wait_until(lambda: name_view(daemon)["fault"], "the name does not exist (NXDOMAIN)")
        assert sorted(daemon.endpoints("web")) == places(lab, 0, 1)
        assert any(NAME in warning for warning in daemon.status()["warnings"])
        server.addresses(NAME, ["0.0.0.0", "127.0.0.1"])
        daemon.wait_until(lambda: str(name_view(daemon)["fault"])[-25:], "which no backend may have")
        assert sorted(daemon.endpoints("web")) == places(lab, 0, 1)
        server.addresses(NAME, both(lab, 0, 1))
        daemon.wait_until(lambda: name_view(daemon)["fault"], "")
        assert not daemon.status()["warnings"]


@pytest.mark.nightly(each_time="nftables")
def test_after_a_restart_without_a_name_server_the_last_answer_serves(
    lab: Lab, dataplane: str, server: NameServer
) -> None:
    server.addresses(NAME, both(lab, 2))
    with daemon_of(lab, dataplane) as daemon:
        settled(daemon, places(lab, 2))
        daemon.stop()
        server.die()
        for command in ("nft flush ruleset", "iptables -t nat -F"):  # as after a reboot
            lab.host.run(*command.split(), check=False)
        daemon.start()
        assert sorted(daemon.endpoints("web")) == places(lab, 2)
        assert served(lab) == {"b3"}


@one_dataplane
def test_a_vipd_that_applies_once_waits_for_the_answers(lab: Lab, dataplane: str, server: NameServer) -> None:
    with daemon_of(lab, dataplane) as daemon:
        daemon.stop()
        server.addresses(NAME, both(lab, 1))
        lab.host.run(sys.executable, "-m", "vipd", "--config", str(daemon.config), "--once")
        assert served(lab) == {"b2"}


@one_dataplane
def test_hostile_answers_are_left_out_and_the_rest_serves(
    lab: Lab, dataplane: str, server: NameServer
) -> None:
    own, gateway = HOST_TOWARDS_BACKENDS[4], "192.0.2.1"
    lies = ["127.0.0.1", "169.254.169.254", VIP, "224.0.0.1", "192.0.2.9", "::1", own, gateway]
    server.addresses(NAME, [*both(lab, 0), *lies])
    allowed = ["10.0.0.0/8", "192.0.2.0/29", "fd00::/8", "127.0.0.0/8", "224.0.0.0/4", "::1"]
    with daemon_of(lab, dataplane, allowed_backends=allowed) as daemon:
        settled(daemon, places(lab, 0))
        told = "\n".join(daemon.get("services/web")["service"]["status"]["ignored"])
        assert [lie for lie in lies if f"resolves to {lie}, which is left out" not in told] == []
        assert served(lab) == served(lab, VIP6) == {"b1"}
        (warning,) = daemon.status()["warnings"]
        assert f"(and {len(lies) - 1} more)" in warning


@one_dataplane
def test_of_too_many_addresses_as_many_as_allowed_serve(lab: Lab, dataplane: str, server: NameServer) -> None:
    server.addresses(NAME, [f"10.200.0.{n}" for n in range(1, 121)])  # truncated: comes over TCP
    with daemon_of(lab, dataplane, dns_max_addresses=110) as daemon:
        daemon.wait_until(lambda: len(daemon.endpoints("web")), 110)
        assert name_view(daemon)["left_out"] == 10
        assert any("10 of its addresses are left out" in w for w in daemon.status()["warnings"])


@one_dataplane
def test_srv_records_give_ports_weights_and_backups(lab: Lab, dataplane: str, server: NameServer) -> None:
    hosts = [f"host-record=b{n + 1}.internal,{lab.backends[n].ipv4}" for n in range(3)]
    name = "_http._tcp.web.internal"
    first = f"srv-host={name},b1.internal,{SERVED_PORT},10,3"
    second = f"srv-host={name},b2.internal,{SERVED_PORT},10,1"
    backup = f"srv-host={name},b3.internal,{SERVED_PORT},20,1"
    declaration = f"\n  - {{name: web, address: {VIP}, ports: 80/tcp, backends: [srv:{name}]}}\n"
    server.serve(*hosts, first, second, backup)
    with daemon_of(lab, dataplane, declaration, dns_hold="0s") as daemon:
        settled(daemon, [f"{node.ipv4}:{SERVED_PORT}" for node in lab.backends])
        (forwarding,) = daemon.get("services/web")["service"]["forwardings"]
        told = {e["endpoint"]: (e["share"], e["reason"]) for e in forwarding["endpoints"]}
        assert told == {
            f"{lab.backends[0].ipv4}:{SERVED_PORT}": (0.75, ""),
            f"{lab.backends[1].ipv4}:{SERVED_PORT}": (0.25, ""),
            f"{lab.backends[2].ipv4}:{SERVED_PORT}": (0.0, "backup, waiting"),
        }
        assert served(lab) == {"b1", "b2"}
        server.serve(*hosts, backup)
        settled(daemon, [f"{lab.backends[2].ipv4}:{SERVED_PORT}"])
        assert served(lab) == {"b3"}


@one_dataplane
def test_one_wrong_answer_removes_nothing(lab: Lab, dataplane: str, server: NameServer) -> None:
    server.addresses(NAME, both(lab, 0, 1))
    with daemon_of(lab, dataplane, dns_hold="600s") as daemon:
        settled(daemon, places(lab, 0, 1))
        server.addresses(NAME, both(lab, 2))
        settled(daemon, places(lab, 0, 1, 2))
        assert len(name_view(daemon)["held"]) == 4  # type: ignore[arg-type]
        server.addresses(NAME, both(lab, 0, 1))
        settled(daemon, places(lab, 0, 1))


@one_dataplane
def test_a_name_is_looked_up_once_for_all_its_services(lab: Lab, dataplane: str, tmp_path: Path) -> None:
    server = NameServer(lab.host, tmp_path, ttl=3600)
    server.addresses(NAME, [lab.backends[0].ipv4])
    declaration = "".join(
        f"\n  - {{name: web{n}, address: 10.96.8.{n}, ports: 80/tcp, backends: [dns:{NAME}:{SERVED_PORT}]}}"
        for n in range(1, 30)
    )
    try:
        with daemon_of(lab, dataplane, declaration, dns_max_ttl="60m") as daemon:
            daemon.wait_until(lambda: len(daemon.endpoints("web29")), 1)
            daemon.vipctl("add", "10.96.8.200:80", f"dns:{NAME}:{SERVED_PORT}")
            daemon.wait_until(lambda: len(daemon.endpoints("10.96.8.200:80/tcp")), 1)
            assert server.queries(f"query[A] {NAME}") == 1
    finally:
        server.die()


@pytest.mark.nightly(each_time="nftables")
def test_the_fallback_has_names_too(lab: Lab, dataplane: str, server: NameServer) -> None:
    own, spare = "web.internal", "sorry.internal"
    declaration = f"""
  - name: web
    address: [{VIP}, "{VIP6}"]
    ports: 80/tcp
    backends: [dns:{own}:{SERVED_PORT}]
    fallback: dns:{spare}:{SERVED_PORT}
"""
    records = [f"host-record={spare},{address}" for address in both(lab, 2)]
    server.serve(*records)  # the service's own name is unknown
    with daemon_of(lab, dataplane, declaration) as daemon:
        settled(daemon, places(lab, 2))
        assert served(lab) == served(lab, VIP6) == {"b3"}
        server.serve(*records, *(f"host-record={own},{address}" for address in both(lab, 0)))
        settled(daemon, places(lab, 0, 2))
        assert served(lab) == served(lab, VIP6) == {"b1"}
        told = daemon.vipctl("describe", "web").stdout
        assert f"dns:{spare}:{SERVED_PORT}, of the fallback: 2 addresses" in told
        assert "fallback, waiting" in told
        server.die()
        daemon.wait_until(lambda: any(spare in w for w in daemon.status()["warnings"]), True)
        daemon.declare(declaration.replace(f"[dns:{own}:{SERVED_PORT}]", "[]"))
        settled(daemon, places(lab, 2))  # its last good answer
        assert served(lab) == {"b3"}
