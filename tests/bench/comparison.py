"""The table of README.md: vipd beside what one would use instead. Facts stand here; figures are results.

Sources: docs/migration.md for kube-proxy, keepalived and HAProxy; for Cilium
https://docs.cilium.io/en/stable/network/kubernetes/kubeproxy-free/ and the pages on announcements beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.bench.comparators import KUBE_PROXY_NFT
from tests.bench.programming import GROUP, ONE_CHANGE
from tests.bench.record import Record
from tests.bench.tables import brief, table

NOT_MEASURED = "not measured"
APART = "[apart](docs/performance.md#ipvs-beside-vipd)"
"""A figure of another machine, which has no place in a row of this one."""
SIZES = (1_000, 10_000)
NO_BREAK = "&nbsp;"
"""A figure stays in one line with its unit."""

TITLES = (
    "",
    "vipd",
    "[kube-proxy](docs/migration.md#kube-proxy)",
    "[IPVS, keepalived](docs/migration.md#keepalived-and-ipvsadm)",
    "[HAProxy](docs/migration.md#haproxy-in-tcp-mode)",
    "[Cilium](https://docs.cilium.io/en/stable/network/kubernetes/kubeproxy-free/)",
)
CILIUM_SERVICES = "Kubernetes, or a file of its objects"
NO_UDP = "TCP, [no general UDP](https://github.com/haproxy/haproxy/issues/62)"
FACTS = (
    ("services come from", "files, `vipctl`, etcd", "Kubernetes", "a file", "a file", CILIUM_SERVICES),
    ("packets pass", "kernel: nftables, iptables", "the same", "kernel: IPVS", "a process", "kernel: eBPF"),
    ("protocols", "TCP, UDP, SCTP", "TCP, UDP, SCTP", "TCP, UDP, SCTP", NO_UDP, "TCP, UDP"),
    ("health checks", "its own", "the kubelet's", "its own", "its own", "the kubelet's"),
    ("direct return (DSR)", "no", "no", "yes", "no", "yes"),
    ("announces addresses", "ARP, NDP; routes for BGP, OSPF", "no", "VRRP", "no", "ARP, BGP"),
    ("HTTP, TLS", "no", "no", "no", "yes", "yes"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of several subjects; for each column those that stand for it, with what tells them apart."""

    title: str
    group: str
    what: str
    columns: Sequence[Sequence[tuple[str, str]]]


COMPARISONS = (
    Comparison(
        "new connections a second",
        "path",
        "connections, part of direct",
        (
            (("vipd nftables", "nftables"), ("vipd iptables grouped (nft)", "iptables")),
            (
                ("vipd iptables flat (nft)", "iptables"),
                ("vipd iptables flat (legacy)", "legacy"),
                ("kube-proxy's nftables table", "nftables"),
            ),
            (("", APART),),
            (("haproxy", ""),),
            (),
        ),
    ),
    Comparison(
        "one backend replaced",
        GROUP,
        ONE_CHANGE,
        (
            (("vipd nftables", "nftables"), ("vipd iptables-nft", "iptables")),
            (
                ("one iptables-restore, nft", "iptables"),
                ("one iptables-restore, legacy", "legacy"),
                (KUBE_PROXY_NFT, "nftables"),
            ),
            (("", APART),),
            (),
            (),
        ),
    ),
)


def compared(record: Record) -> list[str]:
    return table(TITLES, [*FACTS, *_figures(record)])


def _figures(record: Record) -> Iterator[Sequence[str]]:
    for each in COMPARISONS:
        found = {
            (row.subject, row.services): brief(row)
            for row in record.rows(each.group)
            if row.what == each.what
        }
        for size in SIZES if found else ():
            cells = (
                [(found.get((subject, size), NOT_MEASURED if subject else ""), v) for subject, v in subjects]
                for subjects in each.columns
            )
            yield f"{each.title}, {size:,} services", *map(_cell, cells)


def _cell(figures: Iterable[tuple[str, str]]) -> str:
    each = (f"{variant} {figure}".strip().replace(" ", NO_BREAK) for figure, variant in figures)
    return "<br>".join(each) or NOT_MEASURED
