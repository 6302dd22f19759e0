"""A client, a router with BIRD, two hosts with vipd and a routing daemon each, and two backends.

    client 198.51.100.2 ---- router ---- 192.0.2.2 h1 10.20.0.1 ---- bridge ---- b1 10.20.0.11, b2 10.20.0.12
           2001:db8:1::2            |    fd00:1::2    fd00:20::1                 fd00:20::11, ...
                                    +--- 192.0.2.6 h2 10.20.0.2 ---- bridge
                                         fd00:2::2    fd00:20::2

The routing daemons are those of this machine's packages, with the configurations of examples/announce.
Nothing outside of these namespaces is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.lab.daemon import Daemon
from tests.lab.flow import Process, finish
from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.topology import STARTING_SYSCTLS, add_addresses, delete_nodes, ip
from tests.lab.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples" / "announce"
FRR = Path("/usr/lib/frr")
PROGRAMS = {
    "bird": ("bird", "bird2"),
    "frr": (str(FRR / "bgpd"), "frr"),
    "exabgp": ("exabgp", "exabgp"),
}
VIP, VIP6 = "203.0.113.10", "2001:db8::10"
SOON = 60.0
HOP, HOP6 = {1: "192.0.2.2", 2: "192.0.2.6"}, {1: "fd00:1::2", 2: "fd00:2::2"}


def require(*names: str) -> None:
    for name in names:
        program, package = PROGRAMS[name]
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            pytest.skip(f"{program} is missing: apt install {package}")


class RoutedLab:
    """Builds the namespaces on entry; on exit ends all processes in them and deletes them."""

    def __init__(self) -> None:
        prefix = new_prefix()
        self.client = Node(f"{prefix}-client", "client", "198.51.100.2", "2001:db8:1::2")
        self.router = Node(f"{prefix}-router", "router", "198.51.100.1", "2001:db8:1::1")
        self.hosts = {n: Node(f"{prefix}-h{n}", f"h{n}", HOP[n], HOP6[n]) for n in (1, 2)}
        self.lan = Node(f"{prefix}-lan", "lan", "", "")
        self.backends = {
            n: Node(f"{prefix}-b{n}", f"b{n}", f"10.20.0.1{n}", f"fd00:20::1{n}") for n in (1, 2)
        }
        self._directory = tempfile.TemporaryDirectory(prefix="vipd-bgp-")
        self.directory = Path(self._directory.name)
        self.directory.chmod(0o755)
        self._processes: dict[str, Process] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.client, self.router, self.lan, *self.hosts.values(), *self.backends.values())

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                ip("netns", "add", node.namespace)
                node.run("sysctl", "-qw", *STARTING_SYSCTLS)
                ip("-n", node.namespace, "link", "set", "lo", "up")
            self._wire()
        except BaseException:
            self.delete()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def delete(self) -> None:
        delete_nodes(*self.nodes)
        self._directory.cleanup()

    def _wire(self) -> None:
        router, lan = self.router, self.lan.namespace
        ip("-n", lan, "link", "add", "lan", "type", "bridge", "mcast_snooping", "0")
        ip("-n", lan, "link", "set", "lan", "up")
        cable(self.client, "eth0", router, "client")
        address(self.client, "eth0", "198.51.100.2/24", "2001:db8:1::2/64")
        address(router, "client", "198.51.100.1/24", "2001:db8:1::1/64")
        for number, host in self.hosts.items():
            cable(host, "eth0", router, f"h{number}")
            address(host, "eth0", f"{HOP[number]}/30", f"{HOP6[number]}/64")
            address(router, f"h{number}", f"{gateway(HOP[number])}/30", f"fd00:{number}::1/64")
            self._plug(host, f"10.20.0.{number}/24", f"fd00:20::{number}/64")
            default_route(host, gateway(HOP[number]), f"fd00:{number}::1")
        for number, backend in self.backends.items():
            self._plug(backend, f"10.20.0.1{number}/24", f"fd00:20::1{number}/64")
            backend.serve(tcp=(8080,), udp=(8080,))
        default_route(self.client, "198.51.100.1", "2001:db8:1::1")
        router.run(
            "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
            "net.ipv4.fib_multipath_hash_policy=1", "net.ipv6.fib_multipath_hash_policy=1",
        )  # fmt: skip

    def _plug(self, node: Node, *addresses: str) -> None:
        port = node.name
        cable(node, "lan0", self.lan, port)
        ip("-n", self.lan.namespace, "link", "set", port, "master", "lan")
        address(node, "lan0", *addresses)

    def start_router(self) -> None:
        self._bird(self.router, (EXAMPLES / "router-bird.conf").read_text())

    def start_bird(self, node: Node, text: str) -> None:
        self._bird(node, text)

    def announce_with(self, number: int, kind: str, *replaced: tuple[str, str]) -> None:
        """Start a host's routing daemon with the configuration of the examples, with texts `replaced`."""
        host = self.hosts[number]
        text = (EXAMPLES / f"{kind}.conf").read_text()
        if number == 2:
            for one, other in (
                ("192.0.2.1", "192.0.2.5"),
                ("192.0.2.2", "192.0.2.6"),
                ("fd00:1:", "fd00:2:"),
            ):
                text = re.sub(rf"{re.escape(one)}(?![0-9])", other, text)
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        {"bird": self._bird, "frr": self._frr, "exabgp": self._exabgp}[kind](host, text)

    def _start(self, name: str, node: Node, *argv: str) -> None:
        with (self.directory / f"{name}.log").open("a") as log:
            self._processes[name] = node.start(*argv, stdout=log, stderr=log)

    def _bird(self, node: Node, text: str) -> None:
        place = self.directory / node.name
        place.with_suffix(".conf").write_text(text)
        files = ("-c", f"{place}.conf", "-s", f"{place}.ctl", "-P", f"{place}.pid")
        self._start(f"{node.name}-bird", node, "bird", "-f", *files)

    def _frr(self, node: Node, text: str) -> None:
        place = Path(tempfile.mkdtemp(prefix="frr-", dir=self.directory))
        shutil.chown(place, "frr", "frr")
        split = text.index("router bgp")
        for name, part in (("zebra", text[:split]), ("bgpd", text[split:])):
            (place / f"{name}.conf").write_text(part)
            shutil.chown(place / f"{name}.conf", "frr", "frr")
        (place / "bfdd.conf").touch()
        for name, port in (("zebra", "2601"), ("bfdd", "2617"), ("bgpd", "2605")):
            control = ("--bfdctl", f"{place}/bfdd.ctl") if name == "bfdd" else ()
            files = ("-f", f"{place}/{name}.conf", "-i", f"{place}/{name}.pid", "-z", f"{place}/zserv")
            talk = ("-A", "127.0.0.1", "-P", port, "--vty_socket", str(place))
            self._start(f"{node.name}-{name}", node, str(FRR / name), *files, *talk, *control)
            wait_until((place / "zserv").exists, f"{name} listens", SOON)

    def _exabgp(self, node: Node, text: str) -> None:
        place = self.directory / f"{node.name}.conf"
        verb = f"{sys.executable} -m vipd.cli.main announce"
        place.write_text(text.replace("/usr/bin/vipctl announce", verb))
        pipes = self.directory / node.name
        pipes.mkdir()
        set_here = ("exabgp.daemon.drop=false", "exabgp.api.cli=false", "exabgp.daemon.user=root")
        path = ("PYTHONPATH=" + str(Path(__file__).parents[2]),)
        self._start(f"{node.name}-exabgp", node, "env", *set_here, *path, "exabgp", str(place))

    def kill_daemon(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        finish(process)

    def next_hops(self, vip: str = VIP) -> list[int]:
        family = "-6" if ":" in vip else "-4"
        shown = self.router.run("ip", family, "route", "show", vip, check=False).stdout
        hops = HOP6 if ":" in vip else HOP
        usable = "\n".join(line for line in shown.splitlines() if " dead" not in line)
        return sorted(n for n, hop in hops.items() if re.search(rf"via {re.escape(hop)}\b", usable))

    def logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in sorted(self.directory.glob("*.log")))

    def wait_next_hops(self, *hosts: int, vip: str = VIP, timeout: float = SOON) -> None:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.next_hops(vip) == sorted(hosts), f"{vip} by {hosts}", timeout)
            return
        raise AssertionError(f"{vip} is at {self.next_hops(vip)}, not {sorted(hosts)};\n{self.logs()}")


def gateway(hop: str) -> str:
    """The router's end of a host's cable."""
    first, _, last = hop.rpartition(".")
    return f"{first}.{int(last) - 1}"


def cable(one: Node, device: str, other: Node, its_device: str) -> None:
    peer = ("peer", "name", its_device, "netns", other.namespace)
    ip("link", "add", device, "netns", one.namespace, "type", "veth", *peer)
    ip("-n", other.namespace, "link", "set", its_device, "up")
    ip("-n", one.namespace, "link", "set", device, "up")


def address(node: Node, device: str, *addresses: str) -> None:
    add_addresses(node.namespace, device, *addresses)


def default_route(node: Node, *gateways: str) -> None:
    for hop in gateways:
        family = "-6" if ":" in hop else "-4"
        ip("-n", node.namespace, family, "route", "add", "default", "via", hop)


@contextlib.contextmanager
def both_serving(lab: RoutedLab, kinds: dict[int, str], **settings: object) -> Iterator[dict[int, Daemon]]:
    """vipd and a routing daemon on every host, with the declaration of the examples."""
    text = (EXAMPLES / "web.yaml").read_text()
    own = {"announce_addresses": ["203.0.113.0/24", "2001:db8::/64"], **settings}
    with contextlib.ExitStack() as stack:
        daemons = {
            n: stack.enter_context(Daemon(lab.hosts[n], text.split("services:\n")[1], **own)) for n in kinds
        }
        lab.start_router()
        for number, kind in kinds.items():
            lab.announce_with(number, kind)
        yield daemons
