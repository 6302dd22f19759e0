"""The host of the recorded state directories: what is declared there, and what its daemon knows.

A folder is recorded and tried on the same host, except that a trial has no etcd and no name server: what
those said can come from the state directory alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.lab.daemon import Daemon
from tests.lab.name_server import NameServer
from tests.lab.topology import Lab, Wiring

SERVED_PORT, DEAD_PORT = 8080, 8081
NAME = "web.internal"
ETCD = "http://127.0.0.1:2379"
WEB, SHOP, NAMED, LATE, FLEET, GONE, API = (f"10.96.1.{number}" for number in range(1, 8))
VIPS = {"web": WEB, "shop": SHOP, "named": NAMED, "fleet": FLEET}
"""Those that serve HTTP."""
FILES = {
    "shop.yaml": f"""
  - name: shop
    address: {SHOP}
    external_addresses: [203.0.113.10]
    announce: routes
    ports: 80/tcp
    backends: [10.244.0.11:{SERVED_PORT}, 10.244.0.12:{SERVED_PORT}]
  - name: named
    address: {NAMED}
    ports: 80/tcp
    backends: [dns:{NAME}:{SERVED_PORT}]
""",
    "late.yaml": f"""
  - name: late
    address: {LATE}
    ports: 80/tcp
    backends: [10.244.0.12:{SERVED_PORT}]
""",
    "gone.yaml": f"""
  - name: gone
    address: {GONE}
    ports: 53/udp
    backends: [10.244.0.11:{SERVED_PORT}]
""",
}
CHECK = "{type: tcp, interval: 10m, timeout: 1s, rise: 10, fall: 1}"
"""A trial is over before it has asked often enough for another verdict."""
KEYS = {
    "services/fleet": f"""{{address: {FLEET}, ports: 80/tcp, registrations: true,
        backends: ["10.244.0.11:{SERVED_PORT}"]}}""",
    f"backends/fleet/10.244.0.12:{SERVED_PORT}": "{weight: 2}",
}
FOREIGN_RULES = (
    "add table inet site; add chain inet site forward { type filter hook forward priority 0; policy drop; }"
)


@contextmanager
def host() -> Iterator[Lab]:
    """The lab, with a firewall in which vipd has to accept its flows."""
    with Lab(Wiring(host_route=False)) as lab:
        lab.host.run("nft", FOREIGN_RULES)
        lab.serve_everywhere(SERVED_PORT)
        yield lab


def daemon_on(lab: Lab) -> Daemon:
    """A daemon of the scene, not started, without files."""
    return Daemon(
        lab.host,
        node_name="h1",
        log_level="info",
        dns_servers=NameServer.place,
        dns_timeout="300ms",
        etcd={"endpoints": [ETCD], "timeout": "1s"},
        announce_addresses=["203.0.113.0/24"],
    )


def knowledge(daemon: Daemon) -> dict[str, Any]:
    """What the daemon can know after a restart only from its state directory."""
    history, maintenance = daemon.get("history"), daemon.get("maintenance")["maintenance"]
    return {
        "backends": {name: backends(daemon, name) for name in sorted(new_flows(daemon))},
        "overrides": daemon.get("overrides")["overrides"],
        "history": history["entries"],
        "unconfirmed": (history["confirmation"] or {}).get("revision"),
        "new flows": new_flows(daemon),
        "events": [event["id"] for event in daemon.get("events")["events"]],
        "maintenance": maintenance["reason"] if maintenance else None,
        "dataplane": daemon.status()["dataplane"]["name"],
    }


def assert_known(recorded: object, now: object, where: str = "") -> None:
    """What was recorded is still known. A later release may say more of each thing."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        assert recorded.keys() <= now.keys(), where
        for key, value in recorded.items():
            assert_known(value, now[key], f"{where}: {key}")
    elif isinstance(recorded, list) and isinstance(now, list):
        assert len(recorded) == len(now), where
        for number, (one, other) in enumerate(zip(recorded, now, strict=True)):
            assert_known(one, other, f"{where}[{number}]")
    else:
        assert recorded == now, where


def backends(daemon: Daemon, service: str) -> dict[str, bool]:
    """The backends of a service, and whether each gets new flows."""
    forwardings = daemon.get(f"services/{service}")["service"]["forwardings"]
    return {each["endpoint"]: each["ready"] for found in forwardings for each in found["endpoints"]}


def new_flows(daemon: Daemon) -> dict[str, int]:
    """The flows of each service so far."""
    return {each["name"]: each["new_flows"] for each in daemon.get("stats")["services"]}
