"""The lab: a client, the host that balances, and backends, each a network namespace.

    client 10.10.0.2 ---- 10.10.0.1 host 10.244.0.1 ---- bridge ---- b1 10.244.0.11, b2 10.244.0.12, ...
           fd00:10::2     fd00:10::1    fd00:244::1                     fd00:244::11, fd00:244::12, ...

The client's default route is the host. Nothing outside these namespaces is read, changed or sent to; an
`uplink` without a cable drops what the host sends elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.lab.flow import COMMAND_SECONDS
from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.waiting import wait_until

CLIENT_SOURCES = ("10.10.0.2", "10.10.0.3", "10.10.0.4", "10.10.0.5")
"""IPv4 addresses of the client; the first is the one used unless asked otherwise."""
CLIENT_SOURCES_IPV6 = ("fd00:10::2", "fd00:10::3", "fd00:10::4", "fd00:10::5")
CLUSTER_CIDRS = ("10.244.0.0/24", "fd00:244::/64")
HOST_TOWARDS_BACKENDS = {4: "10.244.0.1", 6: "fd00:244::1"}
"""What a backend sees as the source of a masqueraded flow."""
UPLINK = {4: "192.0.2.2", 6: "fd00:99::2"}
"""The host's own addresses: the source of flows that a process on the host makes."""

STARTING_SYSCTLS = (
    # Every ICMP refusal is sent at once, and replies take the paths of this lab.
    "net.ipv4.icmp_ratelimit=0",
    "net.ipv6.icmp.ratelimit=0",
    # No limit of 50 at a time either: older kernels count it over all namespaces.
    "net.ipv4.icmp_ratemask=0",
    "net.ipv6.icmp.ratemask=255",
    "net.ipv4.conf.all.send_redirects=0",
    "net.ipv4.conf.default.send_redirects=0",
    "net.ipv6.conf.all.accept_redirects=0",
    "net.ipv6.conf.default.accept_redirects=0",
    # A new namespace inherits IPv4 settings of the machine; these make all machines alike.
    "net.ipv4.ip_forward=0",
    "net.ipv4.conf.all.rp_filter=0",
    "net.ipv4.conf.default.rp_filter=0",
    "net.ipv6.conf.all.disable_ipv6=0",
    "net.ipv6.conf.default.disable_ipv6=0",
    "net.ipv6.conf.all.accept_dad=0",
    "net.ipv6.conf.default.accept_dad=0",
    "net.ipv6.conf.all.forwarding=0",
)


@dataclass(frozen=True)
class Wiring:
    backends: int = 3
    backend_routes: bool = True
    """Backends reach other networks through the host. Without, only masqueraded flows get replies."""
    backends_apart: bool = False
    """Backends reach each other through the host too, as pods do on many Kubernetes networks, not by the
    bridge alone: a reply from one to another then passes where it can be translated back."""
    host_route: bool = True
    """The host has a default route, so that its own processes can try any address."""
    bridge_netfilter: bool = False
    """Bridged packets pass iptables too (only where the kernel has br_netfilter)."""
    port_hairpin: bool = False
    """The bridge may send a frame back out of the port it came from."""


class Lab:
    """Builds the namespaces on entry; on exit ends all processes in them and deletes them."""

    def __init__(self, wiring: Wiring | None = None) -> None:
        if os.geteuid() != 0:
            raise PermissionError("the lab needs root for network namespaces; run: sudo bash tests/run.sh")
        self.wiring = wiring or Wiring()
        prefix = new_prefix()
        self.client = Node(f"{prefix}-client", "client", CLIENT_SOURCES[0], CLIENT_SOURCES_IPV6[0])
        self.host = Node(f"{prefix}-host", "host", "10.10.0.1", "fd00:10::1")
        self.backends = tuple(
            Node(f"{prefix}-b{n}", f"b{n}", f"10.244.0.{10 + n}", f"fd00:244::{10 + n}")
            for n in range(1, self.wiring.backends + 1)
        )

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.client, self.host, *self.backends)

    def serve_everywhere(self, *ports: int) -> None:
        """Start a TCP and UDP server on these ports of every backend."""
        for backend in self.backends:
            backend.serve(tcp=ports, udp=ports)

    def __enter__(self) -> Lab:
        try:
            ip_batch(f"netns add {node.namespace}" for node in self.nodes)
            for node in self.nodes:
                node.run("sysctl", "-qw", *STARTING_SYSCTLS)
            ip_batch(self._wire_host(), self.host.namespace)
            self._set_bridge_netfilter()
            ip_batch(self._wire_client(), self.client.namespace)
            for backend in self.backends:
                ip_batch(self._wire_backend(backend), backend.namespace)
            self._wait_for_links()
        except BaseException:
            self.delete()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def delete(self) -> None:
        """End what runs in the lab and delete its namespaces; safe to call twice."""
        delete_nodes(*self.nodes)

    def _wire_host(self) -> Iterator[str]:
        yield "link set lo up"
        yield "link add cluster type bridge mcast_snooping 0"
        yield from address_commands("cluster", "10.244.0.1/24", "fd00:244::1/64")
        if self.wiring.host_route:
            # A bridge without ports drops all packets. Every kernel has bridges, not every one dummy devices.
            yield "link add uplink type bridge"
            yield from address_commands("uplink", f"{UPLINK[4]}/24", f"{UPLINK[6]}/64")
            yield "route add default via 192.0.2.1"
            yield "route add ::/0 via fd00:99::1 dev uplink"
            # Without an entry the sender gets an error, seconds later: the neighbour does not answer.
            for gateway in ("192.0.2.1", "fd00:99::1"):
                yield f"neighbour add {gateway} lladdr 02:00:00:00:00:99 dev uplink"
        yield f"link add clients type veth peer name eth0 netns {self.client.namespace}"
        yield from address_commands("clients", "10.10.0.1/24", "fd00:10::1/64")
        for backend in self.backends:
            name = backend.name
            yield f"link add {name} type veth peer name eth0 netns {backend.namespace}"
            yield f"link set {name} master cluster up"
            if self.wiring.port_hairpin:
                yield f"link set {name} type bridge_slave hairpin on"

    def _set_bridge_netfilter(self) -> None:
        # Absent where br_netfilter is not loaded, which is the same as off.
        settings = [
            f"net.bridge.bridge-nf-call-{family}={int(self.wiring.bridge_netfilter)}"
            for family in ("iptables", "ip6tables")
        ]
        self.host.run("sysctl", "-qw", *settings, check=self.wiring.bridge_netfilter)

    def _wire_client(self) -> Iterator[str]:
        yield "link set lo up"
        sources = [f"{a}/24" for a in CLIENT_SOURCES] + [f"{a}/64" for a in reversed(CLIENT_SOURCES_IPV6)]
        yield from address_commands("eth0", *sources)
        yield "route add default via 10.10.0.1"
        yield f"route add ::/0 via fd00:10::1 src {CLIENT_SOURCES_IPV6[0]}"

    def _wait_for_links(self) -> None:
        """Return once every device is up: the kernel loses packets sent before that."""
        cables = {node.namespace: {"eth0"} for node in (self.client, *self.backends)}
        cables[self.host.namespace] = {"clients", "cluster", *(backend.name for backend in self.backends)}

        def all_up() -> bool:
            for namespace in tuple(cables):
                cables[namespace] -= links_up(namespace, cables[namespace])
                if not cables[namespace]:
                    del cables[namespace]
            return not cables

        wait_until(all_up, lambda: f"links do not come up: {cables}", COMMAND_SECONDS)

    def _wire_backend(self, backend: Node) -> Iterator[str]:
        yield "link set lo up"
        v4_length, v6_length = (32, 128) if self.wiring.backends_apart else (24, 64)
        yield from address_commands("eth0", f"{backend.ipv4}/{v4_length}", f"{backend.ipv6}/{v6_length}")
        if self.wiring.backends_apart:
            for gateway in HOST_TOWARDS_BACKENDS.values():
                yield f"route add {gateway} dev eth0"
        if self.wiring.backend_routes:
            yield f"route add default via {HOST_TOWARDS_BACKENDS[4]}"
            yield f"route add ::/0 via {HOST_TOWARDS_BACKENDS[6]}"


def links_up(namespace: str, devices: Iterable[str]) -> set[str]:
    """Those of a namespace's devices that are up. Each is asked for by its name: then the kernel looks at its
    cable at once, and else once in a second."""
    questions = "\n".join(f"link show dev {device}" for device in devices)
    lines = _ip(["-n", namespace, "-o", "-batch", "-"], questions).splitlines()
    return {line.split(": ")[1].partition("@")[0] for line in lines if " state UP " in line}


def add_addresses(namespace: str, device: str, *addresses: str) -> None:
    ip_batch(address_commands(device, *addresses), namespace)


def address_commands(device: str, *addresses: str) -> Iterator[str]:
    """The commands of `ip` that give a device its addresses, usable at once, and bring it up."""
    for address in addresses:
        yield f"address add {address} dev {device}{' nodad' if ':' in address else ''}"
    yield f"link set {device} up"


def delete_nodes(*nodes: Node) -> None:
    """End what runs in these namespaces, and delete those that exist."""
    for node in nodes:
        node.kill()
    with contextlib.suppress(RuntimeError):
        _ip(["-force", "-batch", "-"], "\n".join(f"netns delete {node.namespace}" for node in nodes))


def ip(*argv: str) -> None:
    _ip(argv)


def ip_batch(commands: Iterable[str], namespace: str = "") -> None:
    """Have one `ip` run all commands, in a namespace if one is named: a process for each would be most of
    the time that a lab takes. RuntimeError with its error message at the first that fails."""
    _ip([*(["-n", namespace] if namespace else []), "-batch", "-"], "\n".join(commands))


def _ip(argv: Sequence[str], text: str = "") -> str:
    done = subprocess.run(
        ["ip", *argv], input=text, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(argv)}: {done.stderr.strip()}\n{text}".rstrip())
    return done.stdout
