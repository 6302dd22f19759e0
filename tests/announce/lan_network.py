"""A LAN with two or more hosts that share addresses, an etcd, a server, and a client that runs no vipd.

hub 10.77.0.254, etcd and a server on 8080 ---- bridge ---- h1 10.77.0.1, h2 10.77.0.2, client 10.77.0.200
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tests.announce.routed_lab import address, cable
from tests.fleet.network import FleetLab, HostDaemon
from tests.lab.node import Node
from tests.lab.topology import STARTING_SYSCTLS, add_addresses, delete_nodes, ip
from tests.lab.waiting import wait_until
from tests.sources.etcd.members import etcdctl

CLIENT = "10.77.0.200"
VIP = "10.77.0.100"
VIP6 = "fd77::100"
SERVER = "10.77.0.254:8080"
SERVE = """
import socket, threading
s = socket.create_server(('10.77.0.254', 8080), backlog=200)
def echo(c):
    with c:
        while data := c.recv(1000):
            c.sendall(data)
print('ready', flush=True)
while True:
    threading.Thread(target=echo, args=s.accept()[:1], daemon=True).start()
"""
ANSWER_LOG = Path(__file__).with_name("answer_log.py")


class Answer(NamedTuple):
    at: float
    """On the monotonic clock."""
    kind: str
    host: str


def holders(answers: Sequence[Answer]) -> list[tuple[str, float, float]]:
    """Who answered or announced, in turn: host, first and last time. A host that is named twice with another
    one between shows that both answered at once."""
    found = list[tuple[str, float, float]]()
    for answer in answers:
        if found and found[-1][0] == answer.host:
            found[-1] = (answer.host, found[-1][1], answer.at)
        else:
            found.append((answer.host, answer.at, answer.at))
    return found


class LanLab(FleetLab):
    """The namespaces. A context manager; ended and deleted on exit."""

    def __init__(self, root: Path, hosts: int = 2) -> None:
        super().__init__(root, hosts)
        prefix = self.hub.namespace.removesuffix("-hub")
        self.client = Node(f"{prefix}-cl", "client", CLIENT, "")
        self.every = (*self.hosts, self.client)

    def __enter__(self) -> LanLab:
        super().__enter__()
        self.server_process = self.hub.start("python3", "-c", SERVE)
        assert self.server_process.stdout
        assert self.server_process.stdout.readline() == "ready\n"
        return self

    def announcer(self, host: Node, addresses: Sequence[str] = (VIP,), **settings: object) -> HostDaemon:
        """A daemon that shares addresses with the others; not started."""
        listed = ", ".join(addresses)
        backends = [SERVER.split(":")[0], *(["fd77::254"] if ":" in listed else [])]
        declaration = (
            f"- {{name: web, external_addresses: [{listed}], ports: '80:8080', announce: l2,\n"
            f"   backends: [{', '.join(backends)}], masquerade: always}}\n"
        )
        etcd = {"endpoints": list(self.etcd.urls)}
        given = {"announce_addresses": ["10.77.0.0/24", "fd77::/64"], "announce_preempt_after": 0}
        return HostDaemon(host, declaration, node_name=host.name, etcd=etcd, **{**given, **settings})

    def keys(self, prefix: str) -> list[str]:
        """The keys in etcd that begin so, below vipd's prefix."""
        with self.hub.entered():
            listed = etcdctl(self.etcd.urls[0], "get", "--prefix", f"/vipd/v1/{prefix}", "--keys-only")
        return [line.removeprefix("/vipd/v1/") for line in listed.splitlines() if line]

    def hardware(self, node: Node) -> str:
        return node.run("cat", "/sys/class/net/eth0/address").stdout.strip()

    def forget(self, address: str = VIP) -> None:
        self.client.run("ip", "neigh", "del", address, "dev", "eth0", check=False)

    def who_answers(self, address: str = VIP, wait: float = 1.0) -> str:
        """The name of the host that answers the client's query now; empty: none does."""
        self.forget(address)
        self.client.run("ip", "neigh", "add", address, "dev", "eth0", "use")
        end = time.monotonic() + wait
        while time.monotonic() < end:
            if found := self.known(address):
                return found
            time.sleep(0.02)
        return ""

    def known(self, address: str = VIP) -> str:
        """The host that the client has in its neighbour table for an address."""
        line = self.client.run("ip", "neigh", "show", address, "dev", "eth0").stdout
        found = line.split("lladdr ")[1].split()[0] if "lladdr " in line else ""
        return self._names.get(found, found)

    @cached_property
    def _names(self) -> dict[str, str]:
        return {self.hardware(node): node.name for node in (*self.hosts, self.client, self.hub_port())}

    @contextmanager
    def answers(self, address: str = VIP) -> Iterator[list[Answer]]:
        """Asks for an address all the time, which a host answers for when the block begins; on exit the list
        holds every answer and announcement."""
        found = list[Answer]()
        with (self.root / f"answers-{time.monotonic()}").open("w+") as log:
            process = self.client.start("python3", str(ANSWER_LOG), address, CLIENT, stdout=log)
            wait_until(lambda: Path(log.name).stat().st_size > len("ready\n"), "an answer is logged", 30)
            yield found
            assert process.stdin
            process.stdin.close()
            process.wait(10)
            log.seek(0)
            for line in log:
                if line != "ready\n":
                    at, kind, hardware = line.split()
                    found.append(Answer(float(at), kind, self._names.get(hardware, hardware)))

    def hub_port(self) -> Node:
        return _Hub(self.hub)

    def delete_all(self) -> None:
        delete_nodes(self.client)
        super().delete_all()

    def _wire(self) -> None:
        super()._wire()
        own, hub = self.client.namespace, self.hub.namespace
        ip("netns", "add", own)
        self.client.run("sysctl", "-qw", *STARTING_SYSCTLS)
        ip("-n", own, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "client", "type", "veth", "peer", "name", "eth0", "netns", own)
        ip("-n", hub, "link", "set", "client", "master", "bridge", "up")
        add_addresses(own, "eth0", f"{CLIENT}/24")
        for number, node in enumerate((*self.hosts, self.client), 1):
            ip("-n", node.namespace, "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")


class TwoArmedLab(LanLab):
    """The hosts of a LAN with a second network, 10.20.0.0/24, in which the backends are."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        prefix = self.hub.namespace.removesuffix("-hub")
        self.inner = Node(f"{prefix}-in", "inner", "", "")
        self.backends = [Node(f"{prefix}-b{n}", f"b{n}", f"10.20.0.1{n}", "") for n in (1, 2)]

    def start_bird(self, node: Node, text: str) -> None:
        place = self.root / f"{node.name}.conf"
        place.write_text(text)
        with (self.root / f"{node.name}.log").open("w") as log:
            control = str(place.with_suffix(".ctl"))
            node.start("bird", "-f", "-c", str(place), "-s", control, stdout=log, stderr=log)

    def delete_all(self) -> None:
        delete_nodes(*self.backends, self.inner)
        super().delete_all()

    def _wire(self) -> None:
        super()._wire()
        for node in (self.inner, *self.backends):
            ip("netns", "add", node.namespace)
            node.run("sysctl", "-qw", *STARTING_SYSCTLS)
            ip("-n", node.namespace, "link", "set", "lo", "up")
        inner = self.inner.namespace
        ip("-n", inner, "link", "add", "lan", "type", "bridge", "mcast_snooping", "0")
        ip("-n", inner, "link", "set", "lan", "up")
        for node in (*self.hosts, *self.backends):
            cable(node, "lan0", self.inner, node.name)
            ip("-n", inner, "link", "set", node.name, "master", "lan")
            address(node, "lan0", f"10.20.0.{node.name.replace('h', '').replace('b', '1')}/24")


class _Hub(Node):
    def __init__(self, hub: Node) -> None:
        super().__init__(hub.namespace, hub.name, hub.ipv4, hub.ipv6, hub.started)

    def run(self, *argv: str, **more: object):  # type: ignore[no-untyped-def]
        return super().run(*[word.replace("eth0", "bridge") for word in argv], **more)  # type: ignore[arg-type]
