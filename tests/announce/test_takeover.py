"""Established connections go on when one of two hosts dies: 1,000 of them behind a router with ECMP.

Prints the numbers of docs/announce.md. To repeat:

    sudo .venv/bin/python -m pytest tests/announce/test_takeover.py --nightly -s
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.announce.lan_network import VIP as LAN_VIP
from tests.announce.lan_network import TwoArmedLab
from tests.announce.routed_lab import EXAMPLES, SOON, VIP, RoutedLab, require
from tests.fleet.network import HostDaemon
from tests.lab.daemon import Daemon
from tests.lab.flow import Process, finish, read_line
from tests.lab.node import Node
from tests.lab.topology import add_addresses
from tests.lab.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.nightly]

LONG_FLOWS = Path(__file__).parent / "long_flows.py"
SOURCES = range(10, 60)
"""Last numbers of the client's addresses: each is hashed to a backend."""
DECLARATION = """
- name: web
  load_balancer_addresses: [203.0.113.10]
  ports: 80:9000
  backends: [10.20.0.11, 10.20.0.12]
  announce: routes
  balance: source-hash
  masquerade: hairpin
"""
OTHER = """
- name: other
  load_balancer_addresses: [203.0.113.11]
  ports: 80:9000
  backends: [10.20.0.11, 10.20.0.12]
  balance: source-hash
  masquerade: hairpin
  flow_takeover: true
"""
ANSWER_SECONDS = 12
CUT = """
table netdev cut {
    chain outside { type filter hook ingress device eth0 priority 0; policy drop; }
    chain inside { type filter hook ingress device lan0 priority 0; policy drop; }
}
"""


@contextmanager
def serving(more: str = "  flow_takeover: true\n") -> Iterator[RoutedLab]:
    """Two hosts with vipd and BIRD, and two backends that reply by the host that asked."""
    with RoutedLab() as lab, ExitStack() as stack:
        add_addresses(lab.client.namespace, "eth0", *(f"198.51.100.{n}/24" for n in SOURCES))
        own = {"announce_addresses": ["203.0.113.0/24"], "dataplane": "nftables"}
        for host in lab.hosts.values():
            stack.enter_context(Daemon(host, DECLARATION + more, **own))
        lab.start_router()
        for number in lab.hosts:
            lab.announce_with(number, "bird", ("protocol bfd {}", bfd(number)))
        start_backends(lab.backends.values(), lab.hosts.values(), lab.start_bird)
        lab.wait_next_hops(1, 2)
        yield lab


def bfd(host: int) -> str:
    neighbors = "".join(f'neighbor 10.20.0.1{n} dev "lan0" local 10.20.0.{host}; ' for n in (1, 2))
    return f"protocol bfd {{ {neighbors}}}"


def start_backends(
    backends: Iterable[Node], hosts: Iterable[Node], start_bird: Callable[[Node, str], None]
) -> None:
    """Servers that reply as the examples say; returns once they have a way back by each host."""
    marking = (EXAMPLES / "backend-return.nft").read_text()
    for host_number, host in enumerate(hosts, 1):
        hardware = host.run("cat", "/sys/class/net/lan0/address").stdout.strip()
        marking = marking.replace(f"02:00:00:00:00:0{host_number}", hardware)
    for backend in backends:
        process = backend.start(sys.executable, "-I", str(LONG_FLOWS), "serve", "9000")
        assert read_line(process) == "READY"
        backend.run("ip", "rule", "add", "pref", "100", "lookup", "main", "suppress_prefixlength", "0")
        for number in ("1", "2"):
            backend.run(*f"ip rule add pref 101 fwmark {number} lookup 10{number}".split())
        backend.run("nft", "-f", "-", text=marking)
        backend.run("sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.lan0.rp_filter=0")
        start_bird(backend, (EXAMPLES / "backend-bird.conf").read_text().replace("10.20.0.11", backend.ipv4))
    for backend in backends:
        for number in ("1", "2"):
            wait_until(partial(by_host, backend, number), f"{backend.name} has a way back by {number}", SOON)


def by_host(backend: Node, number: str) -> bool:
    """Whether replies by way of a host take it."""
    table = backend.run(*f"ip route show table 10{number}".split(), check=False).stdout
    return f"via 10.20.0.{number} " in table


class Flows:
    def __init__(self, client: Node, vip: str) -> None:
        self._client, self._vip = client, vip
        self._process: Process

    def __enter__(self) -> Flows:
        network = self._client.ipv4.rpartition(".")[0]
        sources = [f"{network}.{number}" for number in SOURCES]
        argv = (sys.executable, "-I", str(LONG_FLOWS), "open", self._vip, "80", *sources)
        self._process = self._client.start(*argv)
        assert read_line(self._process, SOON) == "READY"
        return self

    def __exit__(self, *error: object) -> None:
        finish(self._process)

    def ask(self) -> dict[str, dict[str, int]]:
        assert self._process.stdin
        self._process.stdin.write(f"{ANSWER_SECONDS}\n")
        self._process.stdin.flush()
        outcomes: dict[str, dict[str, int]] = json.loads(read_line(self._process, SOON))
        return outcomes


def alive(outcomes: dict[str, dict[str, int]]) -> int:
    return sum(found.get("alive", 0) for found in outcomes.values())


def report_outcomes(event: str, outcomes: dict[str, dict[str, int]]) -> int:
    print(f"\n{event}: {alive(outcomes)} of 1000; {json.dumps(outcomes)}")
    return alive(outcomes)


def test_connections_outlive_a_host() -> None:
    require("bird")
    with serving() as lab, Flows(lab.client, VIP) as flows:
        assert report_outcomes("before", flows.ask()) == 1000
        time.sleep(1)
        lab.hosts[1].run("nft", "-f", "-", text=CUT)
        lab.wait_next_hops(2)
        assert report_outcomes("a host dies", flows.ask()) >= 990
        lab.hosts[1].run("nft", "delete", "table", "netdev", "cut")
        lab.hosts[1].run("conntrack", "-F")
        lab.wait_next_hops(1, 2)
        assert report_outcomes("it is back, without its entries", flows.ask()) >= 990
        lab.hosts[2].run("nft", "-f", "-", text=CUT)
        lab.wait_next_hops(1)
        assert report_outcomes("the other one dies", flows.ask()) >= 990


def test_without_it_a_backend_that_sends_first_is_reset() -> None:
    require("bird")
    with serving("") as lab, Flows(lab.client, VIP) as flows:
        assert report_outcomes("before", flows.ask()) == 1000
        lab.hosts[1].run("nft", "-f", "-", text=CUT)
        lab.wait_next_hops(2)
        outcomes = flows.ask()
        report_outcomes("a host dies, without flow_takeover", outcomes)
        assert outcomes["idle"] == {"alive": 334}
        assert outcomes["client"] == {"alive": 333}
        assert outcomes["server"]["ConnectionResetError"], "a backend that sends first needs flow_takeover"


def test_replies_of_several_services_wait_for_the_client() -> None:
    require("bird")
    with serving("  flow_takeover: true\n" + OTHER) as lab, Flows(lab.client, VIP) as flows:
        assert report_outcomes("before", flows.ask()) == 1000
        lab.hosts[1].run("nft", "-f", "-", text=CUT)
        lab.wait_next_hops(2)
        outcomes = flows.ask()
        report_outcomes("a host dies, two services at the same backends", outcomes)
        assert set(outcomes["server"]) <= {"alive", "only when asked"}, "none is reset"
        assert report_outcomes("later", flows.ask()) == 1000


def test_connections_outlive_the_holder_of_an_address(tmp_path: Path) -> None:
    require("bird")
    services = DECLARATION.replace(VIP, LAN_VIP).replace("announce: routes", "announce: l2")
    with ExitStack() as stack:
        lab = TwoArmedLab(tmp_path)
        stack.enter_context(lab)
        add_addresses(lab.client.namespace, "eth0", *(f"10.77.0.{n}/24" for n in SOURCES))
        own = {"announce_addresses": ["10.77.0.0/24"], "announce_preempt_after": 0, "dataplane": "nftables"}
        for number, host in enumerate(lab.hosts, 1):
            etcd = {"endpoints": list(lab.etcd.urls)}
            declared = services + "  flow_takeover: true\n"
            stack.enter_context(HostDaemon(host, declared, node_name=host.name, etcd=etcd, **own))
            ids = f"router id 10.77.0.{number};\nprotocol device {{}}\n"
            lab.start_bird(host, ids + bfd(number))
        start_backends(lab.backends, lab.hosts, lab.start_bird)
        wait_until(lab.who_answers, "nobody answers", 30)
        wait_until(lambda: len(lab.keys("announce/hosts/")) == 2, "both can hold it", 30)
        flows = stack.enter_context(Flows(lab.client, LAN_VIP))
        assert report_outcomes("before", flows.ask()) == 1000
        holder = lab.known()
        dying = next(host for host in lab.hosts if host.name == holder)
        dying.run("nft", "-f", "-", text=CUT)
        wait_until(lambda: lab.known() not in ("", holder), "the other host took over", SOON)
        assert report_outcomes(f"{holder}, which held the address, dies", flows.ask()) >= 990
