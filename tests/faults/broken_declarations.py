"""One declaration that uses all keys, and everything that one mistake makes of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Json = Any

GARBAGE: tuple[Json, ...] = (
    None,
    "",
    "x",
    0,
    -1,
    10**30,
    1.5,
    True,
    [],
    {},
    [None],
    {"a": {"b": [1]}},
    [[], [[]]],
    "\U0001f600\u2028'\"{}",
    "x" * 5000,
    "1" * 5000,
)


def checks(number: int) -> list[dict[str, Json]]:
    """One check of each type with all its keys."""
    timing = {"interval": "30s", "timeout": "1s", "rise": 2, "fall": 3, "start": "healthy", "jitter": "5%"}
    return [
        {"type": "tcp", "port": 8080, **timing},
        {"type": "http", "port": 8080, "method": "HEAD", "path": "/x", "host": "a.example"}
        | {"status": [200, "204-206"], "body": "ok", **timing},
        {"type": "https", "port": 8443, "verify": True, "ca": "/etc/ssl/none.pem"}
        | {"server_name": "a.example", **timing},
        {"type": "udp", "port": 53, "send": "hex:00ff", "expect": "ok", **timing},
        {"type": "dns", "port": 53, "query": "a.example", "record": "AAAA", "rcode": "NXDOMAIN"}
        | {"answer": "::1", **timing},
        {"type": "exec", "port": 53, "command": ["/bin/true", str(number)], "user": "nobody", **timing},
    ]


def declaration(number: int) -> dict[str, Json]:
    """A service that uses every key. No two numbers, below 4,000, claim the same."""
    high, low = divmod(number, 250)
    vip, backends = f"10.96.{100 + high}.{low + 1}", f"10.250.{high}"
    return {
        "name": f"all-{number}",
        "description": "every key",
        "address": [vip, f"fd00:96::{number + 1:x}"],
        "ports": [
            {"name": "dns", "port": 53, "protocol": "udp", "target": 5353},
            {"name": "web", "port": 80, "protocol": "tcp", "target": 8080, "node_port": 20000 + number},
            "443/tcp",
        ],
        "backends": [
            {
                "address": f"{backends}.1",
                "port": 8080,
                "weight": 2,
                "state": "active",
                "node": "a",
                "zone": ["z"],
            },
            {"address": f"{backends}.2", "ports": {"web": 8081}, "backup": True, "check": checks(number)[1]},
            f"{backends}.3:53@4",
            "fd00:250::1",
        ],
        "external_addresses": [f"203.0.{100 + high}.{low + 1}"],
        "load_balancer_addresses": [{"address": f"198.18.{high}.{low + 1}", "allow_from": ["10.0.0.0/8"]}],
        "allow_from": ["192.0.2.0/24", "2001:db8::/32"],
        "health_port": 40000 + number,
        "traffic_policy": {"external": "local", "internal": "cluster"},
        "traffic_distribution": "prefer-same-node",
        "on_remove": "reset",
        "respond_to_ping": True,
        "registrations": False,
        "flow_takeover": False,
        "limits": {"connections": 100, "new_per_client": 10, "client_ipv6_prefix": 64},
        "announce": {"by": "routes", "addresses": "all"},
        "affinity": {"by": "client-ip", "timeout": "3h"},
        "masquerade": "forwarded",
        "check": checks(number)[(number + 1) % 6],
        "fallback": {"backends": [{"address": f"{backends}.9", "port": 80, "weight": 1}]},
        "slow_start": "30s",
        "weight_from": "check",
        "balance": "random",
    }


SINGLE = {"address": "10.96.99.1", "ports": "80/tcp", "backends": "10.250.99.1", "node_port": 19999}
"""A service of one port, whose node port is its own key."""


def mistakes(number: int = 0) -> Iterator[tuple[str, dict[str, Json]]]:
    """Every deletion of a key, and each of its values replaced by garbage: what was done, and the outcome."""
    for garbage in GARBAGE:
        yield f"node_port = {str(garbage)[:20]!r}", {**SINGLE, "name": "single", "node_port": garbage}
    paths = [*_paths(declaration(0)), *((("check", *path)) for check in checks(0) for path in _paths(check))]
    for path in dict.fromkeys(paths):
        for replacement in (..., *GARBAGE):
            made = declaration(number)
            if path[0] == "check" and path not in set(_paths(made)):
                made["check"] = next(c for c in checks(number) if path[1] in c)
            if _replace(made, path, replacement):
                what = "deleted" if replacement is ... else f"= {str(replacement)[:20]!r}"
                yield f"{'.'.join(map(str, path))} {what}", made
                number += 1


def _paths(value: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _replace(made: Json, path: tuple[str | int, ...], replacement: Json) -> bool:
    """Put something in place of what stands at a path, or delete that; whether there was anything."""
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    if isinstance(holder, dict) and path[-1] not in holder:
        return False
    if replacement is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = copy.deepcopy(replacement)
    return True
