"""Declarations made by dice, of which every backend is an address of the world's."""

from __future__ import annotations

import random
from typing import Any

import yaml

NATIVE = range(18)
"""Seeds."""

B1 = {4: "10.244.1.10", 6: "fd00:10:244:1::a"}
OTHERS = {
    4: ["10.244.2.11", "10.244.2.12", "10.244.2.21", "10.244.3.12", "10.244.0.7"],
    6: ["fd00:10:244:2::b"],
}
NETWORKS = {4: ["10.244.0.0/16", "203.0.113.0/24"], 6: ["fd00:10:244::/56"]}


def declaration(seed: int) -> str:
    """A vipd/v1 declaration of three services; the seed says which."""
    dice = random.Random(seed)
    services = [_service(dice, number, 6 if dice.random() < 0.25 else 4) for number in range(3)]
    return yaml.safe_dump({"apiVersion": "vipd/v1", "services": services})


def settings(seed: int) -> dict[str, Any]:
    """Settings that go with it."""
    dice = random.Random(-seed - 1)
    chosen: dict[str, Any] = {"node_name": "node1"}
    if dice.random() < 0.5:
        chosen["cluster_cidrs"] = ["10.244.0.0/16", "fd00:10:244::/56"]
    if dice.random() < 0.3:
        chosen["node_port_addresses"] = ["192.168.100.0/24"]
    if dice.random() < 0.3:
        chosen["compat"] = "kube-proxy"
    if dice.random() < 0.3:
        chosen["dispatch"] = "grouped"
    return chosen


def _service(dice: random.Random, number: int, family: int) -> dict[str, Any]:
    vip = f"10.96.0.{20 + number}" if family == 4 else f"fd00:10:96::{20 + number}"
    protocol = dice.choice(["tcp", "tcp", "udp"])
    port: dict[str, Any] = {"port": 80, "protocol": protocol, "target": 8080}
    declared: dict[str, Any] = {"name": f"s{number}", "address": vip, "ports": [port]}
    declared["backends"] = [_backend(dice, address) for address in _addresses(dice, family)]
    if dice.random() < 0.4:
        port["node_port"] = 30080 + number
    if dice.random() < 0.4 and family == 4:
        external: dict[str, Any] = {"address": f"198.51.100.{5 + number}"}
        if dice.random() < 0.6:
            external["allow_from"] = [dice.choice(NETWORKS[family])]
        declared["external_addresses"] = [external]
    if dice.random() < 0.5:
        declared["masquerade"] = dice.choice(["always", "forwarded", "hairpin"])
    if dice.random() < 0.2:
        declared["affinity"] = "client-ip"
    if dice.random() < 0.3:
        declared["fallback"] = dice.choice(["drop", "reject"])
    for side in ("internal", "external"):
        if dice.random() < 0.2 and (side == "internal" or len(declared) > 4):
            declared.setdefault("traffic_policy", {})[side] = "local"
    return declared


def _addresses(dice: random.Random, family: int) -> list[str]:
    others = dice.sample(OTHERS[family], dice.randint(0, min(3, len(OTHERS[family]))))
    return sorted([*others, *([B1[family]] if dice.random() < 0.8 else [])])


def _backend(dice: random.Random, address: str) -> dict[str, Any]:
    backend: dict[str, Any] = {"address": address, "weight": dice.choice([0, 1, 1, 2, 3])}
    if dice.random() < 0.5:
        backend["node"] = dice.choice(["node1", "node2"])
    if dice.random() < 0.2:
        backend["state"] = dice.choice(["drain", "down"])
    return backend
