"""A backend that registers itself brings no program, no pattern and no datagram to every host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.model.samples import service
from vipd.control.address_policy import AddressPolicy
from vipd.control.registrations import Registrar
from vipd.model.service import Origin, RegisteredBackend
from vipd.sources.etcd.values import read_registration, unit_name


def read(address: str, value: str) -> RegisteredBackend | str:
    """A registration, or what is wrong with it."""
    key = f"/vipd/v1/backends/web/{address}"
    found = read_registration(key, f"web/{address}", value)
    if isinstance(found, tuple):
        return RegisteredBackend(unit_name(key), found[1])
    return "\n".join(map(str, found.problems))


def registered(address: str, value: str) -> RegisteredBackend:
    found = read(address, value)
    assert isinstance(found, RegisteredBackend), found
    return found


@pytest.mark.parametrize(("sources", "left"), [(("file",), 1), ((), 1), (("file", "cli", "etcd"), 2)])
def test_checks_that_run_programs_are_left_out(sources: tuple[str, ...], left: int) -> None:
    plain = registered("10.244.0.1:80", "{weight: 2}")
    program = registered("10.244.0.2:80", "{check: {type: exec, command: [/bin/true]}}")
    registrar = Registrar()
    registrar.set_registrations({"web": (plain, program)}, AddressPolicy(exec_sources=sources))
    web = registrar.with_registered(replace(service("web", "10.96.0.1"), origin=Origin("etcd", "/s/web")))
    assert [b.address for b in web.backends if b.registered] == ["10.244.0.1", "10.244.0.2"][:left]
    assert len(registrar.ignored("web")) == 2 - left


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (
            "{type: tcp, interval: 100ms, timeout: 100ms}",
            "check.interval: a registered backend's check asks every 0.1 s, from every host",
        ),
        ("{type: udp, send: ping}", "check.send: a registered backend's check sends no datagrams of its own"),
        ("{type: http, body: 'a+'}", "check.body: a registered backend's check wants plain text"),
        ("{type: dns, query: example.com}", ""),
        ("{type: http, method: HEAD}", ""),
        ("tcp", ""),
    ],
)
def test_a_registration_has_no_host_work_for_it(check: str, fault: str) -> None:
    found = read("10.244.0.1:80", f"{{check: {check}}}")
    assert isinstance(found, RegisteredBackend) is not bool(fault)
    assert not fault or fault in str(found)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1:80", "[::1]:80", "224.0.0.1:80", "0.0.0.0:80", "[::]:80", "[fe80::1]:80"),
        *("[ff02::1]:80", "255.255.255.255:80", "[::ffff:169.254.169.254]:80", "0177.0.0.1:80", "2130706433"),
    ],
)
def test_what_is_no_unicast_address_cannot_be_registered(address: str) -> None:
    assert isinstance(read(address, ""), str)
