"""What backends, clients and other local users try."""

from __future__ import annotations

from collections.abc import Callable

from tests.attacks import foe
from tests.attacks.arena import HEALTH_PORT, METRICS_PORT, PAGE_PORT, VIP, Arena, costly_certificate
from tests.attacks.attack import attack
from tests.attacks.by_files import checked, http, service
from tests.lab.topology import CLIENT_SOURCES

BACKEND = "a backend, and any program that answers at its address"
CLIENT = "client of a TCP port of vipd"
LOCAL_USER = "other local user"
HALF_REQUEST = "GET / HTTP/1.1\nHost: x\nX-"
LOOPBACK = tuple(f"127.0.{n >> 8}.{n & 255}" for n in range(2, 400))
"""Each is a client of its own to vipd."""


def _get(path: str) -> str:
    return f"GET {path} HTTP/1.1\nHost: localhost\nConnection: close\n\n"


# Backends


@attack(BACKEND, "time of a check")
def answers_of_a_byte_a_second(arena: Arena) -> None:
    arena.file(checked(2_000, http("a byte a second", "interval: 2s, timeout: 2s")))


@attack(BACKEND, "size of an answer")
def answers_without_end(arena: Arena) -> None:
    arena.file(checked(40, http("endless body", "interval: 500ms, timeout: 500ms, body: zzz")))
    more = checked(40, http("endless head", "interval: 500ms, timeout: 500ms"))
    arena.file(more.replace("greedy-", "greedy-h").replace("10.100.", "10.102."), "greedy-heads.yaml")


@attack(BACKEND, "datagrams of an answer")
def thousands_of_datagrams_for_each(arena: Arena) -> None:
    flood, dns = foe.PORTS["udp flood"], foe.PORTS["dns flood"]
    arena.file(
        checked(
            20, f"{{type: udp, port: {flood}, send: 'q{{n}}', expect: y, interval: 200ms, timeout: 200ms}}"
        )
    )
    more = checked(
        100,
        f"{{type: dns, port: {dns}, query: n{{n}}.foe, answer: 1.2.3.4, interval: 200ms, timeout: 200ms}}",
    )
    arena.file(more.replace("greedy-", "greedy-d").replace("10.100.", "10.102."), "greedy-dns.yaml")


@attack(BACKEND, "handshakes of TLS")
def handshakes_that_cost_the_client(arena: Arena) -> None:
    arena.foe(arena.bad, "tls", *costly_certificate(arena.scratch_directory))
    port = foe.PORTS["tls"]
    check = f"{{type: https, verify: false, port: {port}, path: /{{n}}, interval: 100ms, timeout: 100ms}}"
    arena.file(checked(200, check))


@attack(BACKEND, "connections that are never answered")
def backends_that_take_connections_and_are_silent(arena: Arena) -> None:
    arena.file(checked(15_000, http("silent", "interval: 60m, timeout: 60m")))


# Clients and local users


@attack(CLIENT, "connections of health ports", seconds=4)
def half_requests_to_a_health_port(arena: Arena) -> Callable[[], None]:
    arena.file(service(60_001, more=", health_port: 10999"), "greedy-port.yaml")
    arena.another_service(18, arena.good.ipv4, ", health_port: 10991")
    arena.wait_for_health_port(10999)
    arena.wait_for_health_port(10991)
    to = f"{arena.host.ipv4}:10999"
    arena.requests(arena.client, foe.Requests(to, HALF_REQUEST, 800, sources=CLIENT_SOURCES[1:]))

    def all_requests_of_another_are_answered() -> None:
        assert all(arena.health_port_answers(10991) for _ in range(30)), "requests were not answered"

    return all_requests_of_another_are_answered


@attack(LOCAL_USER, "connections of health_address")
def half_requests_from_all_of_loopback(arena: Arena) -> None:
    arena.local_user(HEALTH_PORT, HALF_REQUEST, 1_000, sources=LOOPBACK)


@attack(LOCAL_USER, "the status page")
def sixty_requests_for_the_state(arena: Arena) -> None:
    arena.load(5_000)
    arena.local_user(PAGE_PORT, _get("/state"), 60)


@attack(LOCAL_USER, "unread answers of the status page")
def viewers_who_read_nothing(arena: Arena) -> None:
    arena.load(5_000)
    arena.local_user(PAGE_PORT, _get("/state"), 100, read="nothing", sources=LOOPBACK)


@attack(LOCAL_USER, "metrics")
def sixty_scrapes_at_a_time(arena: Arena) -> None:
    arena.load(5_000)
    arena.local_user(METRICS_PORT, _get("/metrics"), 60, sources=LOOPBACK)


@attack(LOCAL_USER, "node ports", seconds=4)
def node_ports_that_a_user_listens_on(arena: Arena) -> Callable[[], None]:
    def text(port: int, last: int) -> str:
        return (
            f"name: calm-19, address: {VIP}19, ports: {{port: {port}, target: 8080, node_port: 30080}}, "
            f"backends: [10.244.0.{last}]"
        )

    arena.another_file(text(80, 11))
    arena.wait_for_greeting(19)
    arena.foe(arena.host, "listen", "30000", "30899")

    def change_of_a_service_with_a_node_port_is_taken() -> None:
        arena.another_file(text(81, 12))
        arena.wait_for_greeting(19, 81)

    return change_of_a_service_with_a_node_port_is_taken
