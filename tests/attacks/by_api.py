"""What users of the API try: those who may read, and those who may change services, which root is not."""

from __future__ import annotations

import json

from tests.attacks.arena import Arena
from tests.attacks.attack import attack

READER = "member of `socket_group` but not of `admin_group`"
ADMIN = "member of `admin_group`"


def specs(number: int, first: int = 0) -> list[dict[str, object]]:
    return [
        {
            "name": f"stored-{n}",
            "address": f"10.110.{n >> 8}.{n & 255}",
            "ports": [80],
            "backends": [{"address": f"10.111.{n >> 8}.{n & 255}"}],
        }
        for n in range(first, first + number)
    ]


# Readers


@attack(READER, "connections, memory of answers", seconds=10)
def sixty_readers_of_everything(arena: Arena) -> None:
    arena.load(5_000)
    for path in ("/v1/services", "/v1/stats", "/v1/export"):
        arena.reader(path, connections=20)


@attack(READER, "connections, memory of answers", seconds=10)
def readers_of_the_status_and_differences(arena: Arena) -> None:
    arena.load(5_000)
    for path in (
        "/v1/status",
        "/v1/diff",
        "/v1/conntrack?target=load-1",
        "/v1/explain?from=10.10.0.2&target=load-1",
    ):
        arena.reader(path, connections=15)


@attack(READER, "memory of answers", seconds=8)
def readers_who_never_read_the_answer(arena: Arena) -> None:
    arena.load(5_000)
    arena.reader("/v1/services", connections=64, read="nothing")


@attack(READER, "memory of answers", seconds=8)
def readers_who_read_slowly(arena: Arena) -> None:
    arena.load(5_000)
    arena.reader("/v1/services", connections=64, read="slowly")


@attack(READER, "subscribers of events", seconds=8)
def subscribers_who_read_nothing(arena: Arena) -> None:
    arena.load(200)
    arena.reader("/v1/events?follow=1", connections=200, read="nothing")


@attack(READER, "metrics", seconds=8)
def readers_of_metrics(arena: Arena) -> None:
    arena.load(5_000)
    arena.reader("/metrics", connections=60)


@attack(READER, "connections", seconds=5)
def half_requests_to_the_socket(arena: Arena) -> None:
    arena.reader("/v1/status", "X-", connections=400)


@attack(READER, "waits of vipctl", seconds=10)
def hundreds_who_wait_for_a_drain(arena: Arena) -> None:
    """`vipctl wait` and `drain --wait` ask again twice a second."""
    arena.load(2_000)
    arena.reader("/v1/flows?service=load-1&backend=10.244.0.12", connections=200, pause=0.5)
    arena.reader("/v1/services/load-1", connections=200, pause=0.5)


# Administrators


@attack(ADMIN, "dry runs", seconds=10)
def dry_runs_of_sixty_thousand_services(arena: Arena) -> None:
    body = json.dumps({"services": specs(60_000)}).encode()
    arena.admin("POST", "/v1/apply?dry_run=1", body, connections=4)


@attack(ADMIN, "changes", seconds=12)
def sixty_thousand_services_applied(arena: Arena) -> None:
    body = json.dumps({"services": specs(60_000)}).encode()
    arena.admin("POST", "/v1/apply", body, connections=1, pause=3600)
    arena.attack.callback(arena.remove_stored)


@attack(ADMIN, "changes", seconds=8)
def an_administrator_who_changes_all_the_time(arena: Arena) -> None:
    for number in range(8):
        arena.admin(
            "POST", "/v1/apply", json.dumps({"services": specs(50, 50 * number)}).encode(), connections=1
        )
        body = json.dumps({"services": specs(50, 50 * number + 1)}).encode()
        arena.admin("POST", "/v1/apply", body, connections=1)
    arena.attack.callback(arena.remove_stored)


@attack(ADMIN, "reloads", seconds=8)
def reloads_all_the_time(arena: Arena) -> None:
    arena.load(3_000)
    arena.admin("POST", "/v1/reload", b" ", connections=16)


@attack(ADMIN, "bodies", seconds=8)
def bodies_that_take_long(arena: Arena) -> None:
    body = json.dumps({"services": specs(60_000)}).encode()
    arena.admin("POST", "/v1/apply", body, connections=60, body_seconds=300)


@attack(ADMIN, "bodies", seconds=8)
def bodies_that_are_large(arena: Arena) -> None:
    arena.admin("POST", "/v1/apply", b'{"services": [' + b"[" * (40 << 20), connections=10)
    arena.admin("POST", "/v1/services", b'{"service": {"name": "' + b"x" * (1 << 20), connections=30)


@attack(ADMIN, "overrides", seconds=10)
def overrides_all_the_time(arena: Arena) -> None:
    arena.load(200)
    for number in range(40):
        order = {"address": f"10.112.0.{number}", "weight": 1, "reason": "x" * 200}
        arena.admin("POST", "/v1/overrides", json.dumps(order).encode(), connections=1)
    arena.admin("DELETE", "/v1/overrides", b'{"all": true}', connections=1)
