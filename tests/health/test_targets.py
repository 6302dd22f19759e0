"""Where a check asks a backend: at which port, by which protocol, and what has none."""

from __future__ import annotations

from dataclasses import replace

from tests.lab.inside import declare
from vipd.model.check_target import backends_without_check_port, check_targets
from vipd.model.service import Backend, Service

PORTS = "{port: 53, protocol: udp, name: dns}, {port: 80, name: web, target: 8080}, {port: 443, name: tls}"
ONLY_UDP = "{port: 53, protocol: udp, name: dns}"
PROGRAM = "{type: exec, command: [/bin/true]}"
ONE = "[10.244.0.1]"
HALF = "[10.244.0.1, {address: 10.244.0.2, ports: {dns: 5353}}]"
NO_PORT = "the check of 10.244.0.2 finds no tcp port: it serves dns alone"


def service(backends: str, check: str, ports: str = PORTS, more: str = "") -> str:
    return (
        "apiVersion: vipd/v1\nservices:\n  - name: names\n    address: 10.96.0.1\n"
        f"    ports: [{ports}]\n    backends: {backends}\n    check: {check}\n{more}"
    )


def asked(text: str) -> list[str]:
    """The targets of the only service, or why it is refused."""
    declared = declare(text)
    if declared.problems:
        return [problem.what for problem in declared.problems]
    return sorted(map(str, check_targets(declared.services[0]).values()))


TARGETS = {
    "the first port of its protocol is asked": {
        service(ONE, "tcp"): ["tcp 10.244.0.1:8080"],
        service(ONE, "http"): ["http 10.244.0.1:8080"],
        service(ONE, "https"): ["https 10.244.0.1:8080"],
        service(ONE, "{type: dns}"): ["dns 10.244.0.1:53"],
        service(ONE, "{type: udp, send: x}"): ["udp 10.244.0.1:53"],
        service(ONE, PROGRAM): ["exec 10.244.0.1:53"],
    },
    "a port of its own wins": {
        service(ONE, "{type: tcp, port: 9}"): ["tcp 10.244.0.1:9"],
        service("['10.244.0.1:81']", "tcp", "80"): ["tcp 10.244.0.1:81"],
        service("[{address: 10.244.0.1, ports: {tls: 8443}}]", "tcp"): ["tcp 10.244.0.1:8443"],
        service(ONE, "{type: tcp, port: 8053}", ONLY_UDP): ["tcp 10.244.0.1:8053"],
    },
    "what a check cannot ask is a problem, not silence: it would serve for ever, alive or dead": {
        service(HALF, "tcp"): [NO_PORT],
        service(HALF.replace("}}", "}, check: http}"), "none"): [NO_PORT],
        service(HALF, "{type: tcp, port: 9}"): ["tcp 10.244.0.1:9", "tcp 10.244.0.2:9"],
        service(HALF, PROGRAM): ["exec 10.244.0.1:53", "exec 10.244.0.2:5353"],
        service(HALF, "{type: dns}"): ["dns 10.244.0.1:53", "dns 10.244.0.2:5353"],
    },
    "a backend may have a check of its own, or none": {
        service(HALF.replace("}}", "}, check: none}"), "tcp"): ["tcp 10.244.0.1:8080"],
        service(HALF.replace("}}", "}, check: {type: http, port: 8081}}"), "tcp"): [
            "http 10.244.0.2:8081",
            "tcp 10.244.0.1:8080",
        ],
    },
    "the last resort is asked as other backends are": {
        service(
            "[]",
            "tcp",
            more="    fallback: {backends: [{address: 10.0.0.7, check: none}, 10.0.0.8, "
            "{address: 10.0.0.9, check: http}]}\n",
        ): ["http 10.0.0.9:8080", "tcp 10.0.0.8:8080"]
    },
    "an IPv6 address stands in brackets": {
        service("['fd00::1']", "https").replace("10.96.0.1", "'fd00:96::1'"): ["https [fd00::1]:8080"]
    },
}


def test_what_is_asked() -> None:
    wrong = {
        name: {text: seen for text in cases if (seen := asked(text)) != cases[text]}
        for name, cases in TARGETS.items()
    }
    assert {name: cases for name, cases in wrong.items() if cases} == {}


def test_a_check_that_finds_no_port_is_told_with_its_line_and_what_to_do() -> None:
    (problem,) = declare(service(HALF.replace(", {", ",\n      {"), "tcp")).problems
    assert (problem.line, problem.path) == (7, "services[0].backends[1]")
    assert problem.hint == "add port to the check, or give this backend check: none"


def declared(text: str) -> Service:
    return declare(text).services[0]


def test_a_last_resort_that_the_services_check_cannot_ask_is_no_problem() -> None:
    """It was none, and is better than a refusal; a check of its own must work."""
    odd = Backend("10.0.0.8", ports=(("dns", 53),))
    found = replace(declared(service(ONE, "tcp")), backends=(), fallback=(odd,))
    assert check_targets(found) == {}
    assert backends_without_check_port(found) == ()
    own = replace(found, fallback=(replace(odd, check=found.check),))
    assert backends_without_check_port(own) == own.fallback


def test_services_share_equal_targets() -> None:
    ways = (service(ONE, "{type: tcp, port: 8080}"), service(ONE, "tcp"))
    one, other = (check_targets(declared(text)) for text in ways)
    assert one == other
    assert len({*one.values(), *other.values()}) == 1
    assert check_targets(declared(service(ONE, "{type: tcp, interval: 9s}"))) != other
