"""What a daemon says of numbers, for tests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tests.lab.daemon import Daemon

PATIENCE_SECONDS = 60.0

Numbers = tuple[int, ...]
WEB = """\
- name: web
  address: [10.96.0.10, "fd00:96::10"]
  ports: [80/tcp, 80/udp]
  backends: [10.244.0.11, 10.244.0.12, "fd00:244::11"]
"""


def service(daemon: Daemon, name: str = "web") -> dict[str, Any]:
    """One service's numbers, as `GET /v1/stats` has them."""
    answer = daemon.get(f"stats?service={name}")
    assert "services" in answer, answer
    (counted,) = answer["services"]
    assert sum(backend["new_flows"] for backend in counted["backends"]) <= counted["new_flows"]
    return dict(counted)


def new_flows(daemon: Daemon, name: str = "web") -> int:
    return int(service(daemon, name)["new_flows"])


def backends(daemon: Daemon, name: str = "web") -> dict[str, int]:
    """New flows by `ENDPOINT/PROTOCOL`, those without any left out."""
    counted = service(daemon, name)["backends"]
    return {f"{b['endpoint']}/{b['protocol']}": b["new_flows"] for b in counted if b["new_flows"]}


def wait_for(daemon: Daemon, expected: int, name: str = "web") -> None:
    """Until the number is this one; one that is greater is wrong at once."""
    reach(daemon, lambda: (new_flows(daemon, name),), (expected,))


def reach(daemon: Daemon, read: Callable[[], Numbers], expected: Numbers) -> None:
    """Until the numbers are these; greater or falling ones are wrong at once."""
    end, before = time.monotonic() + PATIENCE_SECONDS, tuple(0 for _ in expected)
    while (now := read()) != expected:
        assert all(b <= n <= e for b, n, e in zip(before, now, expected, strict=True)), (now, expected)
        assert time.monotonic() < end, f"{now}, not {expected}; the log:\n{daemon.log}"
        before = now
        time.sleep(0.1)


def vipctl_json(daemon: Daemon, *arguments: str) -> dict[str, Any]:
    """What vipctl prints with `-o json`."""
    counted: dict[str, Any] = json.loads(daemon.vipctl(*arguments, "-o", "json").stdout)
    return counted
