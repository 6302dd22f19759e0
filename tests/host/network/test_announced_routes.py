"""The routing table that routing daemons import has a host route for each address that this host serves."""

from __future__ import annotations

import pytest

from tests.host.network.test_vip_routes import SOON, routes, shown, state
from tests.lab.daemon import Daemon
from tests.lab.topology import Lab, ip

pytestmark = pytest.mark.root

ADDRESSES = ("203.0.113.10", "2001:db8::10")
TABLE = "86"
SERVICE = """
  - name: web
    load_balancer_addresses: [203.0.113.10, "2001:db8::10"]
    ports: 80
    backends: [{backends}]
    announce: routes
"""
SETTINGS = {"announce_addresses": ["203.0.113.0/24", "2001:db8::/64"], "announce_withdraw_after": 1}


def table(lab: Lab, number: str = TABLE) -> list[str]:
    """The destinations in vipd's routing table."""
    shown = (("ip", tool, "route", "show", "table", number) for tool in ("-4", "-6"))
    lines = [line for argv in shown for line in lab.host.run(*argv, check=False).stdout.splitlines()]
    assert all("dev vipd0 proto 86" in line for line in lines if "proto" in line), lines
    return sorted(line.split()[0] for line in lines)


def service(*backends: str) -> str:
    return SERVICE.format(backends=", ".join(f'"{each}"' for each in backends))


def backends(lab: Lab) -> tuple[str, str]:
    return lab.backends[0].ipv4, lab.backends[0].ipv6


def test_an_address_is_in_the_table_while_it_is_served(lab: Lab) -> None:
    before = state(lab)
    with Daemon(lab.host, service(*backends(lab)), **SETTINGS) as daemon:
        daemon.wait_until(lambda: table(lab), sorted(ADDRESSES), SOON)
        assert routes(lab) == sorted(ADDRESSES), "packets that no rule translates end here"
        daemon.declare(service(backends(lab)[0]))
        daemon.wait_until(lambda: table(lab), ["203.0.113.10"], SOON)
        for change in ("del 203.0.113.10", "add 203.0.113.99 dev vipd0 proto 86"):
            ip("-n", lab.host.namespace, "route", *change.split(), "table", TABLE)
        daemon.wait_until(lambda: table(lab), ["203.0.113.10"], SOON)
        ip("-n", lab.host.namespace, "link", "delete", "vipd0")
        daemon.wait_until(lambda: table(lab), ["203.0.113.10"], SOON)
        daemon.declare("")
        daemon.wait_until(lambda: table(lab), [], SOON)
    assert state(lab) == before


def test_a_stop_a_crash_and_a_start_withdraw_nothing_and_cleanup_all(lab: Lab) -> None:
    before = state(lab)
    with Daemon(lab.host, service(*backends(lab)), announce_table=200, **SETTINGS) as daemon:
        daemon.wait_until(lambda: table(lab, "200"), sorted(ADDRESSES), SOON)
        told = shown(lab, "route", "show", "table", "200")
        daemon.kill()
        assert shown(lab, "route", "show", "table", "200") == told
        daemon.start()
        daemon.stop()
        assert shown(lab, "route", "show", "table", "200") == told
        assert "2 routes in table 200" in daemon.cleanup("--dry-run").stdout
        daemon.config.write_text(
            daemon.config.read_text().replace("announce_table: 200", "announce_table: 201")
        )
        daemon.start()
        daemon.wait_until(lambda: (table(lab, "200"), table(lab, "201")), ([], sorted(ADDRESSES)), SOON)
        daemon.stop()
        daemon.cleanup()
        assert (table(lab, "200"), table(lab, "201")) == ([], [])
    assert state(lab) == before


def test_a_stop_withdraws_if_the_settings_say_so(lab: Lab) -> None:
    with Daemon(lab.host, service(*backends(lab)), announce_on_stop="withdraw", **SETTINGS) as daemon:
        daemon.wait_until(lambda: table(lab), sorted(ADDRESSES), SOON)
        daemon.stop()
        assert table(lab) == []


def test_maintenance_withdraws_addresses_and_closes_health_ports(lab: Lab) -> None:
    declared = service(*backends(lab)) + "    health_port: 30100\n    traffic_policy: {external: cluster}\n"

    def health() -> str:
        asked = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:30100/")
        return lab.host.run(*asked, check=False).stdout

    local = {"host_addresses": [lab.backends[0].ipv4, lab.backends[0].ipv6]}
    with Daemon(lab.host, declared, **SETTINGS, **local) as daemon:
        daemon.wait_until(lambda: (table(lab), health()), (sorted(ADDRESSES), "200"), SOON)
        assert "0 of 2 addresses announced" in daemon.vipctl("host", "drain").stdout
        assert (table(lab), health()) == ([], "503")
        assert "not announced by routes" in daemon.vipctl("explain", "--from", "10.10.0.9", "web").stdout
        daemon.kill()
        daemon.start()
        assert (table(lab), health()) == ([], "503")
        assert "2 of 2 addresses announced" in daemon.vipctl("host", "resume").stdout
        assert (table(lab), health()) == (sorted(ADDRESSES), "200")
