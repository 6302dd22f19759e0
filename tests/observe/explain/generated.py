"""Declarations made by dice, of which every backend is an address of the world's."""

from __future__ import annotations

import random
from typing import Any

import yaml

NATIVE = range(24)
"""Seeds."""
TABLES = (0, 2, 3, 4, 7, 8, 10, 17, 20, 21, 27, 29, 31, 37)
"""Those that are tried with the nftables dataplane: of all kinds, node ports, policies and affinity too."""

B1 = {4: "10.244.1.10", 6: "fd00:10:244:1::a"}
OTHERS = {
    4: ["10.244.2.11", "10.244.2.12", "10.244.2.21", "10.244.3.12", "10.244.0.7"],
    6: ["fd00:10:244:2::b"],
}
NETWORKS = ["10.244.0.0/16", "203.0.113.0/24"]


def declaration(seed: int) -> str:
    """A vipd/v1 declaration of two services; the seed says which."""
    dice = random.Random(seed)
    services = [_service(dice, number, 6 if dice.random() < 0.25 else 4) for number in range(2)]
    return yaml.safe_dump({"apiVersion": "vipd/v1", "services": services})


def balanced(seed: int) -> str:
    """The same with ways of choosing backends that only the nftables dataplane has all of."""
    dice, declared = random.Random(1000 + seed), yaml.safe_load(declaration(seed))
    for service in declared["services"]:
        # With affinity a client keeps what another address of the service gave it, not what its hash says.
        hashed = [] if "affinity" in service else ["source-hash"]
        service["balance"] = dice.choice(["random", "round-robin", *hashed])
    return yaml.safe_dump(declared)


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
    if family == 4 and dice.random() < 0.4:
        declared["external_addresses"] = [_external(dice, number)]
    chances: list[tuple[float, str, list[Any]]] = [
        (0.5, "masquerade", ["always", "forwarded", "hairpin"]),
        (0.2, "affinity", ["client-ip"]),
        (0.3, "fallback", ["drop", "reject"]),
        (0.3, "allow_from", NETWORKS if family == 4 else ["fd00:10::/64"]),
        (0.3, "traffic_policy", [{"internal": "local"}, {"external": "local"}]),
    ]
    declared |= {key: dice.choice(values) for chance, key, values in chances if dice.random() < chance}
    return declared


def _external(dice: random.Random, number: int) -> dict[str, Any]:
    limit = {"allow_from": [dice.choice(NETWORKS)]} if dice.random() < 0.6 else {}
    return {"address": f"198.51.100.{5 + number}", **limit}


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
