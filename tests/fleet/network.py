"""Hosts on one network with an etcd: each a namespace, joined by a bridge in the namespace of the etcd.

hub 10.77.0.254, etcd on 2379 ---- bridge ---- h1 10.77.0.1, h2 10.77.0.2, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from tests.lab.daemon import Daemon
from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.topology import STARTING_SYSCTLS, add_addresses, delete_nodes, ip
from tests.sources.etcd.members import Cluster, Member, install

HUB = "10.77.0.254"
FLEET_SECONDS = 90.0
"""Limit for a change to reach another host: a host may wait 30 seconds before it retries etcd."""

NONE: Mapping[str, Any] = MappingProxyType({})


class HostDaemon(Daemon):
    """A daemon that receives changes through etcd: its waits have a longer limit."""

    def wait_until(
        self, value: Callable[[], object], expected: object, timeout: float = FLEET_SECONDS
    ) -> None:
        """As for any daemon, with a limit for changes from other hosts."""
        super().wait_until(value, expected, timeout)


class FleetLab:
    """The namespaces, with one etcd running in the hub. A context manager; ended and deleted on exit."""

    def __init__(self, root: Path, hosts: int) -> None:
        prefix = new_prefix()
        self.root = root
        self.hub = Node(f"{prefix}-hub", "hub", HUB, "")
        self.hosts = tuple(Node(f"{prefix}-h{n}", f"h{n}", f"10.77.0.{n}", "") for n in range(1, hosts + 1))
        self.etcd = self.server("m0", 2379)

    def server(self, name: str, port: int) -> Cluster:
        """An etcd for the hub, not started."""
        member = Member(self.root, name, (port, port + 1))
        member.url = f"http://{HUB}:{port}"
        return Cluster([member])

    def daemon(self, host: Node, settings: Mapping[str, Any] = NONE, /, **more: object) -> HostDaemon:
        """A daemon for a host that follows the etcd; not started. `more` are keys of its setting `etcd`."""
        etcd = {"endpoints": list(self.etcd.urls), "timeout": "20s", **more}
        return HostDaemon(host, node_name=host.name, log_level="info", etcd=etcd, **settings)

    def put(self, key: str, value: str) -> int:
        """Write a key below the prefix; the revision of that."""
        with self.hub.entered():
            return self.etcd.put(f"/vipd/v1/{key}", value)

    def delete(self, key: str) -> int:
        """Delete a key below the prefix, or with a final `*` all that begin so."""
        with self.hub.entered():
            return self.etcd.delete(f"/vipd/v1/{key}")

    def __enter__(self) -> FleetLab:
        install()
        try:
            self._wire()
            with self.hub.entered():
                self.etcd.start()
        except BaseException:
            self.delete_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete_all()

    def delete_all(self) -> None:
        """End etcd and what runs in the namespaces, and delete them."""
        self.etcd.stop()
        delete_nodes(*self.hosts, self.hub)

    def _wire(self) -> None:
        for node in (self.hub, *self.hosts):
            ip("netns", "add", node.namespace)
            node.run("sysctl", "-qw", *STARTING_SYSCTLS)
            ip("-n", node.namespace, "link", "set", "lo", "up")
        ip("-n", self.hub.namespace, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        add_addresses(self.hub.namespace, "bridge", f"{HUB}/24")
        for host in self.hosts:
            own, hub = host.namespace, self.hub.namespace
            ip("-n", hub, "link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", own)
            ip("-n", hub, "link", "set", host.name, "master", "bridge", "up")
            add_addresses(own, "eth0", f"{host.ipv4}/24")
