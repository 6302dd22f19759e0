"""API documents for the fake daemon to answer with; `test_answers.py` holds them to the real API's."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def endpoint(address: str, port: int, **changes: Any) -> Json:
    text = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    recorded: Json = {
        "endpoint": text,
        "address": address,
        "port": port,
        "weight": 1,
        "share": 0.5,
        "ready": True,
        "reason": "",
        "health": "unchecked",
        "check": "",
        "chain": "VIPD-SEP-AAAAAAAAAAAAAAAA",
        "max_connections": None,
    }
    return recorded | changes


DNS: Json = {
    "name": "kube-system/kube-dns",
    "owner": "file:/etc/vipd/services.d/dns.yaml",
    "origin": {"source": "file", "path": "/etc/vipd/services.d/dns.yaml", "line": 3},
    "spec": {
        "name": "kube-system/kube-dns",
        "address": "10.96.0.10",
        "ports": [
            {"name": "dns", "port": 53, "protocol": "udp"},
            {"name": "dns-tcp", "port": 53, "protocol": "tcp", "target": 5353},
        ],
        "backends": ["10.244.0.5", {"address": "10.244.2.21", "weight": 2}, "10.244.2.22"],
        "affinity": {"by": "client-ip", "timeout": "10m"},
    },
    "status": {
        "state": "unchecked",
        "message": "2 unchecked",
        "ready": 2,
        "backends": 3,
        "unchecked": 2,
        "ignored": [],
    },
    "forwardings": [
        {
            "name": "kube-system/kube-dns:dns",
            "protocol": "udp",
            "family": "ipv4",
            "frontends": ["10.96.0.10:53/udp"],
            "external": [],
            "node_port": None,
            "health_port": None,
            "traffic_policy": {"internal": "cluster", "external": "cluster"},
            "masquerade": "forwarded",
            "affinity_seconds": 600,
            "refusal": "reject",
            "chain": "VIPD-SVC-UUUUUUUUUUUUUUUU",
            "endpoints": [
                endpoint("10.244.0.5", 53, share=0.3333),
                endpoint("10.244.2.21", 53, weight=2, share=0.6667, chain="VIPD-SEP-BBBBBBBBBBBBBBBB"),
                endpoint(
                    "10.244.2.22", 53, weight=0, share=0, ready=False, reason="its weight is 0", chain=""
                ),
            ],
        },
        {
            "name": "kube-system/kube-dns:dns-tcp",
            "protocol": "tcp",
            "family": "ipv4",
            "frontends": ["10.96.0.10:53/tcp"],
            "external": [],
            "node_port": None,
            "health_port": None,
            "traffic_policy": {"internal": "cluster", "external": "cluster"},
            "masquerade": "forwarded",
            "affinity_seconds": 600,
            "refusal": "drop",
            "chain": "",
            "endpoints": [],
        },
    ],
}

WEB: Json = {
    "name": "a-team-with-a-long-name/an-even-longer-service-name-frontend",
    "owner": "cli",
    "origin": {"source": "cli", "path": "/var/lib/vipd/services.yaml", "line": 0},
    "spec": {
        "name": "a-team-with-a-long-name/an-even-longer-service-name-frontend",
        "address": "fd00:10:96:1234:5678:9abc:def0:10",
        "ports": ["443/tcp"],
        "fallback": {"backends": ["fd00:1::9"]},
    },
    "status": {
        "state": "no-backends",
        "message": "",
        "ready": 0,
        "backends": 0,
        "unchecked": 0,
        "ignored": [],
    },
    "forwardings": [
        {
            "name": "a-team-with-a-long-name/an-even-longer-service-name-frontend",
            "protocol": "tcp",
            "family": "ipv6",
            "frontends": ["[fd00:10:96:1234:5678:9abc:def0:10]:443/tcp"],
            "external": [],
            "node_port": None,
            "health_port": None,
            "traffic_policy": {"internal": "cluster", "external": "cluster"},
            "masquerade": "always",
            "affinity_seconds": None,
            "refusal": "reject",
            "chain": "VIPD-SVC-WWWWWWWWWWWWWWWW",
            "endpoints": [],
        }
    ],
}

STATUS: Json = {
    "version": "0.1.0",
    "pid": 4711,
    "started": "2026-01-01T00:00:00Z",
    "state": "in-sync",
    "message": "",
    "serving": {
        "state": "degraded",
        "message": "10 degraded, 2 unchecked of 12 services",
        "services": {"ok": 0, "unchecked": 2, "degraded": 10, "no-backends": 0, "quarantined": 0},
        "unhealthy": [
            {
                "address": "10.244.0.5",
                "services": 9,
                "names": ["dns", "web"],
                "reason": "connection refused, 3 of 3",
            }
        ],
        "unhealthy_addresses": 1,
        "others": [{"state": "degraded", "services": 1, "names": ["smtp"]}],
    },
    "dataplane": {
        "name": "iptables",
        "ipv4": "iptables v1.8.9 (nf_tables)",
        "ipv6": "ip6tables v1.8.9 (nf_tables)",
    },
    "services": 12,
    "backends": 33,
    "ready": 31,
    "unchecked": 4,
    "last_apply": "2026-01-01T00:00:05Z",
    "last_apply_seconds": 0.031,
    "applies": 17,
    "apply_failures": 0,
    "quarantined": {},
    "sources": [
        {
            "name": "files",
            "location": "/etc/vipd/services.d",
            "services": 10,
            "problems": ["/etc/vipd/services.d/web.yaml:7: services[0].ports[0]: not a port; write 80/tcp"],
            "refused": [
                {
                    "unit": "file:/etc/vipd/services.d/web.yaml",
                    "serves": "the last good version of the file serves on",
                    "problems": [
                        "/etc/vipd/services.d/web.yaml:7: services[0].ports[0]: not a port; write 80/tcp"
                    ],
                }
            ],
            "notes": ["/etc/vipd/services.d/k.yaml:2: note: Service default/db is headless, and is left out"],
        },
        {
            "name": "store",
            "location": "/var/lib/vipd/services.yaml",
            "services": 2,
            "problems": [],
            "refused": [],
            "notes": [],
        },
    ],
    "warnings": ["br_netfilter is not loaded"],
    "settings": {"chain_prefix": "VIPD"},
}


def one(view: Json) -> Json:
    """The answer about one service."""
    return {"service": view, "version": "0123456789abcdef"}


def changed(*results: tuple[str, str], **changes: Any) -> Json:
    """The answer to a change, with (action, name) of each service."""
    answer: Json = {
        "changed": any(action != "unchanged" for action, _ in results),
        "applied": True,
        "message": "",
        "stored": "/var/lib/vipd/services.yaml",
        "results": [{"name": name, "action": action} for action, name in results],
        "warnings": [],
    }
    return answer | changes
