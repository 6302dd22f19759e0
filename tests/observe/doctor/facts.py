"""Facts of a host that is well, for tests that change one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vipd import __version__
from vipd.host.settings.settings import Settings
from vipd.model.service import Family, Protocol
from vipd.observe.doctor.diagnosis import diagnose
from vipd.observe.doctor.facts import (
    Daemon,
    Facts,
    HostAddress,
    Kernel,
    Link,
    Network,
    Program,
    Programs,
    Route,
    ServedPort,
    StateDir,
)
from vipd.observe.doctor.finding import Severity
from vipd.observe.doctor.rules import Ruleset

SAVED = """*filter
:FORWARD DROP [0:0]
:VIPD-FORWARD - [0:0]
-A FORWARD -m comment --comment "vipd translated flows" -j VIPD-FORWARD
-A VIPD-FORWARD -m conntrack --ctstate DNAT -m connmark --mark 0x2000/0x2000 -j ACCEPT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:VIPD-PREROUTING - [0:0]
-A PREROUTING -m comment --comment "vipd services" -j VIPD-PREROUTING
COMMIT
"""
"""A FORWARD policy DROP, which vipd's rules bear."""

WEB = ServedPort(
    "web", Family.IPV4, Protocol.TCP, 80, ("10.96.0.10",), 30080, (("10.244.0.11", 8080),), affinity=True
)

KERNEL: dict[str, str] = {
    "net/ipv4/ip_forward": "1",
    "net/netfilter/nf_conntrack_tcp_be_liberal": "1",
    "net/netfilter/nf_conntrack_count": "10",
    "net/netfilter/nf_conntrack_max": "1000",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/eth1/rp_filter": "2",
}
STATUS: dict[str, Any] = {
    "state": "in-sync",
    "message": "",
    "version": __version__,
    "last_apply": "2024-01-01T00:00:00Z",
    "warnings": [],
}
NETWORK = Network(
    (Link("lo"), Link("eth1")),
    (HostAddress("127.0.0.1", 8, "lo"), HostAddress("10.244.0.1", 24, "eth1")),
    {"10.96.0.10": Route("eth1"), "10.244.0.11": Route("eth1")},
)
PROGRAMS = Programs(
    "6.1",
    (
        Program(Family.IPV4, "iptables v1.8.9 (nf_tables)", "nft"),
        Program(Family.IPV6, "ip6tables v1.8.9 (nf_tables)", "nft"),
    ),
    "nftables v1.0.6",
)


def well(**different: Any) -> Facts:
    """A host with one service, all well but for what is said."""
    facts: dict[str, Any] = {
        "settings": Settings(),
        "services": (WEB,),
        "programs": PROGRAMS,
        "rulesets": (Ruleset.of(Family.IPV4, "nft", SAVED),),
        "kernel": Kernel(KERNEL, {"drop": 0, "insert_failed": 0}, affinity_limit=4095),
        "network": NETWORK,
        "daemon": Daemon(STATUS, prefix_in_use=True, vipctl=__version__),
        "state": StateDir("/var/lib/vipd"),
    }
    return Facts(**(facts | different))


def judged(facts: Facts) -> dict[str, str]:
    """Id -> severity of what is not in order."""
    findings = diagnose(facts).findings
    return {f.id: str(f.severity) for f in findings if f.severity is not Severity.OK}


def hold(root: Path, *prefixes: str) -> None:
    """Have vipds with these prefixes at work in the network namespace of what stands for `/`."""
    namespace, lines = (root / "proc/self/ns/net").stat().st_ino, []
    for prefix in prefixes:
        path = root / f"run/vipd/netns-{namespace}-{prefix}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("7\n")
        lines.append(f"1: FLOCK  ADVISORY  WRITE 7 00:19:{path.stat().st_ino} 0 EOF\n")
    (root / "proc/locks").write_text("".join(lines))
