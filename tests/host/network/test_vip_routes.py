"""Processes on the host and clients behind it reach VIPs whatever routes the host has (contract 9.12)."""

from __future__ import annotations

import pytest

from tests.lab.daemon import Daemon
from tests.lab.topology import HOST_TOWARDS_BACKENDS, Lab, add_addresses, ip
from tests.packets.services import Services

pytestmark = pytest.mark.root

FAMILIES = (4, 6)
TOOLS = {4: "-4", 6: "-6"}
SOON = 60.0
"""Seconds: the host is looked at every five; the machine may be busy."""

LEGACY = """*nat
:VIPD-SERVICES - [0:0]
-A PREROUTING -m comment --comment "vipd services" -j VIPD-SERVICES
-A PREROUTING -p tcp --dport 2222 -j REDIRECT --to-ports 22
COMMIT
"""
"""Rules of an earlier vipd and of another program in the variant that vipd does not write with."""


def routes(lab: Lab) -> list[str]:
    """The destinations of vipd's routes."""
    lines = [line for family in FAMILIES for line in shown(lab, TOOLS[family], "route").splitlines()]
    return sorted(line.split()[0] for line in lines if " proto 86 " in line)


def shown(lab: Lab, *what: str) -> str:
    return lab.host.run("ip", *what).stdout


def state(lab: Lab) -> list[str]:
    """Everything that routes and devices are."""
    looks = [("address",), ("link",), ("-4", "route"), ("-6", "route"), ("rule",), ("-6", "rule")]
    return [line for look in looks for line in shown(lab, *look).splitlines()]


def left_in_legacy(lab: Lab) -> list[str]:
    """What is there of the rules of others, and of vipd's own."""
    saved = lab.host.run("iptables-legacy-save").stdout
    return [words for words in ("--dport 2222", "VIPD-SERVICES") if words in saved]


def default_route(lab: Lab, change: str, *families: int) -> None:
    """`add` or `del` the default route of these families."""
    for family in families:
        gateway = {4: "10.10.0.2", 6: "fd00:10::2"}[family]
        ip("-n", lab.host.namespace, TOOLS[family], "route", change, "default", "via", gateway)


def give_route(lab: Lab, kind: str) -> None:
    """A route that covers all VIPs."""
    host = lab.host.namespace
    if kind == "default":
        default_route(lab, "add", *FAMILIES)
    elif kind == "connected":
        ip("-n", host, "link", "add", "vips", "type", "bridge")
        add_addresses(host, "vips", "10.96.255.254/16", "fd00:96::ffff/64")
    elif kind == "blackhole":
        ip("-n", host, "route", "add", "blackhole", "10.96.0.0/16")
        ip("-n", host, "-6", "route", "add", "blackhole", "fd00:96::/64")


AT_NIGHT = pytest.mark.nightly
"""The default route and the blackhole are in other tests by day, too."""


@pytest.mark.parametrize(
    "kind", ["none", "connected", *(pytest.param(kind, marks=AT_NIGHT) for kind in ("default", "blackhole"))]
)
def test_every_way_to_a_vip_works(lab: Lab, kind: str) -> None:
    give_route(lab, kind)
    before = state(lab)
    with Daemon(lab.host) as daemon:
        services = Services(daemon)
        vips = []
        for family in FAMILIES:
            good, empty = services.add(lab.backends, family=family), services.add([], family=family)
            vips += [good.address, empty.address]
            for node in (lab.client, lab.host):
                node.send(*good, count=8).all_answered()
                node.send(*empty).all_failed("refused")
        assert routes(lab) == (sorted(vips) if kind in ("none", "blackhole") else [])
        assert daemon.status()["warnings"] == []
        daemon.stop()
        daemon.cleanup()
    assert state(lab) == before


def test_the_source_is_an_address_that_the_backend_can_answer(lab_without_way_back: Lab) -> None:
    lab = lab_without_way_back
    with Daemon(lab.host) as daemon:
        services = Services(daemon)
        for family in FAMILIES:
            vip = services.add(lab.backends, family=family)
            answers = lab.host.send(*vip, count=4).all_answered()
            assert answers.sources == {HOST_TOWARDS_BACKENDS[family]}


def test_a_vip_goes_with_the_last_of_its_ports(lab: Lab) -> None:
    """One that moves to another service stays, and outside addresses count, too."""
    backend = lab.backends[0].ipv4

    def on(name: str, ports: str, more: str = "") -> str:
        return f"  - {{name: {name}, address: 10.96.0.1, ports: {ports}, backends: [{backend}]{more}}}\n"

    with Daemon(lab.host) as daemon:
        for services, routed in (
            (on("a", "[80]") + on("b", "[81]"), ["10.96.0.1"]),
            (on("b", "[81]"), ["10.96.0.1"]),
            (on("c", "[82]"), ["10.96.0.1"]),
            (on("c", "[82]", ", load_balancer_addresses: [198.51.100.1]"), ["10.96.0.1", "198.51.100.1"]),
            (on("c", "[82]"), ["10.96.0.1"]),
            ("", []),
        ):
            daemon.declare(services)
            assert routes(lab) == routed, services


WAYS = """
    -4 route add 10.97.0.0/16 dev cluster
    -4 route add blackhole 10.97.1.0/24
    -4 route add 10.97.1.2/32 dev cluster
    -4 route add unreachable 10.97.3.0/24 metric 9
    -4 route add throw 10.97.4.0/24
    -6 route add fd00:97::/64 dev cluster metric 1024
    -6 route add unreachable fd00:97::/64 metric 4294967295
    -6 route add unreachable fd00:98::/64 metric 1024
"""
RULES = {
    "": "",
    "from 192.0.2.9": "routed",
    "fwmark 1": "routed",
    "iif uplink": "routed",
    "not from 192.0.2.9": "routed",
}


def test_the_longest_prefix_and_then_the_lowest_metric_of_tables_for_all_packets_decide(lab: Lab) -> None:
    expected = {
        "10.97.2.1": "",
        "10.97.1.1": "routed",
        "10.97.1.2": "",
        "10.97.3.1": "routed",
        "10.97.4.1": "",
        "10.99.0.1": "routed",
        "fd00:97::1": "",
        "fd00:98::1": "routed",
        "fd00:99:1::1": "routed",
    }
    for line in WAYS.strip().splitlines():
        ip("-n", lab.host.namespace, *line.split())
    for number, (selector, routed) in enumerate(RULES.items(), 1):
        for change in (f"route add 10.98.{number}.0/24 dev cluster", f"rule add {selector}"):
            ip("-n", lab.host.namespace, *change.split(), "table", str(1000 + number))
        expected[f"10.98.{number}.1"] = routed
    expected |= {f"10.95.{number >> 8}.{number & 255}": "routed" for number in range(1, 300)}
    backends = {vip: lab.backends[0].address(6 if ":" in vip else 4) for vip in expected}
    services = "".join(
        f"  - {{address: '{vip}', ports: [80], backends: ['{backend}']}}\n"
        for vip, backend in backends.items()
    )
    with Daemon(lab.host, services):
        assert routes(lab) == sorted(vip for vip, routed in expected.items() if routed)


def test_what_changes_on_the_host_is_noticed(lab: Lab) -> None:
    default_route(lab, "add", 4)
    lab.host.run("iptables-legacy-restore", "--noflush", "-w", text=LEGACY)
    with Daemon(lab.host, iptables_variant="nft") as daemon:
        services = Services(daemon)
        vips = [services.add(lab.backends, family=family) for family in FAMILIES]
        addresses = sorted(vip.address for vip in vips)
        assert routes(lab) == [vips[1].address]
        default_route(lab, "del", 4)
        ip("-n", lab.host.namespace, "link", "delete", "vipd0")
        daemon.wait_until(lambda: routes(lab), addresses, SOON)
        told = "iptables-legacy holds rules of other programs (ipv4 nat)"
        daemon.wait_until(lambda: [w[: len(told)] for w in daemon.status()["warnings"]], [told])
        daemon.wait_until(lambda: left_in_legacy(lab), ["--dport 2222"])
        for vip in vips:
            lab.host.send(*vip).all_answered()
        default_route(lab, "add", *FAMILIES)
        daemon.wait_until(lambda: (routes(lab), "vipd0" in shown(lab, "link")), ([], False), SOON)


def test_a_crash_and_a_restart(lab: Lab) -> None:
    before = state(lab)
    with Daemon(lab.host) as daemon:
        services = Services(daemon)
        kept, gone = (services.add(lab.backends, family=family) for family in FAMILIES)
        routed = state(lab)
        daemon.kill()
        assert state(lab) == routed
        daemon.start()
        assert state(lab) == routed
        daemon.vipctl("remove", str(gone))
        assert routes(lab) == [kept.address]
        daemon.kill()
        assert "vipd0" in daemon.cleanup("--dry-run").stdout
        daemon.cleanup()
        assert [line for line in state(lab) if line not in before] == []
        assert state(lab) == before


def test_nothing_is_made_when_the_settings_say_so(lab: Lab) -> None:
    before = state(lab)
    with Daemon(lab.host, vip_device="") as daemon:
        vip = Services(daemon).add(lab.backends)
        assert lab.host.run("cat", "/proc/net/ip_tables_names").stdout == "", "nor a table of iptables-legacy"
        lab.host.send(*vip).all_failed("ENETUNREACH")
        lab.client.send(*vip).all_answered()
        assert state(lab) == before


def test_a_host_without_ipv6_on_new_devices_is_served(lab: Lab) -> None:
    lab.host.sysctl("net.ipv6.conf.default.disable_ipv6", 1)
    with Daemon(lab.host) as daemon:
        vip = Services(daemon).add(lab.backends, family=6)
        lab.host.send(*vip).all_answered()
        assert daemon.status()["warnings"] == []


@pytest.mark.parametrize("up", ["down", pytest.param("up", marks=AT_NIGHT)])
def test_a_device_that_was_there_is_used_and_left_as_it_was(lab: Lab, up: str) -> None:
    host = lab.host.namespace
    ip("-n", host, "link", "add", "vipd0", "type", "bridge")
    lab.host.sysctl("net.ipv6.conf.vipd0.addr_gen_mode", 1)
    ip("-n", host, "link", "set", "vipd0", up)
    before = state(lab)
    with Daemon(lab.host) as daemon:
        vip = Services(daemon).add(lab.backends)
        lab.host.send(*vip).all_answered()
        daemon.stop()
        daemon.cleanup()
    assert [line.partition(" qdisc")[0] for line in state(lab)] == [
        line.partition(" qdisc")[0] for line in before
    ]


def test_a_device_in_use_is_left_alone_with_one_warning(lab: Lab) -> None:
    before = state(lab)
    with Daemon(lab.host, vip_device="cluster") as daemon:
        vip = Services(daemon).add(lab.backends)
        (warning,) = daemon.status()["warnings"]
        assert "cluster cannot carry one: it is a bridge with ports" in warning
        lab.client.send(*vip).all_answered()
        assert state(lab) == before
