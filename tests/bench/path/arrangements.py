"""The subjects that are compared, each ready in a lab of its own, so that rounds go from one to the next."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.path.programs import CpuClock, Programs, pids_of
from tests.bench.path.proxies import start_haproxy, start_nginx
from tests.bench.path.rules import BACKENDS, load_iptables, load_kube_proxy_nft, load_nftables, vip
from tests.lab.node import Node
from tests.lab.topology import Lab, Wiring, ip
from tests.lab.waiting import wait_until

Install = Callable[[Node, int, Path], object]
"""Makes a subject work in the host's namespace, with so many services, by files in that directory."""

TUNING = {
    "client": ("net.ipv4.ip_local_port_range=1024 65535",),
    "host": ("net.ipv4.ip_local_port_range=1024 65535", "net.ipv4.tcp_tw_reuse=1", "net.core.somaxconn=4096"),
    "backend": ("net.core.somaxconn=4096",),
}
"""Limits that would be the bottleneck otherwise."""
TRACKING = (
    "net.netfilter.nf_conntrack_tcp_be_liberal=1",  # vipd sets it
    "net.netfilter.nf_conntrack_tcp_timeout_close=1",
    "net.netfilter.nf_conntrack_tcp_timeout_time_wait=1",
)

RESET_FLOW_SECONDS, FEW_FLOWS = 11.0, 100
"""IPVS keeps a flow that was reset for 10 s, the few that ended otherwise for minutes."""

KEPT_AT = 1_000
"""Services beside which kept connections are measured: no rule is asked about their packets."""

NO_VIP = ", no VIP"

TRACKING_RULE = """table ip tracked {
    chain forward { type filter hook forward priority 0; policy accept; ct state invalid counter; }
}
"""
ONE_RULE = f"""table ip one {{
    chain prerouting {{
        type nat hook prerouting priority -100; policy accept;
        ip daddr {vip(0)} dnat to {BACKENDS[0]}
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    install: Install | None
    by_kernel: bool = True
    """Packets are forwarded, not taken in by a proxy."""
    scales: bool = True
    """It has services, of which there can be many."""
    always_with: int | None = None
    """The one number of services with which it is measured, where others would tell nothing more."""
    has_vip: bool = True
    udp: bool = True
    ipvs: bool = False
    """Its flows are those of IPVS."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    subject: Subject
    services: int | None
    lab: Lab
    clock: CpuClock

    @property
    def targets(self) -> dict[str, str]:
        """What is asked, as the end of a row's name: nothing means the last VIP, or the backend itself where
        there is no VIP."""
        direct = self.lab.backends[0].ipv4
        if not self.subject.has_vip:
            return {"": direct}
        if self.services is None:
            return {"": vip(0)}
        beside = {NO_VIP: direct} if self.subject.by_kernel else {}
        return {"": vip(self.services - 1), **beside}

    @property
    def target(self) -> str:
        """The address of the last VIP; of the backend where there is no VIP."""
        return self.targets[""]

    def forget_flows(self) -> None:
        """Empty the connection tracking of the lab's host, so that no run pays for the one before."""
        if self.subject.by_kernel and self.subject.install:
            self.lab.host.run("conntrack", "-F")
        if self.subject.ipvs:
            # No command empties its table. To look at it all the time would cost more than to wait.
            time.sleep(RESET_FLOW_SECONDS)
            wait_until(self._has_few_ipvs_flows, "IPVS forgets its flows")

    def _has_few_ipvs_flows(self) -> bool:
        return self.lab.host.run("cat", "/proc/net/ip_vs_conn").stdout.count("\n") < FEW_FLOWS


def _nft(text: str) -> Install:
    return lambda host, services, directory: host.run("nft", "-f", "-", text=text)


def _iptables(variant: str, compat: str) -> Install:
    return lambda host, services, directory: load_iptables(host, services, variant, compat)


def _nftables(masquerade: str) -> Install:
    return lambda host, services, directory: load_nftables(host, services, masquerade)


DIRECT = Subject("direct", None, scales=False, has_vip=False)
TRACKED = Subject("direct, tracked", _nft(TRACKING_RULE), scales=False, has_vip=False)
SUBJECTS = (
    TRACKED,
    Subject("one DNAT rule", _nft(ONE_RULE), scales=False),
    Subject("vipd nftables", _nftables("auto")),
    Subject("vipd nftables, masquerade", _nftables("forwarded"), always_with=KEPT_AT),
    Subject("vipd iptables grouped (nft)", _iptables("nft", "none")),
    Subject("vipd iptables grouped (legacy)", _iptables("legacy", "none")),
    Subject("vipd iptables flat (nft)", _iptables("nft", "kube-proxy")),
    Subject("vipd iptables flat (legacy)", _iptables("legacy", "kube-proxy")),
    Subject("kube-proxy's nftables table", lambda host, services, _: load_kube_proxy_nft(host, services)),
    Subject("haproxy", start_haproxy, by_kernel=False, udp=False),
    Subject("nginx stream", start_nginx, by_kernel=False),
)


def arrange(
    subject: Subject, services: int | None, programs: Programs, stack: contextlib.ExitStack
) -> Arrangement:
    """Build the lab, start the servers and install the subject; all ends with `stack`."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vipd-path-")))
    lab = stack.enter_context(Lab(Wiring(backends=1)))
    stack.callback(_end_programs, lab)
    backend = lab.backends[0]
    for address in BACKENDS[1:]:
        ip("-n", backend.namespace, "address", "add", f"{address}/24", "dev", "eth0")
    for node, kind in ((lab.client, "client"), (lab.host, "host"), (backend, "backend")):
        node.run("sysctl", "-qw", *TUNING[kind])
    lab.host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", *TRACKING)
    programs.serve(backend)
    if subject.install:
        subject.install(lab.host, services or 0, directory)
    return Arrangement(subject, services, lab, CpuClock(pids_of(lab.host, backend)))


def _end_programs(lab: Lab) -> None:
    """At once: the lab itself would wait a second for each that does not end with its input."""
    for node in lab.nodes:
        for process in node.started:
            process.kill()


def arrangements(sizes: tuple[int, ...]) -> Iterator[tuple[Subject, int | None]]:
    for subject in SUBJECTS:
        own = (subject.always_with,) if subject.always_with else sizes
        yield from ((subject, size) for size in (own if subject.scales else (None,)))


def delivered(arrangement: Arrangement) -> int:
    counter = "/sys/class/net/eth0/statistics/rx_packets"
    return int(arrangement.lab.backends[0].run("cat", counter).stdout)
