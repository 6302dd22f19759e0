"""Health ports and `/healthz` of a real daemon, asked as an outer load balancer and a probe would."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.lab.daemon import Daemon
from tests.lab.namespace_names import new_prefix
from tests.lab.node import Node
from tests.lab.topology import add_addresses, delete_nodes, ip
from tests.observe.asking import CLOSED, PATIENCE_SECONDS, Answer, ask

pytestmark = pytest.mark.root

PORT, OTHER_PORT = 32100, 32101
HEALTHZ = "http://127.0.0.1:10256/healthz"
ONE, TWO, SIX, ELSEWHERE = "10.244.0.5", "10.244.0.6", '"fd00:244::5"', "10.244.9.9"
LOCAL = "traffic_policy: {external: local}"


class FewDescriptors(Node):
    """Its programs may have 160 open files, of which vipd listens on 20 sockets."""

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command line below a lower limit."""
        return super().inside(["prlimit", "--nofile=160:160", *argv])


@contextlib.contextmanager
def made(kind: type[Node] = Node) -> Iterator[Node]:
    """A host with backends' addresses on its loopback device."""
    node = kind(f"{new_prefix()}-health", "host", "10.1.2.3", "fd00:1::3")
    ip("netns", "add", node.namespace)
    try:
        addresses = (f"{ONE}/32", f"{TWO}/32", f"{node.ipv4}/32", f"{node.ipv6}/128", "fd00:244::5/128")
        add_addresses(node.namespace, "lo", *addresses)
        yield node
    finally:
        delete_nodes(node)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with iptables-restore, which fails while there is a file `broken` beside it."""
    directory = tmp_path_factory.mktemp("tools")
    program = directory / "iptables-restore"
    fails = f'[ -e {directory}/broken ] && {{ echo "no rules today" >&2; exit 1; }}'
    program.write_text(f'#!/bin/sh\n{fails}\nexec {shutil.which("iptables-restore")} "$@"\n')
    program.chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def vipd(tools: Path) -> Iterator[Daemon]:
    """One daemon for all; each test declares what it needs."""
    with made() as host:
        equipped = host.with_environment(PATH=f"{tools}:/usr/sbin:/usr/bin:/sbin:/bin")
        with Daemon(equipped, health_address="127.0.0.1:10256") as daemon:
            yield daemon


def service(name: str, number: int, backends: str, *more: str, port: int = PORT) -> str:
    named = f"name: {name}, " if name else ""
    keys = ", ".join([f"ports: [80, 443], backends: [{backends}], health_port: {port}", *more])
    return f"  - {{{named}address: 10.96.0.{number}, {keys}}}\n"


def health(vipd: Daemon, address: str = "10.1.2.3", port: int = PORT, method: str = "GET") -> Answer:
    return ask(vipd.host, f"http://{address}:{port}/", method)


def status(vipd: Daemon, address: str = "10.1.2.3", port: int = PORT) -> int:
    return health(vipd, address, port).status


def wait_for(vipd: Daemon, status: int, endpoints: int, port: int = PORT) -> None:
    def seen() -> tuple[int, object]:
        answer = health(vipd, port=port)
        return answer.status, answer.json.get("localEndpoints")

    vipd.wait_until(seen, (status, endpoints), PATIENCE_SECONDS)


COUNTED = {
    "two on this host and one elsewhere": (f"{ONE}, {TWO}, {ELSEWHERE}", (LOCAL,), 2),
    "one address at two ports": (f"'{ONE}:80', '{ONE}:81'", (LOCAL,), 1),
    "elsewhere alone": (ELSEWHERE, (LOCAL,), 0),
    "none": ("", (LOCAL,), 0),
    "one drains": (f"{{address: {ONE}, state: drain}}, {TWO}", (LOCAL,), 1),
    "one is down": (f"{{address: {ONE}, state: down}}, {TWO}", (LOCAL,), 1),
    "one has weight 0": (f"{{address: {ONE}, weight: 0}}, {TWO}", (LOCAL,), 1),
    "the last one drains, and gets flows as a last resort": (
        f"{{address: {ONE}, state: drain}}",
        ("traffic_policy: {external: local, internal: local}",),
        0,
    ),
    "a local one counts under every policy": (f"{ONE}, {ELSEWHERE}", (), 1),
    "both families": (f"{ONE}, {SIX}, {ELSEWHERE}", (LOCAL, 'external_addresses: ["fd00:96::10"]'), 2),
    "a fallback that does not serve": (ONE, (LOCAL, f"fallback: {TWO}"), 1),
    "a fallback that serves": ("", (LOCAL, f"fallback: {TWO}"), 1),
    "a fallback beside a backend elsewhere": (ELSEWHERE, (LOCAL, f"fallback: {TWO}"), 0),
}
"""Backends, further keys, and how many ready ones of this host the health port tells."""


def test_what_counts_as_a_ready_backend_of_this_host(vipd: Daemon) -> None:
    declared = [
        service(f"s{n}", n + 1, backends, *more, port=33000 + n)
        for n, (backends, more, _) in enumerate(COUNTED.values())
    ]
    declared.append("  - {name: without, address: 10.96.0.200, ports: 80, backends: [10.244.0.5]}\n")
    vipd.declare("".join(declared))
    last = 33000 + len(COUNTED) - 1
    vipd.wait_until(lambda: health(vipd, port=last).status != CLOSED, True, PATIENCE_SECONDS)
    answers = {case: health(vipd, port=33000 + n) for n, case in enumerate(COUNTED)}
    wanted = {case: (200 if number else 503, number, str(number)) for case, (*_, number) in COUNTED.items()}
    assert {
        case: (a.status, a.json["localEndpoints"], a.headers["x-load-balancing-endpoint-weight"])
        for case, a in answers.items()
    } == wanted
    listening = vipd.host.run("ss", "-Hltn").stdout
    assert f":{last + 1} " not in listening, "a service without a health port has none"


def test_the_body_is_kube_proxys(vipd: Daemon) -> None:
    bodies = {"shop/web": ("shop", "web"), "web": ("", "web"), "a/b/c": ("a", "b/c")}
    declared = [service(name, n, ONE, port=33100 + n) for n, name in enumerate(bodies, 1)]
    declared.append(
        f"  - {{address: 10.96.0.9, ports: [80/tcp], backends: [{ONE}], health_port: 33109}}\n"
        f'  - {{address: "fd00::10", ports: [80/tcp], backends: [{SIX}], health_port: 33110}}\n'
    )
    vipd.declare("".join(declared))
    wanted = {33100 + n: names for n, names in enumerate(bodies.values(), 1)}
    wanted |= {33109: ("", "10.96.0.9:80/tcp"), 33110: ("", "[fd00::10]:80/tcp")}
    vipd.wait_until(lambda: {health(vipd, port=port).status for port in wanted}, {200}, PATIENCE_SECONDS)
    for port, (namespace, name) in wanted.items():
        answer = health(vipd, port=port)
        assert answer.json == {
            "service": {"namespace": namespace, "name": name},
            "localEndpoints": 1,
            "serviceProxyHealthy": True,
        }
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_path_by_get_and_head_one_answer_for_a_connection(vipd: Daemon) -> None:
    vipd.declare(service("shop/web", 10, ONE))
    wait_for(vipd, 200, 1)
    for address in ("10.1.2.3", "127.0.0.1", "[fd00:1::3]", "[::1]"):
        assert ask(vipd.host, f"http://{address}:{PORT}/a/b?c=d").status == 200
    head = health(vipd, method="HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["x-load-balancing-endpoint-weight"] == "1"
    assert head.headers["connection"] == "close"
    assert health(vipd, method="DELETE").status == 405
    assert ask(vipd.host, HEALTHZ).status == ask(vipd.host, HEALTHZ.replace("healthz", "livez")).status == 200
    assert ask(vipd.host, "http://127.0.0.1:10256/v1/status").status == 404
    assert ask(vipd.host, HEALTHZ, "POST").status == 405


def test_ports_follow_the_services(vipd: Daemon) -> None:
    vipd.declare(service("web", 10, ONE) + service("kept", 11, ONE, port=OTHER_PORT))
    wait_for(vipd, 200, 1)
    wait_for(vipd, 200, 1, OTHER_PORT)
    listener = vipd.host.run("ss", "-Hltne", f"sport = :{OTHER_PORT}").stdout
    vipd.declare(service("web", 10, ELSEWHERE) + service("kept", 11, ONE, port=OTHER_PORT))
    wait_for(vipd, 503, 0)
    vipd.declare(service("web", 10, ONE, port=PORT + 9) + service("kept", 11, ONE, port=OTHER_PORT))
    wait_for(vipd, 200, 1, PORT + 9)
    assert health(vipd).status == CLOSED
    assert vipd.host.run("ss", "-Hltne", f"sport = :{OTHER_PORT}").stdout == listener, (
        "a port that is wanted still was reopened: a check may be refused"
    )
    vipd.declare("")
    for port in (PORT + 9, OTHER_PORT):
        vipd.wait_until(partial(status, vipd, port=port), CLOSED, PATIENCE_SECONDS)


def test_503_while_vipd_cannot_write_and_200_when_it_can_again(vipd: Daemon, tools: Path) -> None:
    vipd.declare(service("web", 10, ONE))
    wait_for(vipd, 200, 1)
    (tools / "broken").touch()
    vipd.write(service("web", 10, f"{ONE}, {ELSEWHERE}"))
    vipd.wait_until(lambda: ask(vipd.host, HEALTHZ).status, 503, PATIENCE_SECONDS)
    assert "no rules today" in ask(vipd.host, HEALTHZ).json["message"]
    answer = health(vipd)
    assert (answer.status, answer.json["localEndpoints"]) == (503, 1)
    assert answer.json["serviceProxyHealthy"] is False
    (tools / "broken").unlink()
    vipd.wait_until(lambda: ask(vipd.host, HEALTHZ).status, 200, PATIENCE_SECONDS)
    wait_for(vipd, 200, 1)


def test_503_while_the_host_is_in_maintenance(vipd: Daemon) -> None:
    vipd.declare(service("web", 10, ONE))
    wait_for(vipd, 200, 1)
    vipd.vipctl("host", "drain")
    wait_for(vipd, 503, 1)
    assert ask(vipd.host, HEALTHZ).status == 200, "vipd itself is well"
    vipd.vipctl("host", "resume")
    wait_for(vipd, 200, 1)


def test_503_for_a_quarantined_service_alone(vipd: Daemon, tools: Path) -> None:
    program = tools / "iptables-restore"
    before = program.read_text()
    refuses = (
        "input=$(cat)\ncase $input in *10.244.0.66*) echo 'line 1 failed: no such match' >&2; exit 1;; esac"
    )
    real = f'{refuses}\necho "$input" | {shutil.which("iptables-restore")} "$@"\n'
    program.write_text(f"#!/bin/sh\n{real}")
    try:
        good, bad = service("web", 10, ONE, port=OTHER_PORT), service("bad", 11, f"{ONE}, 10.244.0.66")
        vipd.write(good + bad)
        vipd.wait_until(lambda: list(vipd.status()["quarantined"]), ["bad"], PATIENCE_SECONDS)
        wait_for(vipd, 503, 1)
        assert health(vipd).json["serviceProxyHealthy"] is False
        wait_for(vipd, 200, 1, OTHER_PORT)
        assert ask(vipd.host, HEALTHZ).status == 200
    finally:
        program.write_text(before)
    vipd.declare(good)


def test_busy_ports_are_warnings_and_had_later_and_others_are_served(vipd: Daemon) -> None:
    rival = vipd.host.serve(tcp=(PORT,))
    vipd.declare(service("shop/web", 10, ONE) + service("other", 11, ONE, port=OTHER_PORT))
    vipd.wait_until(lambda: len(vipd.status()["warnings"]), 2, PATIENCE_SECONDS)
    four, six = vipd.status()["warnings"]
    busy = f"the health port of shop/web cannot listen on 0.0.0.0:{PORT}: Address already in use"
    assert four.startswith(f"{busy}; hint: ss -ltnp shows who does, and vipd tries again")
    assert f"the health port of shop/web cannot listen on [::]:{PORT}" in six
    wait_for(vipd, 200, 1, OTHER_PORT)
    vipd.declare(service("other", 11, ONE, port=OTHER_PORT))
    vipd.wait_until(lambda: vipd.status()["warnings"], [], PATIENCE_SECONDS)
    vipd.declare(service("shop/web", 10, ONE))
    vipd.wait_until(lambda: len(vipd.status()["warnings"]), 2, PATIENCE_SECONDS)
    rival.kill()
    rival.wait(PATIENCE_SECONDS)
    wait_for(vipd, 200, 1)
    vipd.wait_until(lambda: vipd.status()["warnings"], [], PATIENCE_SECONDS)


def test_addresses_that_are_named_and_a_health_address_that_cannot_be_had() -> None:
    """A link-local address is left out: it cannot be had without its interface."""
    with made() as host:
        add_addresses(host.namespace, "lo", "fe80::1/64")
        settings = {"node_port_addresses": ["10.1.2.3/32", "fe80::/64", "fd00:1::3/128"]}
        declared = service("web", 10, ONE)
        with Daemon(host, declared, health_address="192.0.2.77:8080", **settings) as daemon:
            daemon.wait_until(lambda: len(daemon.status()["warnings"]), 1, PATIENCE_SECONDS)
            (warning,) = daemon.status()["warnings"]
            assert "health_address cannot listen on 192.0.2.77:8080: Cannot assign" in warning
            assert "ss -ltnp" not in warning
            for address, wanted in {"10.1.2.3": 200, "[fd00:1::3]": 200, "127.0.0.1": CLOSED}.items():
                daemon.wait_until(partial(status, daemon, address), wanted, PATIENCE_SECONDS)
            daemon.stop()
            assert health(daemon).status == CLOSED


def test_an_author_has_a_share_of_the_ports_and_leaves_some_to_others() -> None:
    with made(FewDescriptors) as host, Daemon(host, log_level="info") as daemon:
        greedy = [service(f"g{n}", n, ONE, port=34000 + n) for n in range(1, 21)]
        daemon.write("".join(greedy), "greedy.yaml")
        daemon.wait_until(lambda: len(daemon.status()["warnings"]), 1, PATIENCE_SECONDS)
        daemon.declare(service("calm", 99, ONE, port=34099), "calm.yaml")
        wait_for(daemon, 200, 1, 34099)
        opened = [n for n in range(1, 21) if health(daemon, port=34000 + n).status == 200]
        assert 1 <= len(opened) < 20
        assert opened == list(range(1, len(opened) + 1)), "the first ones"
        (warning,) = daemon.status()["warnings"]
        beyond = f"the health port of g{len(opened) + 1} cannot listen on "
        assert warning.startswith(beyond)
        assert f"others of file:{daemon.services_dir}/greedy.yaml: it has " in warning
        assert daemon.log.count(beyond) == 1, "it is said once"
        assert json.loads(daemon.vipctl("list", "-o", "json").stdout)["services"]
