"""Two networks of two hosts whose parts can be made to fail and to return: behind a router, and on a LAN.

Each says what clients' next device sends packets to, and keeps the history of that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from tests.announce.lan_network import ANSWER_LOG, CLIENT, TwoArmedLab
from tests.announce.lan_network import VIP as LAN_VIP
from tests.announce.routed_lab import HOP, VIP, RoutedLab, address
from tests.fleet.network import HostDaemon
from tests.lab.daemon import Daemon
from tests.lab.node import Node
from tests.lab.waiting import wait_until
from tests.sources.etcd.members import Cluster, Member, install

SERVICE = """
- name: web{port}
  external_addresses: [{vip}]
  ports: 80:{port}
  backends: [10.20.0.11, 10.20.0.12]
  check: {{type: tcp, interval: 0.5s, fall: 2}}
  masquerade: always
  announce: {by}
"""
SETTINGS: dict[str, object] = {
    "announce_addresses": ["203.0.113.0/24", "10.77.0.0/24"],
    "announce_withdraw_after": 1,
    "announce_return_after": 3,
    "announce_preempt_after": 0,
}
PORTS = range(8080, 8092)
"""Of each backend; each cell of a matrix uses another one."""
ASKED_SECONDS = 0.5
"""A host that has not answered for so long, of queries each 10 ms, does not answer."""
Undo = Callable[[], object]


class Fault(NamedTuple):
    """A part that fails. `host` 0: one that hosts share."""

    part: str
    host: int = 0

    def __str__(self) -> str:
        return f"{self.part}{self.host or ''}"


class FaultyNetwork(ABC):
    """Two hosts with vipd, two backends, an etcd, a client. A context manager."""

    client: Node
    daemons: dict[int, Daemon]
    backends: list[Node]
    member: Member
    vip: str

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._cells = 0

    def __enter__(self) -> Self:
        try:
            self._build(self._stack)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def forget_verdicts(self) -> None:
        """Another service with other ports of the backends takes the address: no daemon holds those down for
        what earlier faults did to them."""
        self._cells += 1
        for daemon in self.daemons.values():
            # A host that was away may still be without its etcd: then no reload is complete.
            wait_until(partial(self._declared, daemon), "the other service is declared", 30)

    def _declared(self, daemon: Daemon) -> bool:
        with contextlib.suppress(AssertionError):
            daemon.declare(self._declaration())
            return True
        return False

    def _declaration(self) -> str:
        by = "routes" if self.vip == VIP else "l2"
        return SERVICE.format(vip=self.vip, by=by, port=PORTS[self._cells % len(PORTS)])

    def begin(self, fault: Fault) -> Undo:
        begin = getattr(self, f"_{fault.part}")
        undo: Undo = begin(fault.host) if fault.host else begin()
        return undo

    @abstractmethod
    def _build(self, stack: contextlib.ExitStack) -> None:
        """Start everything."""

    @abstractmethod
    def reaches(self) -> frozenset[int]:
        """The hosts that packets for the address are sent to now."""

    @abstractmethod
    def history(self) -> list[tuple[float, frozenset[int]]]:
        """Each change of that, with its time on the monotonic clock."""

    @abstractmethod
    def port(self, host: int) -> tuple[Node, str]:
        """The far end of the cable by which clients reach a host."""

    @abstractmethod
    def inner_port(self, host: int) -> tuple[Node, str]:
        """The far end of the cable by which a host reaches the backends."""

    @abstractmethod
    def _router(self) -> Undo:
        """What is between clients and hosts."""

    def has_route(self, host: int) -> bool:
        table = self.daemons[host].host.run("ip", "route", "show", "table", "86", check=False).stdout
        return self.vip in table

    def _link(self, host: int) -> Undo:
        return self._unplug(*self.port(host))

    def _lan(self, host: int) -> Undo:
        return self._unplug(*self.inner_port(host))

    @staticmethod
    def _unplug(node: Node, device: str) -> Undo:
        node.run("ip", "link", "set", device, "down")
        return lambda: node.run("ip", "link", "set", device, "up")

    def _killed(self, host: int) -> Undo:
        self.daemons[host].kill()
        return self.daemons[host].start

    def _stopped(self, host: int) -> Undo:
        self.daemons[host].stop()
        return self.daemons[host].start

    def _paused(self, host: int) -> Undo:
        pid = int(self.daemons[host].status()["pid"])
        os.kill(pid, signal.SIGSTOP)
        return lambda: os.kill(pid, signal.SIGCONT)

    def _etcd(self) -> Undo:
        """It hangs: connections are taken and nothing is answered."""
        self.member.signal(signal.SIGSTOP)
        return lambda: self.member.signal(signal.SIGCONT)

    def _backends(self) -> Undo:
        for backend in self.backends:
            backend.kill()
        return lambda: [backend.serve(tcp=PORTS) for backend in self.backends]


class RoutedNetwork(FaultyNetwork):
    """Hosts with BIRD behind a router with BIRD; etcd on the backends' network, 10.20.0.254."""

    vip = VIP

    def _build(self, stack: contextlib.ExitStack) -> None:
        install()
        self.lab = stack.enter_context(RoutedLab())
        self.client, self.backends = self.lab.client, list(self.lab.backends.values())
        for backend in self.backends:
            backend.kill()  # what the lab has started
            backend.serve(tcp=PORTS)
        address(self.lab.lan, "lan", "10.20.0.254/24")
        self.member = Member(self.lab.directory, "m0", (2379, 2380))
        self.member.url = "http://10.20.0.254:2379"
        stack.callback(self.member.stop)
        with self.lab.lan.entered():
            Cluster([self.member]).start()
        self.lab.router.run("sysctl", "-qw", *(f"net.ipv6.conf.h{n}.keep_addr_on_down=1" for n in HOP))
        etcd = {"endpoints": [self.member.url], "report_interval": 1}
        self.daemons = {
            number: stack.enter_context(
                Daemon(host, self._declaration(), node_name=host.name, etcd=etcd, **SETTINGS)
            )
            for number, host in self.lab.hosts.items()
        }
        log = stack.enter_context((self.lab.directory / "routes.log").open("w"))
        self._log = Path(log.name)
        self.lab.router.start("ip", "-o", "-ts", "monitor", "route", stdout=log)
        self.lab.start_router()
        for number in self.lab.hosts:
            self.lab.announce_with(number, "bird")

    def reaches(self) -> frozenset[int]:
        return frozenset(self.lab.next_hops())

    def history(self) -> list[tuple[float, frozenset[int]]]:
        offset = time.monotonic() - time.time()
        found = []
        for line in self._log.read_text().splitlines():
            stamp, _, route = line.partition("] ")
            if f"{VIP} " not in route:
                continue
            hosts = frozenset(n for n, hop in HOP.items() if f"via {hop} " in route)
            at = time.mktime(time.strptime(stamp[1:20], "%Y-%m-%dT%H:%M:%S")) + float(f"0{stamp[20:]}")
            found.append((at + offset, frozenset() if route.startswith("Deleted") else hosts))
        return found

    def port(self, host: int) -> tuple[Node, str]:
        return self.lab.router, f"h{host}"

    def inner_port(self, host: int) -> tuple[Node, str]:
        return self.lab.lan, f"h{host}"

    def _router(self) -> Undo:
        self.lab.kill_daemon("router-bird")
        return self.lab.start_router


class LanNetwork(FaultyNetwork):
    """Hosts of one LAN, on which the etcd is, too; the backends are on another one."""

    vip = LAN_VIP

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def _build(self, stack: contextlib.ExitStack) -> None:
        self.lab = TwoArmedLab(self._root)
        stack.enter_context(self.lab)
        self.client, self.backends = self.lab.client, self.lab.backends
        (self.member,) = self.lab.etcd.members
        for backend in self.backends:
            backend.serve(tcp=PORTS)
        etcd = {"endpoints": list(self.lab.etcd.urls), "report_interval": 1}
        self.daemons = {
            number: stack.enter_context(
                HostDaemon(host, self._declaration(), node_name=host.name, etcd=etcd, **SETTINGS)
            )
            for number, host in enumerate(self.lab.hosts, 1)
        }
        log = stack.enter_context((self._root / "answers.log").open("w"))
        self._log = Path(log.name)
        self.lab.client.start("python3", str(ANSWER_LOG), LAN_VIP, CLIENT, stdout=log)
        self._names = {self.lab.hardware(host): number for number, host in enumerate(self.lab.hosts, 1)}
        wait_until(lambda: len(self.lab.keys("announce/hosts/")) == 2, "both can hold it", 30)

    def _answers(self) -> list[tuple[float, int]]:
        lines = self._log.read_text().splitlines()
        return [(float(line.split()[0]), self._names[line.split()[2]]) for line in lines if " " in line]

    def reaches(self) -> frozenset[int]:
        since = time.monotonic() - ASKED_SECONDS
        return frozenset(host for at, host in self._answers()[-100:] if at > since)

    def history(self) -> list[tuple[float, frozenset[int]]]:
        found = list[tuple[float, frozenset[int]]]()
        for at, host in self._answers():
            if not found or found[-1][1] != {host}:
                found.append((at, frozenset({host})))
        return found

    def port(self, host: int) -> tuple[Node, str]:
        return self.lab.hub, f"h{host}"

    def inner_port(self, host: int) -> tuple[Node, str]:
        return self.lab.inner, f"h{host}"

    def _router(self) -> Undo:
        """The switch of the LAN."""
        return self._unplug(self.lab.hub, "bridge")
