"""Backends that names stand for: which of their addresses join a service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lab.inside import Vipd, running
from vipd.model.limits import BACKENDS

DNS, SRV = "dns:web.internal", "srv:_http._tcp.web.internal"
BOTH = "['10.96.0.10', 'fd00:96::10']"
MOST = 20
"""Addresses of a service that are told of by themselves."""


def web(backends: str, address: str = "10.96.0.10", name: str = "web", **keys: str) -> str:
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"  - {{name: {name}, address: {address}, ports: [80/tcp], backends: [{backends}]{more}}}\n"


def backends(vipd: Vipd, name: str = "web") -> list[str]:
    """Those that get flows."""
    return [
        str(e) for key, f in sorted(vipd.kernel.rules.items()) if key.service == name for e in f.endpoints
    ]


async def left_out(vipd: Vipd, name: str = "web") -> list[str]:
    """What is told of addresses that are left out."""
    return list((await vipd.service(name))["status"]["ignored"])


async def resolved(vipd: Vipd) -> None:
    """Names are asked for again."""
    await asyncio.sleep(40)


def joined(*blocks: str, names: dict[str, Any], facts: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The backends of web, and what is told of those left out."""

    def prepare(vipd: Vipd) -> None:
        vipd.names |= names
        vipd.facts |= facts or {}
        vipd.declare(*blocks)

    async def story(vipd: Vipd) -> tuple[list[str], list[str]]:
        await asyncio.sleep(5)
        return backends(vipd), await left_out(vipd)

    return running(story, prepare, simulated=True, **settings)


JOINS: dict[str, tuple[str, dict[str, list[str]], list[str]]] = {
    "of the family that the service has": (
        web(f"'{DNS}:8080'"),
        {DNS: ["10.0.0.1", "fd00::1"]},
        ["10.0.0.1:8080"],
    ),
    "of both families": (
        web(f"'{DNS}:8080'", BOTH),
        {DNS: ["10.0.0.1", "fd00::1"]},
        ["10.0.0.1:8080", "[fd00::1]:8080"],
    ),
    "beside declared ones and those of earlier names": (
        web(f"{{address: 10.0.0.1, weight: 7}}, '{DNS}', '{SRV}'"),
        {DNS: ["10.0.0.1", "10.0.0.2"], SRV: ["10.0.0.2:80", "10.0.0.3:8081"]},
        ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:8081"],
    ),
    "of a fallback alone": (
        web("", fallback=f"{{backends: ['{DNS}']}}"),
        {DNS: ["10.0.0.1"]},
        ["10.0.0.1:80"],
    ),
    "of a fallback beside backends": (
        web(f"'{SRV}'", fallback=f"{{backends: [10.0.0.8, '{DNS}']}}"),
        {DNS: ["10.0.0.1"], SRV: ["10.0.0.2:80"]},
        ["10.0.0.2:80"],
    ),
    "of a fallback that no backend is": (
        web(f"{{address: 10.0.0.1, weight: 0}}, '{SRV}'", fallback=f"{{backends: [10.0.0.8, '{DNS}']}}"),
        {DNS: ["10.0.0.1", "10.0.0.3", "10.0.0.8"], SRV: []},
        ["10.0.0.3:80", "10.0.0.8:80"],
    ),
}


def test_names_add_backends() -> None:
    found = {name: joined(block, names=names)[0] for name, (block, names, _) in JOINS.items()}
    assert found == {name: expected for name, (*_, expected) in JOINS.items()}


REFUSED = {
    "127.0.0.1": "it is a loopback address",
    "0.0.0.0": "it is an unspecified address",
    "224.0.0.1": "it is a multicast address",
    "255.255.255.255": "it is a broadcast address",
    "169.254.169.254": "link-local, and in no link-local network of allowed_backends",
    "fe80::1": "it is a link-local address",
    "::1": "it is a loopback address",
    "::ffff:10.0.0.1": '"::ffff:10.0.0.1" is an IPv4-mapped IPv6 address',
    "10.96.0.99": "it is the virtual IP of a service",
}


def test_an_address_that_no_backend_may_have_is_left_out_and_named() -> None:
    other = web("10.0.0.9", "10.96.0.99", "other")
    for fallback in (False, True):
        name = f"'{DNS}:80'"
        block = web("", BOTH, fallback=f"{{backends: [{name}]}}") if fallback else web(name, BOTH)
        serving, told = joined(block, other, names={DNS: ["10.0.0.1", *REFUSED, "fd00::1"]})
        assert serving == ["10.0.0.1:80", "[fd00::1]:80"]
        lines = {line.partition("; hint")[0] for line in told}
        start = "web: dns:web.internal:80 resolves to"
        for address, why in REFUSED.items():
            assert any(f"{start} {address}, which is left out: {why}" in line for line in lines), address


@pytest.mark.parametrize(
    ("allowed", "kept"),
    [
        ([], ["10.0.0.1", "192.0.2.1"]),
        (["10.0.0.0/8"], ["10.0.0.1"]),
        ({"etcd": ["10.0.0.0/8"]}, ["10.0.0.1", "192.0.2.1"]),
        (["10.0.0.0/8", "169.254.0.0/16"], ["10.0.0.1", "169.254.169.254"]),
    ],
)
def test_allowed_backends_holds_for_answers(allowed: object, kept: list[str]) -> None:
    names = {DNS: ["10.0.0.1", "192.0.2.1", "169.254.169.254"]}
    settings: dict[str, Any] = {"allowed_backends": allowed} if allowed else {}
    assert joined(web(f"'{DNS}'"), names=names, **settings)[0] == [f"{address}:80" for address in kept]


FACTS = {
    "gateways": {"10.0.0.254": "eth0"},
    "reserved_addresses": {"10.0.0.255": "the broadcast address of 10.0.0.0/24 on eth0"},
    "etcd_servers": frozenset({"10.0.0.20"}),
    "dependencies": {"10.0.0.53": ("a name server of this host", "")},
}
NEEDED = {
    "10.10.0.1": "an address of this host itself",
    "10.0.0.254": "a gateway of this host",
    "10.0.0.20": "an address of etcd, which feeds this host",
    "10.0.0.53": "a name server of this host",
    "10.0.0.255": "the broadcast address of 10.0.0.0/24 on eth0",
}


def test_no_name_leads_to_what_the_host_has_or_needs_unless_that_very_address_is_allowed() -> None:
    names = {DNS: [*NEEDED, "10.0.0.7"]}
    serving, told = joined(web(f"'{DNS}'"), names=names, facts=FACTS)
    assert serving == ["10.0.0.7:80"]
    for address, role in NEEDED.items():
        assert any(f"resolves to {address}, which is left out: it is {role}" in line for line in told)
    allowed = ["10.0.0.0/8", "10.10.0.1", "10.0.0.53/32"]
    serving, _ = joined(web(f"'{DNS}'"), names=names, facts=FACTS, allowed_backends=allowed)
    assert serving == ["10.0.0.53:80", "10.0.0.7:80", "10.10.0.1:80"]


def test_answers_are_followed_and_judged_again_when_the_host_or_others_change() -> None:
    async def story(vipd: Vipd) -> None:
        await resolved(vipd)
        assert backends(vipd) == ["10.0.0.1:80", "10.0.0.2:80"]
        writes = len(vipd.kernel.writes)
        vipd.names[SRV] = ["10.0.0.8:80"]
        await resolved(vipd)
        assert len(vipd.kernel.writes) == writes, "no service has that name"
        vipd.names[DNS] = ["10.0.0.2", "10.0.0.3", "127.0.0.1"]
        await resolved(vipd)
        assert backends(vipd) == ["10.0.0.2:80", "10.0.0.3:80"]
        assert len(await left_out(vipd)) == 1
        vipd.facts["gateways"] = {"10.0.0.2": "eth0"}
        await resolved(vipd)
        assert backends(vipd) == ["10.0.0.3:80"]
        vipd.facts["gateways"] = {}
        vipd.declare(web(f"'{DNS}'"), web("10.0.0.9", "10.0.0.3", "vip"))
        await vipd.reload()
        await resolved(vipd)
        assert backends(vipd) == ["10.0.0.2:80"], "the other one is a virtual IP now"
        external = "{name: ext, external_addresses: [10.0.0.2], ports: [80/tcp], backends: [10.0.0.9]}"
        vipd.declare(web(f"'{DNS}'"), f"  - {external}\n")
        await vipd.reload()
        assert backends(vipd) == ["10.0.0.3:80"], "nor does it lead to an external address at its port"
        vipd.declare(web(f"'{DNS}:8080'"), f"  - {external}\n")
        await vipd.reload()
        assert backends(vipd) == ["10.0.0.2:8080", "10.0.0.3:8080"]
        vipd.declare(web("10.0.0.4"))
        await vipd.reload()
        vipd.names[DNS] = ["10.0.0.5"]
        await resolved(vipd)
        assert (backends(vipd), await left_out(vipd)) == (["10.0.0.4:80"], [])

    def prepare(vipd: Vipd) -> None:
        vipd.names[DNS] = ["10.0.0.1", "10.0.0.2"]
        vipd.declare(web(f"'{DNS}'"))

    running(story, prepare, simulated=True)


def test_what_names_add_is_no_part_of_the_declaration() -> None:
    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(5)
        view = await vipd.service("web")
        assert view["spec"]["backends"] == [{"dns": "web.internal"}]
        assert backends(vipd) == ["10.0.0.1:80"]
        assert (await vipd.ask("GET", "/v1/export")).body["services"] == [view["spec"]]

    def prepare(vipd: Vipd) -> None:
        vipd.names[DNS] = ["10.0.0.1"]
        vipd.declare(web(f"'{DNS}'"))

    running(story, prepare, simulated=True)


def test_many_refused_addresses_are_few_problems() -> None:
    answer = ["10.0.0.1", *(f"127.0.0.{n}" for n in range(60))]

    async def story(vipd: Vipd) -> None:
        await asyncio.sleep(5)
        assert len(await left_out(vipd)) == MOST
        (warning,) = (await vipd.status())["warnings"]
        assert warning.startswith("web: dns:web.internal resolves to 127.0.0.0, which is left out: ")
        assert warning.endswith(f" (and {MOST} more)")

    def prepare(vipd: Vipd) -> None:
        vipd.names[DNS] = answer
        vipd.declare(web(f"'{DNS}'"))

    running(story, prepare, simulated=True, dns_max_addresses=100)


def test_names_never_exceed_what_a_service_may_have() -> None:
    own = ", ".join(
        f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(1 << 16, (1 << 16) + BACKENDS - 5)
    )
    serving, _ = joined(web(f"{own}, '{DNS}'"), names={DNS: [f"10.200.0.{n}" for n in range(1, 20)]})
    assert len(serving) == BACKENDS
