"""What users of etcd try, each with the rights of a role."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from tests.attacks.arena import Arena
from tests.attacks.attack import attack

AUTHOR = "etcd: user with write access to `services/`"
REGISTRAR = "etcd: the same for `backends/SERVICE/`"
OPERATOR = "etcd: the same for `overrides/`"
HEARTBEAT = "etcd: the same for `hosts/`"


def value(number: int, more: str = "") -> str:
    return f"{{address: 10.120.{number >> 8}.{number & 255}, ports: 80, backends: [10.244.0.12]{more}}}"


@attack(AUTHOR, "addresses that vipd needs", seconds=6, etcd=True)
def a_key_that_claims_the_address_of_etcd(arena: Arena) -> None:
    text = f"{{address: {arena.servers.ipv4}, ports: 2379, backends: [10.244.0.12]}}"
    arena.put_all({"services/greedy/etcd": text, "services/greedy/names": text.replace("2379", "53/udp")})


@attack(AUTHOR, "size of values", seconds=8, etcd=True)
def services_of_1_4_megabytes(arena: Arena) -> None:
    big = value(1) + "\n#" + "x" * 1_400_000
    arena.put_all({f"services/greedy/{n}": big for n in range(120)}, 1)


@attack(REGISTRAR, "size of values", seconds=8, etcd=True)
def registrations_of_1_4_megabytes(arena: Arena) -> None:
    arena.put_all({"services/greedy/web": value(1)})
    big = "weight: 1\n#" + "x" * 1_400_000
    arena.put_all({f"backends/greedy/web/10.244.1.{n}:80": big for n in range(120)}, 1)


@attack(REGISTRAR, "number of keys", seconds=8, etcd=True)
def a_hundred_thousand_registrations(arena: Arena) -> None:
    arena.put_all({"services/greedy/web": value(1)})
    arena.put_all(
        {f"backends/greedy/web/10.{n >> 16}.{n >> 8 & 255}.{n & 255}:80": "" for n in range(720_000, 820_000)}
    )


@attack(REGISTRAR, "events", seconds=8, etcd=True)
def registrations_that_come_and_go(arena: Arena) -> None:
    arena.put_all({"services/greedy/web": value(1)})
    keys = [f"backends/greedy/web/10.130.{n >> 8}.{n & 255}:80" for n in range(500)]

    def churn(end: threading.Event) -> None:
        while not end.is_set():
            arena.put_keys(dict.fromkeys(keys, f"weight: {random.randint(1, 9)}"))
            arena.delete("backends/greedy/*")

    arena.run_beside(churn)


@attack(REGISTRAR, "checks", seconds=8, etcd=True)
def registrations_with_checks_of_their_own(arena: Arena) -> None:
    arena.put_all({"services/greedy/web": value(1)})
    check = "check: {type: tcp, port: 7010, interval: 1s, timeout: 1s}"
    arena.put_all({f"backends/greedy/web/10.131.{n >> 8}.{n & 255}:80": check for n in range(5_000)})


@attack(AUTHOR, "events", seconds=8, etcd=True)
def a_key_that_changes_all_the_time(arena: Arena) -> None:
    def churn(end: threading.Event) -> None:
        number = 0
        while not end.is_set():
            number += 1
            arena.put_keys(
                {f"services/greedy/{n}": value(n, f", slow_start: {number % 9}s") for n in range(100)}
            )

    arena.run_beside(churn)
    arena.attack.callback(lambda: arena.delete("services/greedy/*"))


@attack(AUTHOR, "number of services", seconds=12, etcd=True)
def twenty_thousand_services_in_etcd(arena: Arena) -> None:
    arena.put_all({f"services/greedy/{n}": value(n) for n in range(20_000)})


@attack(AUTHOR, "held removals", seconds=6, etcd=True)
def a_folder_that_is_emptied(arena: Arena) -> Callable[[], None]:
    arena.put_all({f"services/greedy/{n}": value(n) for n in range(60)})
    arena.put_keys({"services/calm/old": value(300)})
    arena.wait_for(
        lambda: bool(arena.daemon.endpoints("calm/old")) and bool(arena.daemon.endpoints("greedy/59"))
    )
    arena.delete("services/greedy/*")

    def removal_of_another_counts() -> None:
        arena.delete("services/calm/old")
        arena.wait_for(lambda: not arena.daemon.endpoints("calm/old"))

    return removal_of_another_counts


@attack(HEARTBEAT, "size of values", seconds=4, etcd=True)
def keys_of_hosts_that_are_too_large(arena: Arena) -> Callable[[], None]:
    values = {f"hosts/greedy{n}": "x" * 100_000 for n in range(100)}
    values |= {
        "hosts/greedy-json": '{"name": ' + "[" * 10_000,
        "hosts/greedy-text": '{"name": "\\u001b[31m"}',
    }
    arena.put_all(values, 5)

    def fleet_status_has_no_colours_of_theirs() -> None:
        assert "\x1b[31m" not in arena.daemon.vipctl("fleet", "status").stdout

    return fleet_status_has_no_colours_of_theirs


@attack(HEARTBEAT, "number of keys", seconds=6, etcd=True)
def fifty_thousand_keys_of_hosts(arena: Arena) -> Callable[[], object]:
    arena.put_all({f"hosts/greedy{n}": '{"name": "greedy"}' for n in range(50_000)})
    return lambda: arena.daemon.vipctl("fleet", "status")


@attack(OPERATOR, "number of keys", seconds=8, etcd=True)
def thousands_of_overrides_in_etcd(arena: Arena) -> None:
    text = '{"address": "10.140.0.1", "weight": 3, "by": "x", "at": "2026-01-01T00:00:00+00:00"}'
    arena.put_all({f"overrides/addresses/10.140.{n >> 8}.{n & 255}": text for n in range(20_000)})
    arena.attack.callback(lambda: arena.delete("overrides/addresses/10.140.*"))


@attack(AUTHOR, "odd keys", seconds=4, etcd=True)
def keys_with_odd_names(arena: Arena) -> None:
    odd = ("", "/", "//", "..", "a" * 2000, "\N{SNOWMAN}", "a\nb", "\x1b[31m", "a b", "-")
    arena.put_all({f"services/greedy/{name}{n}": value(n) for n in range(50) for name in odd})
