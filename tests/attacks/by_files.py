"""What an author of files tries: checks, programs, names, services, addresses and ports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from tests.attacks import foe
from tests.attacks.arena import VIP, Arena
from tests.attacks.attack import attack

AUTHOR = "author of a file in `services_dir`"
BAD = "10.244.0.12"


def service(number: int, backends: str = f"[{BAD}]", check: str = "none", more: str = "") -> str:
    """One service of the attacker's, of a number up to 65,535."""
    address = f"10.100.{number >> 8}.{number & 255}"
    rest = f"ports: 80, backends: {backends}, check: {check}{more}"
    return f"- {{name: greedy-{number}, address: {address}, {rest}}}\n"


def services(numbers: Iterable[int], backends: str = f"[{BAD}]", check: str = "none", more: str = "") -> str:
    return "".join(service(number, backends, check, more) for number in numbers)


def checked(number: int, check: str, per_service: int = 250) -> str:
    """Services with so many checks, of a port each; `{n}` in `check` is another number for each."""
    text = ""
    for first in range(0, number, per_service):
        backends = ", ".join(
            f"{{address: {BAD}, port: {10000 + n}, check: {check.replace('{n}', str(n))}}}"
            for n in range(first, min(first + per_service, number))
        )
        text += service(first // per_service, f"[{backends}]")
    return text


def http(name: str, more: str = "interval: 100ms, timeout: 100ms", path: str = "/{n}") -> str:
    return f"{{type: http, port: {foe.PORTS[name]}, path: {path}, {more}}}"


# Checks


@attack(AUTHOR, "checks that run", seconds=12)
def checks_that_wait_for_an_hour(arena: Arena) -> None:
    port = foe.PORTS["silent"]
    check = f"{{type: udp, port: {port}, send: 'q{{n}}', expect: x, interval: 60m, timeout: 60m}}"
    arena.file(checked(14_000, check))


@attack(AUTHOR, "checks in a second", seconds=12)
def checks_ten_times_a_second(arena: Arena) -> None:
    arena.file(checked(40_000, http("good")))


@attack(AUTHOR, "checks in a second")
def a_thousand_checks_ten_times_a_second(arena: Arena) -> None:
    arena.file(checked(1_000, http("good")))


@attack(AUTHOR, "verdicts, writes and events")
def backends_that_flap(arena: Arena) -> None:
    arena.file(checked(1_000, http("flapping", "interval: 200ms, timeout: 200ms, rise: 1, fall: 1")))


@attack(AUTHOR, "weights, writes")
def weights_that_change_with_each_answer(arena: Arena) -> None:
    check = http("new weights", "interval: 200ms, timeout: 200ms")
    text = checked(1_000, check, per_service=100)
    arena.file(text.replace("check: none}\n", "check: none, weight_from: check}\n"))


@attack(AUTHOR, "regular expressions")
def patterns_that_take_long(arena: Arena) -> None:
    pattern = "(a?b?){30}[ab]*(a|b|ab|ba){30}c"
    arena.file(checked(200, http("large body", f"interval: 100ms, timeout: 100ms, body: '{pattern}'")))


# Programs


@attack(AUTHOR, "slots of programs", seconds=12)
def programs_that_answer_just_in_time(arena: Arena) -> None:
    check = "{type: exec, command: [/bin/sleep, '1.{n}'], interval: 2s, timeout: 2s}"
    arena.file(checked(200, check))


@attack(AUTHOR, "slots of programs", seconds=12)
def programs_that_hang(arena: Arena) -> None:
    arena.file(checked(400, "{type: exec, command: [/bin/sleep, '1{n}'], interval: 60m, timeout: 60m}"))


@attack(AUTHOR, "other's programs", seconds=6)
def programs_that_end_those_of_others(arena: Arena) -> None:
    """Only those of the bystander, whose command line has a path that no other process has."""
    victim = f"for p in /proc/[0-9]*; do grep -qs '{arena.alive}' $p/cmdline && kill -9 ${{p#/proc/}}; done"
    script = arena.scratch(f"#!/bin/sh\nwhile :; do {victim}; done\n".encode())
    script.chmod(0o755)
    arena.file(checked(4, f"{{type: exec, command: [{script}, '{{n}}'], interval: 5s, timeout: 5s}}"))


@attack(AUTHOR, "output of programs", seconds=6)
def programs_that_write_without_end(arena: Arena) -> None:
    arena.file(checked(20, "{type: exec, command: [/usr/bin/yes, '{n}'], interval: 2s, timeout: 2s}"))


@attack(AUTHOR, "processes", seconds=6)
def programs_that_leave_children(arena: Arena) -> None:
    script = arena.scratch(b"#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do sleep 5 & done\nexit 0\n")
    script.chmod(0o755)
    arena.file(checked(100, f"{{type: exec, command: [{script}, '{{n}}'], interval: 1s, timeout: 1s}}"))


# Names


def names(kind: str, number: int) -> str:
    return "".join(
        service(n, "[" + ", ".join(f"'dns:{kind}{n * 100 + i}.foe'" for i in range(min(100, number))) + "]")
        for n in range(-(-number // 100))
    )


@attack(AUTHOR, "names", seconds=6)
def more_names_than_are_looked_up(arena: Arena) -> Callable[[], None]:
    arena.file(names("plain", 1_500))

    def new_name_of_another_is_followed() -> None:
        arena.another_service(15, "dns:calm.internal")
        arena.wait_for_greeting(15)

    return new_name_of_another_is_followed


@attack(AUTHOR, "lookups", seconds=8)
def names_without_an_answer(arena: Arena) -> None:
    arena.file(names("silent", 900))


@attack("a name server, and whoever can change its answers", "threads, Python's lock", seconds=8)
def names_with_answers_of_64_kilobytes(arena: Arena) -> None:
    arena.file(names("huge", 100))


@attack(AUTHOR, "writes", seconds=8)
def names_that_change_each_second(arena: Arena) -> None:
    arena.file(names("restless", 400))


@attack("a name server, and whoever can change its answers", "addresses of the host")
def a_name_that_leads_to_the_host(arena: Arena) -> Callable[[], None]:
    arena.file(service(1, "['dns:own1.foe', 10.244.0.11]"))

    def no_address_of_the_host_serves() -> None:
        endpoints = set(arena.daemon.endpoints("greedy-1"))
        assert endpoints == {"10.244.0.11:80"}, f"a name leads to the host: {endpoints}"

    return no_address_of_the_host_serves


# Services and files


@attack(AUTHOR, "services of one file", seconds=20)
def sixty_thousand_services(arena: Arena) -> None:
    arena.file(services(range(60_000)))


@attack(AUTHOR, "services of one file", seconds=20, dataplane="nftables")
def sixty_thousand_services_with_nftables(arena: Arena) -> None:
    arena.file(services(range(60_000)))


@attack(AUTHOR, "services of one file", seconds=6)
def three_thousand_services(arena: Arena) -> None:
    arena.file(services(range(3_000)))


@attack(AUTHOR, "files", seconds=12)
def ten_thousand_files(arena: Arena) -> None:
    for number in range(9_900):
        arena.file(service(number), f"greedy-{number}.yaml")


@attack(AUTHOR, "readings", seconds=8)
def a_file_that_changes_fifty_times_a_second(arena: Arena) -> None:
    arena.rewritten(50, *(services(range(n, n + 200)) for n in (0, 100)))


@attack(AUTHOR, "problems")
def a_file_of_sixty_megabytes_of_mistakes(arena: Arena) -> None:
    arena.text("apiVersion: vipd/v1\nservices:\n" + "- {nmae: x, adress: 10.96.0.1, prots: 80}\n" * 1_400_000)


@attack(AUTHOR, "values of YAML")
def aliases_that_grow(arena: Arena) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    arena.text("\n".join(lines) + "\n" + "- [" * 10_000)
    arena.text("x: " + "[" * 1_000_000, "greedy-deep.yaml")


def backends(first: int, number: int) -> str:
    return f"[{', '.join(f'10.101.{n >> 8}.{n & 255}' for n in range(first, first + number))}]"


@attack(AUTHOR, "endpoints of one service", seconds=12)
def services_of_many_backends_that_change(arena: Arena) -> None:
    arena.rewritten(1, *(services(range(5), backends(first, 9_000)) for first in (0, 5_000)))


@attack(AUTHOR, "tables of source-hash", seconds=12, dataplane="nftables")
def hashed_services_of_many_backends_that_change(arena: Arena) -> None:
    hashed = ", balance: source-hash"
    arena.rewritten(1, *(services(range(20), backends(first, 3_000), more=hashed) for first in (0, 1_000)))


@attack(AUTHOR, "what is no file", seconds=4)
def pipes_and_links_among_the_files(arena: Arena) -> None:
    directory = arena.daemon.services_dir
    os.mkfifo(directory / "greedy-pipe.yaml")
    (directory / "greedy-link.yaml").symlink_to("/dev/zero")
    (directory / "greedy-loop.yaml").symlink_to("greedy-loop.yaml")
    (directory / "greedy-socket.yaml").symlink_to(arena.daemon.socket)
    (directory / "greedy-directory.yaml").mkdir()
    with (directory / "greedy-sparse.yaml").open("wb") as file:
        file.truncate(20 << 30)
    names = ("pipe", "link", "loop", "socket", "sparse")
    for name in names:
        arena.attack.callback((directory / f"greedy-{name}.yaml").unlink)
    arena.attack.callback((directory / "greedy-directory.yaml").rmdir)


@attack(AUTHOR, "counting of flows")
def thousands_of_services_by_least_connections(arena: Arena) -> None:
    arena.file(services(range(2_000), backends(1, 20), more=", balance: least-connections"))


# Addresses and ports


@attack(AUTHOR, "others' addresses", seconds=4)
def backends_at_others_future_addresses(arena: Arena) -> Callable[[], None]:
    others = ", ".join(f"{VIP[:-4]}{n >> 8}.{n & 255}" for n in range(201 * 256, 236 * 256))
    arena.file(service(1, f"[{others}]"))
    arena.file(service(2, f"[{VIP}15, {VIP}16, {VIP}17]"), "greedy-2.yaml")
    arena.wait_for(lambda: "greedy-2.yaml" in arena.problems() or bool(arena.daemon.endpoints("greedy-2")))

    def address_is_not_taken() -> None:
        arena.another_service(16, arena.good.ipv4)
        arena.wait_for_greeting(16)

    return address_is_not_taken


@attack(AUTHOR, "addresses that vipd needs", seconds=4, etcd=True)
def a_service_at_the_addresses_of_etcd_and_names(arena: Arena) -> Callable[[], None]:
    text = ""
    for number, key in enumerate(("address", "external_addresses", "load_balancer_addresses")):
        for port in ("2379", "53/udp", "53/tcp"):
            name = f"greedy-{number}-{port.replace('/', '-')}"
            text += f"- {{name: {name}, {key}: {arena.servers.ipv4}, ports: {port}, backends: [{BAD}]}}\n"
    for number, line in enumerate(text.splitlines(keepends=True)):
        arena.file(line, f"greedy-{number}.yaml")

    def none_serves() -> None:
        names = {s["name"] for s in arena.daemon.get("services")["services"]}
        assert not {name for name in names if name.startswith("greedy")}, f"claimed: {names}"

    return none_serves


@attack(AUTHOR, "listeners", seconds=8)
def thousands_of_health_ports(arena: Arena) -> Callable[[], None]:
    text = "".join(service(n, more=f", health_port: {11000 + n}") for n in range(5_000))
    arena.file(text)

    def port_of_another_answers() -> None:
        arena.another_service(17, arena.good.ipv4, ", health_port: 10990")
        arena.wait_for_greeting(17)
        arena.wait_for_health_port(10990)

    return port_of_another_answers


@attack(AUTHOR, "routes", seconds=8)
def thousands_of_announced_addresses(arena: Arena) -> None:
    arena.file(services(range(5_000), more=", announce: {by: routes, addresses: all}"))
