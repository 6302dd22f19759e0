"""What each source may claim of a host: its administrators write files and use vipctl, others use etcd."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.inside import Vipd, running

ETCD = {"endpoints": ["http://etcd:2379"]}
WEB: dict[str, Any] = {"name": "web", "address": "10.96.0.1", "ports": [80], "backends": ["10.244.0.5"]}
SOURCES = "file cli etcd"
Json = dict[str, Any]


def node_port(number: int, protocol: str = "tcp") -> Json:
    return {"ports": [{"port": 80, "protocol": protocol, "node_port": number}]}


def file_of(spec: Json) -> str:
    return yaml.safe_dump({"apiVersion": "vipd/v1", "services": [spec]})


def write(vipd: Vipd, spec: Json) -> None:
    (vipd.services_dir / "web.yaml").write_text(file_of(spec))


async def from_file(vipd: Vipd, spec: Json) -> list[str]:
    """The problems that a service has as one of a file."""
    write(vipd, spec)
    await vipd.reload()
    (files, *_) = (await vipd.status())["sources"]
    vipd.declare(name="web.yaml")
    await vipd.reload()
    # A file that has just lost its services is read once more before they go.
    await vipd.until(lambda: "web" not in vipd.kernel.names())
    return [re.sub(r"^.*/web\.yaml:\d+: ", "", problem) for problem in files["problems"]]


async def from_vipctl(vipd: Vipd, spec: Json) -> list[str]:
    """Those that it has when it is added."""
    answer = await vipd.ask("POST", "/v1/services?dry_run=1", {"service": spec})
    return [problem.removeprefix("cli: ") for problem in answer.body.get("error", {}).get("problems", ())]


async def from_etcd(vipd: Vipd, spec: Json) -> list[str]:
    """Those of a key."""
    vipd.etcd.put("/vipd/v1/services/web", json.dumps({k: v for k, v in spec.items() if k != "name"}))
    await asyncio.sleep(5)
    (*_, etcd) = (await vipd.status())["sources"]
    vipd.etcd.delete("/vipd/v1/services/web")
    await asyncio.sleep(5)
    return [problem.partition(": ")[2] for problem in etcd["problems"]]


def refusals(specs: dict[str, Json], settings: Json) -> dict[str, dict[str, list[str]]]:
    """The problems of each service from each source; of those that may claim it none."""

    async def of(vipd: Vipd, spec: Json) -> dict[str, list[str]]:
        ways = {"file": from_file, "cli": from_vipctl, "etcd": from_etcd}
        found = {source: await way(vipd, {**WEB, **spec}) for source, way in ways.items()}
        return {source: problems for source, problems in found.items() if problems}

    async def story(vipd: Vipd) -> dict[str, dict[str, list[str]]]:
        return {name: await of(vipd, spec) for name, spec in specs.items()}

    return running(story, simulated=True, etcd={**ETCD, "max_removal": "100%"}, **settings)


LOCAL = {"external_addresses": ["203.0.113.10"], "traffic_policy": {"external": "local"}}
ANNOUNCED = {"external_addresses": ["203.0.113.10"], "announce": "routes"}
CASES: dict[str, tuple[Json, Json, str, str]] = {
    "any address": ({}, {}, "", ""),
    "an address outside": (
        {},
        {"allowed_addresses": "10.97.0.0/16"},
        SOURCES,
        "web: 10.96.0.1 lies outside allowed_addresses; choose another address, or widen allowed_addresses",
    ),
    "an address outside for etcd": (
        {},
        {"allowed_addresses": {"etcd": ["10.97.0.0/16"]}},
        "etcd",
        "web: 10.96.0.1 lies outside allowed_addresses",
    ),
    "only of the other family": (
        {"address": ["10.96.0.1", "fd00::1"]},
        {"allowed_addresses": "10.0.0.0/8"},
        SOURCES,
        "web: fd00::1 lies outside",
    ),
    "an external address outside": (
        {"external_addresses": ["203.0.113.1"]},
        {"allowed_addresses": "10.96.0.0/16"},
        SOURCES,
        "web: 203.0.113.1 lies outside",
    ),
    "this host's own": (
        {"address": "FD00:10:0::1", "backends": []},
        {"allowed_addresses": "fd00::/8"},
        SOURCES,
        "web: fd00:10::1 is an address of this host itself; choose an address that no host has; for a port",
    ),
    "announced": (ANNOUNCED, {}, SOURCES, "web: 203.0.113.10 may not be announced"),
    "announced, allowed": (ANNOUNCED, {"announce_addresses": "203.0.113.0/24"}, "", ""),
    "announced, in another network": (
        ANNOUNCED,
        {"announce_addresses": "203.0.114.0/24"},
        SOURCES,
        "web: 203.0.113.10 may not",
    ),
    "a limit of kube-proxy": (
        {"limits": {"connections": 9}},
        {"compat": "kube-proxy"},
        SOURCES,
        "web: kube-proxy's chains have no place for limits",
    ),
    "a CA file": (
        {"check": {"type": "https", "ca": "/etc/ssl/certs/ca-certificates.crt"}},
        {},
        "etcd",
        "web: ca names a file of this host, which a service in etcd may not; leave it out",
    ),
    "https": ({"check": "https"}, {}, "", ""),
    "a check that changes something": (
        {"check": {"type": "http", "method": "POST"}},
        {},
        "etcd",
        "web: a check of etcd's may use GET and HEAD, not POST",
    ),
    "a check by HEAD": ({"check": {"type": "http", "method": "HEAD"}}, {}, "", ""),
    "a program": (
        {"check": {"type": "exec", "command": ["/bin/true"]}},
        {},
        "cli etcd",
        "web: checks that run",
    ),
    **{
        f"node port {n}/{protocol}": (
            node_port(n, protocol),
            {},
            "etcd",
            f"web: node port {n}/{protocol} lies outside node_port_range (30000-32767 for etcd)",
        )
        for n, protocol in ((1, "tcp"), (22, "udp"), (29999, "sctp"), (32768, "tcp"), (65535, "udp"))
    },
    "a health port": (
        {**LOCAL, "health_port": 29999},
        {},
        "etcd",
        "web: health port 29999/tcp lies outside node_port_range (30000-32767 for etcd)",
    ),
    "a node port of kube-proxy": (node_port(22), {"compat": "kube-proxy"}, "", ""),
    "the first node port": (node_port(30000), {}, "", ""),
    "the last node port": (node_port(32767), {}, "", ""),
    "a range for all": (node_port(443), {"node_port_range": "30000-30010"}, SOURCES, "web: node port 443"),
    "any port": (node_port(443), {"node_port_range": "any"}, "", ""),
    "a single port": (node_port(443), {"node_port_range": [443, "30000-30010"]}, "", ""),
    "a range of cli": (node_port(22), {"node_port_range": {"cli": "443"}}, "cli etcd", "web: node port 22"),
    "a range of etcd": (node_port(443), {"node_port_range": {"etcd": "22"}}, "etcd", "web: node port 443"),
    "many backends outside": (
        {"backends": [f"10.245.0.{n}" for n in range(1, 101)]},
        {"allowed_backends": "10.244.0.0/16"},
        SOURCES,
        "web: backends 10.245.0.1, 10.245.0.2, 10.245.0.3 and 97 more are outside allowed_backends",
    ),
    "a name": (
        {"backends": ["dns:web.internal"]},
        {},
        "etcd",
        "web: backend dns:web.internal: allowed_names",
    ),
    "a name of which none is allowed": (
        {"backends": ["dns:web.internal"]},
        {"allowed_names": {"cli": ["b.internal"], "etcd": ["internal"], "file": ["web.internal"]}},
        "cli",
        "web: backend dns:web.internal: allowed_names has no such name",
    ),
    "a name of the fallback": (
        {"backends": ["dns:b.internal"], "fallback": {"backends": ["dns:web.internal"]}},
        {"allowed_names": {"etcd": ["b.internal"], "file": ["internal"], "cli": ["internal"]}},
        "etcd",
        "web: backend dns:web.internal: allowed_names has no such name",
    ),
}
"""A service, settings, the sources that may not have it, and how the problem begins."""
LINK_LOCAL = "169.254.169.254"
BACKENDS: tuple[tuple[str, object, str], ...] = (
    ("10.245.0.1", [], ""),
    (LINK_LOCAL, [], "etcd"),
    (LINK_LOCAL, ["0.0.0.0/0"], "etcd"),
    (LINK_LOCAL, ["169.254.169.254/32"], ""),
    ("10.245.0.1", ["10.244.0.0/16"], SOURCES),
    ("10.244.1.1", ["10.244.0.0/16"], ""),
    ("10.245.0.1", {"etcd": ["10.244.0.0/16"]}, "etcd"),
)
CASES |= {
    f"{kind} {address} of {allowed}": (
        {"backends": [], kind: [address] if kind == "backends" else {"backends": [address]}},
        {"allowed_backends": allowed} if allowed else {},
        refused,
        f"web: backend {address} is ",
    )
    for kind in ("backends", "fallback")
    for address, allowed, refused in BACKENDS
}


@pytest.mark.parametrize("third", range(3))
def test_who_may_claim_what(third: int) -> None:
    by_settings: dict[str, dict[str, Json]] = {}
    for name, (spec, settings, _, _) in CASES.items():
        by_settings.setdefault(json.dumps(settings), {})[name] = spec
    found = {}
    for text, specs in list(by_settings.items())[third::3]:
        found.update(refusals(specs, json.loads(text)))
    wrong = {}
    for name, problems in found.items():
        *_, sources, start = CASES[name]
        if set(problems) != set(sources.split()) or not all(
            p[0].startswith(start) for p in problems.values()
        ):
            wrong[name] = problems
    assert wrong == {}


NETWORKS = ["10.99.0.7/32", "10.96.64.0/24", "10.96.0.0/16", "10.98.0.0/24", "10.98.1.0/24", "fd00::/64"]
INSIDE = ("10.96.0.0", "10.96.255.255", "10.99.0.7", "10.98.0.255", "10.98.1.0", "10.98.1.255", "fd00::1")
BEYOND = ("10.95.255.255", "10.97.0.0", "10.99.0.8", "10.98.2.0", "0.0.0.1", "fd00::1:0:0:0:0", "::10.96.0.1")


def test_networks_hold_their_first_and_last_address() -> None:
    async def story(vipd: Vipd) -> set[str]:
        tried = {
            a: await from_vipctl(vipd, {**WEB, "address": a, "backends": []}) for a in (*INSIDE, *BEYOND)
        }
        return {address for address, problems in tried.items() if not problems}

    assert running(story, allowed_addresses=NETWORKS) == set(INSIDE)


SSHD = ("tcp", "0.0.0.0", 22, "the SSH server of this host", True)
FACTS: dict[str, tuple[Json, Json, str]] = {
    "a broadcast address": (
        {"address": "10.0.1.255"},
        {"reserved_addresses": {"10.0.1.255": "the broadcast address of 10.0.1.0/24 on eth0"}},
        "web: 10.0.1.255 is the broadcast address",
    ),
    "the SSH server": (
        node_port(22),
        {"sockets": [SSHD]},
        "web: node port 22/tcp is the port of the SSH server of this host; choose another",
    ),
    "its UDP port": (node_port(22, "udp"), {"sockets": [SSHD]}, ""),
    "a program": (
        node_port(8080),
        {"sockets": [("tcp", "0.0.0.0", 8080, "nginx")]},
        "web: node port 8080/tcp is in use: nginx listens here",
    ),
    **{
        f"the SSH server on {address}": (
            node_port(22),
            {"sockets": [("tcp", address, 22, "the SSH server", True)]},
            "web: node port 22/tcp" if refused else "",
        )
        for address, refused in (
            ("::", True),
            ("192.0.2.1", True),
            ("127.0.0.1", False),
            ("2001:db8::1", False),
        )
    },
    "a page of vipd": (
        {
            "external_addresses": ["203.0.113.1"],
            "traffic_policy": {"external": "local"},
            "health_port": 30080,
        },
        {"sockets": [("tcp", "0.0.0.0", 30080, "vipd itself (status_page)", True)]},
        "web: health port 30080/tcp is the port of vipd itself (status_page)",
    ),
}
"""A service, what the host has, and how its problem begins; empty: it may."""


def test_nobody_takes_what_the_host_needs() -> None:
    found = {}
    for name, (spec, facts, _) in FACTS.items():

        async def story(vipd: Vipd, spec: Json = spec) -> list[str]:
            return await from_vipctl(vipd, {**WEB, **spec})

        def prepare(vipd: Vipd, facts: Json = facts) -> None:
            vipd.facts |= facts

        found[name] = running(story, prepare)
    wrong = {n: f for n, f in found.items() if not (f[0].startswith(FACTS[n][2]) if FACTS[n][2] else f == [])}
    assert wrong == {}


def test_what_serves_already_is_held_to_settings_and_not_to_what_the_host_has_meanwhile() -> None:
    async def story(vipd: Vipd) -> None:
        await vipd.add({**WEB, **node_port(8080), "name": "here", "address": "10.0.1.1"})
        vipd.facts |= {"gateways": {"10.0.1.1": "eth0"}, "sockets": [("tcp", "0.0.0.0", 8080, "nginx")]}
        await asyncio.sleep(120)
        change = {"service": {"backends": ["10.244.0.6"]}}
        assert (await vipd.ask("PATCH", "/v1/services/here", change)).status == 200, "what it has already"
        taken = {"service": {"ports": [{"port": 80, "node_port": 8081}]}}
        vipd.facts["sockets"] = [("tcp", "0.0.0.0", 8081, "nginx")]
        await asyncio.sleep(120)
        assert (await vipd.ask("PATCH", "/v1/services/here", taken)).status == 422, "what it claims anew"
        assert "here" in vipd.kernel.names()

    async def narrowed(vipd: Vipd) -> None:
        assert vipd.kernel.names() == set(), "the settings count for all"

    running(story, simulated=True)

    def stored(vipd: Vipd) -> None:
        (vipd.state_dir / "services.yaml").write_text(file_of(WEB))

    running(narrowed, stored, allowed_backends="10.0.0.0/24")


def test_a_host_that_gets_the_address_of_a_service_keeps_the_service_from_no_change(tmp_path: Path) -> None:
    async def add(vipd: Vipd) -> None:
        assert (await vipd.add(WEB)).status == 200

    async def change(vipd: Vipd) -> None:
        assert vipd.kernel.names() == {"web"}
        backends = {"service": {"backends": ["10.244.0.6"]}}
        assert (await vipd.ask("PATCH", "/v1/services/web", backends)).status == 200
        more = {"service": {"address": ["10.96.0.1", "10.96.0.2"]}}
        assert (await vipd.ask("PATCH", "/v1/services/web", more)).status == 422, "what it claims anew"

    running(add, root=tmp_path)
    running(change, root=tmp_path, host_addresses=["10.96.0.1", "10.96.0.2"])


def test_what_was_refused_is_looked_at_until_the_host_is_mended() -> None:
    async def story(vipd: Vipd) -> None:
        assert vipd.kernel.names() == set()
        vipd.facts["sockets"] = []
        await asyncio.sleep(120)
        assert vipd.kernel.names() == {"web"}

    def prepare(vipd: Vipd) -> None:
        vipd.facts["sockets"] = [("tcp", "0.0.0.0", 8080, "nginx")]
        write(vipd, {**WEB, **node_port(8080)})

    running(story, prepare, simulated=True)


def warned(addresses: list[str], **facts: Any) -> list[str]:
    """What status warns of a service with these addresses on a host with an own address in that subnet."""

    async def story(vipd: Vipd) -> list[str]:
        return list((await vipd.status())["warnings"])

    def prepare(vipd: Vipd) -> None:
        vipd.facts |= facts
        write(vipd, {**WEB, "address": addresses})

    return [line.partition(";")[0] for line in running(story, prepare)]


MANY = [f"10.0.1.{n}" for n in range(1, 31)]


def test_of_what_others_have_status_warns() -> None:
    live = "02:00:00:00:00:01 on eth0"
    assert warned(["10.0.1.2"], neighbours={"10.0.1.2": live}) == [
        f"service web: 10.0.1.2: another host has it ({live}) and loses what passes here"
    ]
    assert warned(["10.0.1.2"]) == []
    lines = warned([f"10.0.1.{n}" for n in range(1, 10)], neighbours=dict.fromkeys(MANY, live))
    assert len(lines) == 1, "all addresses of a service make one line"
    assert lines[0].startswith("service web: 10.0.1.1, 10.0.1.2, 10.0.1.3 and 6 more: ")


def test_a_neighbour_that_goes_is_warned_of_for_a_while() -> None:
    async def story(vipd: Vipd) -> None:
        assert len((await vipd.status())["warnings"]) == 1
        vipd.facts["neighbours"] = {}
        await asyncio.sleep(60)
        assert len((await vipd.status())["warnings"]) == 1, "it may be back at once"
        await asyncio.sleep(3600)
        assert (await vipd.status())["warnings"] == []

    def prepare(vipd: Vipd) -> None:
        vipd.facts["neighbours"] = {"10.96.0.1": "02:00:00:00:00:01 on eth0"}
        write(vipd, WEB)

    running(story, prepare, simulated=True)


def test_however_many_ports_one_author_names_another_one_finds_one() -> None:
    def service(author: str, number: int) -> str:
        port = {"port": 53, "protocol": "udp", "node_port": 30000 + number}
        return json.dumps({"address": f"10.96.{number >> 8}.{number & 255}", "ports": [port]})

    async def story(vipd: Vipd) -> None:
        def names(author: str) -> set[str]:
            return {name for name in vipd.kernel.names() if name.startswith(author)}

        for number in range(30):
            vipd.etcd.put(f"/vipd/v1/services/greedy/{number}", service("greedy", number))
        vipd.etcd.put("/vipd/v1/services/modest/400", service("modest", 400))
        await asyncio.sleep(10)
        assert (len(names("greedy")), names("modest")) == (10, {"modest/400"})
        (*_, etcd) = (await vipd.status())["sources"]
        assert "has more than 10 ports of this host, the most of one author" in etcd["problems"][0]
        for number in range(2):
            added = {**WEB, "name": f"w{number}", "address": f"10.97.0.{number}", **node_port(31000 + number)}
            assert (await vipd.add(added)).status == 200, "vipctl's author is another one"
        kept = sorted(names("greedy"))
        vipd.etcd.delete(f"/vipd/v1/services/{kept[0]}")
        await asyncio.sleep(10)
        assert len(names("greedy")) == 10, "a port that is given back can be used"
        assert set(kept[1:]) < names("greedy")

    running(story, simulated=True, etcd=ETCD, node_ports_per_author=10)


@pytest.mark.parametrize(("number", "status"), [(2, 200), (3, 422)])
def test_a_service_with_a_port_too_many_is_refused(number: int, status: int) -> None:
    async def story(vipd: Vipd) -> None:
        for n in range(number):
            added = await vipd.add(
                {**WEB, "name": f"s{n}", "address": f"10.96.0.{n + 1}", **node_port(30000 + n)}
            )
        assert added.status == status
        assert status == 200 or "vipctl's services have more than 2 ports" in str(added.body)
        change = {"service": {"backends": ["10.0.0.1"]}}
        assert (await vipd.ask("PATCH", "/v1/services/s1", change)).status == 200, "its port is not new"
        assert (await vipd.add({**WEB, "name": "other", "address": "10.96.1.1"})).status == 200

    running(story, node_ports_per_author=2)
