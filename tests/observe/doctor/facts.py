"""A host that is well as facts for `tests.lab.inside.judged`, and how a test says what is different."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import vipd
from tests.lab.inside import Finding, judged

Facts = dict[str, Any]
"""Plain values by name. The sections `kernel`, `network`, `daemon`, `programs`, `state`, `announcing` and
`contacts` are such, too."""

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

WEB: Facts = {
    "service": "web",
    "family": "ipv4",
    "protocol": "tcp",
    "port": 80,
    "addresses": ["10.96.0.10"],
    "node_port": 30080,
    "backends": [("10.244.0.11", 8080)],
    "affinity": True,
}
WEB6 = WEB | {
    "family": "ipv6",
    "node_port": None,
    "addresses": ["fd00:96::10"],
    "backends": [("fd00:244::11", 8080)],
}
SETTINGS = {
    "net/ipv4/ip_forward": "1",
    "net/netfilter/nf_conntrack_tcp_be_liberal": "1",
    "net/netfilter/nf_conntrack_count": "10",
    "net/netfilter/nf_conntrack_max": "1000",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/eth1/rp_filter": "2",
}
STATUS = {
    "state": "in-sync",
    "message": "",
    "version": vipd.__version__,
    "last_apply": "2024-01-01T00:00:00Z",
    "warnings": [],
}
ROUTES = {"10.96.0.10": {"device": "eth1"}, "10.244.0.11": {"device": "eth1"}}
IPTABLES = [
    {"family": "ipv4", "text": "iptables v1.8.9 (nf_tables)", "variant": "nft"},
    {"family": "ipv6", "text": "ip6tables v1.8.9 (nf_tables)", "variant": "nft"},
]
WELL: Facts = {
    "settings": {},
    "services": [WEB],
    "programs": {"kernel": "6.1", "iptables": IPTABLES, "nft": "nftables v1.0.6"},
    "rulesets": [{"family": "ipv4", "variant": "nft", "saved": SAVED}],
    "kernel": {"settings": SETTINGS, "conntrack": {"drop": 0, "insert_failed": 0}, "affinity_limit": 4095},
    "network": {
        "links": [{"name": "lo"}, {"name": "eth1"}],
        "addresses": [
            {"address": "127.0.0.1", "length": 8, "device": "lo"},
            {"address": "10.244.0.1", "length": 24, "device": "eth1"},
        ],
        "routes": ROUTES,
    },
    "daemon": {"status": STATUS, "prefix_in_use": True, "vipctl": vipd.__version__},
    "state": {"path": "/var/lib/vipd"},
}
"""A host with one service."""


def well(**different: Any) -> Facts:
    """That host, but for what is said: of a section what is named, of all else the whole value."""
    return WELL | {
        name: WELL.get(name, {}) | value if isinstance(value, Mapping) else value
        for name, value in different.items()
    }


def sysctl(**settings: int) -> Facts:
    """Kernel settings, with `__` for each `/`."""
    return {"settings": SETTINGS | {name.replace("__", "/"): str(value) for name, value in settings.items()}}


def counted(**counters: int) -> Facts:
    """Counters of connection tracking that grew to this while the doctor looked."""
    return {"conntrack": counters, "conntrack_new": counters, "watched_seconds": 1.0}


def status(**different: Any) -> Facts:
    return {"status": STATUS | different}


def ruleset(saved: str, family: str = "ipv4", variant: str = "nft") -> Facts:
    """What iptables-save of a variant printed."""
    return {"family": family, "variant": variant, "saved": saved}


def faults(facts: Facts) -> dict[str, str]:
    """Id -> severity of what is not in order."""
    return {finding.id: finding.severity for finding in judged(facts) if finding.severity != "ok"}


def found(facts: Facts, name: str) -> list[Finding]:
    return [finding for finding in judged(facts) if finding.id == name]
